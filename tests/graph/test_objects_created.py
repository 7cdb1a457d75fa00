# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F821 - names of dims
"""NNX objects that a function creates share what they share in ``nnx.jit``."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tessera as ts
from tessera import op
from tessera.errors import KernelError, WriteBackError
from tessera.mesh import Mesh
from tests.graph.nnx_modules import check_equal, state_of

X = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)
ONE = Mesh(["dp"], devices=range(1))


class Tied(nnx.Module):
    """A model whose head has the embedding's weight."""

    def __init__(self, seed=0):
        self.embed = nnx.Linear(3, 3, rngs=nnx.Rngs(seed))
        self.head = nnx.Linear(3, 3, rngs=nnx.Rngs(seed + 1))
        self.head.kernel = self.embed.kernel

    def __call__(self, x):
        return self.head(jnp.tanh(self.embed(x)))


def eagerly():
    with jax.disable_jit():
        return ts.function(Tied)()


def assigned():
    holder: dict = {}

    def create(holder):
        holder["model"] = Tied()

    ts.function(create)(holder)
    return holder["model"]


def as_auxiliary():
    def loss(x):
        return x.sum(), Tied()

    return ts.value_and_grad(loss, has_aux=True)(X)[0][1]


@ts.distribute("tensor_parallel")
def in_a_region(x: ts.Tensor["B", "D"], w: ts.Tensor["D", "F"]):
    return Tied()


def on_a_mesh():
    with Mesh(["tp"], devices=range(1)):
        return in_a_region(X, X.T)


DOORS = {
    "function": ts.function(Tied),
    "mesh": ts.function(Tied, mesh=ONE),
    "container": lambda: ts.function(lambda x: {"model": [Tied()], "x": x})(X)["model"][
        0
    ],
    "beside an object": lambda: ts.function(lambda other: Tied())(Tied(7)),
    "compiled": lambda: ts.function(Tied).compile()(),
    "inside": ts.function(lambda: ts.function(Tied, mesh=ONE)()),
    "inside jax.jit": nnx.jit(lambda: ts.function(Tied)()),
    "remat": ts.function(lambda: ts.remat(lambda x: Tied())(X)),
    "eagerly": eagerly,
    "assigned": assigned,
    "auxiliary": as_auxiliary,
    "tensor parallel": on_a_mesh,
}


@pytest.mark.parametrize("door", DOORS)
def test_what_a_created_module_shares_stays_shared(door):
    model = DOORS[door]()
    assert model.head.kernel is model.embed.kernel
    check_equal(state_of(model), state_of(nnx.jit(Tied)()))


def test_a_created_model_trains_as_one_made_by_nnx():
    def train(model):
        optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
        for _ in range(3):
            slopes = nnx.grad(lambda model: jnp.mean((model(X) - 1.0) ** 2))(model)
            optimizer.update(model, slopes)
        return state_of(model)

    check_equal(train(ts.function(Tied)()), train(Tied()))


def test_created_objects_of_one_result_share_what_they_shared():
    def create():
        model, weight = Tied(), nnx.Param(jnp.ones(3))
        model.embed.model = nnx.data(model)  # and it may hold itself
        optimizer = nnx.Optimizer(model.head, optax.sgd(0.1), wrt=nnx.Param)
        return (
            {"model": model, "again": model, "part": model.embed},
            weight,
            (
                weight,
                optimizer,
            ),
        )

    for compiled in (nnx.jit(create), ts.function(create)):
        for _ in range(2):
            models, weight, (other, _) = compiled()
            assert models["model"] is models["again"]
            assert models["part"] is models["model"].embed
            assert models["part"].model is models["model"]
            assert weight is other


def test_a_created_module_keeps_a_mutable_array_to_itself():
    with pytest.raises(WriteBackError, match="a mutable array is returned"):
        ts.function(lambda: {"model": Tied(), "ref": jax.new_ref(jnp.ones(3))})()


def test_a_kernel_returns_no_module():
    with ONE, pytest.raises(KernelError, match="'result' holds NNX objects"):
        op.kernel(lambda x: Tied())(np.ones(3, np.float32))
