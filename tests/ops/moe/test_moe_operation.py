# SPDX-License-Identifier: Apache-2.0
"""op.moe as a user writes it: parameters, layouts, gradients, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tessera as ts
from tessera import graph, op
from tessera.errors import (
    OperandError,
    OutsideTraceError,
    ShardDivisibilityError,
    UnknownAxisError,
)
from tessera.mesh import Mesh
from tessera.ops.moe.experts import Weights
from tessera.ops.moe.moe_operation import moe
from tessera.ops.moe.routing import RoutingOptions
from tests.ops.moe.reference import reference

X = np.random.default_rng(0).normal(size=(4, 6, 8)).astype("f4")


def moe_step(mesh=None, **options):
    @graph.training_step(mesh=mesh)
    def step(x):
        out, router = moe(x, **{"experts": 4, "hidden": 16} | options)
        loss = (out**2).mean() + 0.1 * router.load_balancing_loss
        return out, router, graph.backward(loss)

    return step


def filled(step, *args):
    step.trace(*args)
    draw = np.random.default_rng(1)
    step.params = jax.tree.map(
        lambda p: draw.normal(size=p.shape, scale=0.4).astype("f4"), step.params
    )
    return step


def test_it_declares_a_router_and_experts():
    step = moe_step()
    step.trace(X)
    shapes = {name: p.shape for name, p in step.params["moe"].items()}
    assert shapes == {
        "router": (8, 4),
        "gate": (4, 8, 16),
        "up": (4, 8, 16),
        "down": (4, 16, 8),
    }


def test_an_expert_is_four_times_as_wide_as_its_input_unless_told():
    step = moe_step(hidden=None)
    step.trace(X)
    assert step.params["moe"]["up"].shape == (4, 8, 32)


def test_it_computes_what_the_reference_computes():
    step = filled(moe_step(top_k=3), X)
    out, router, _ = step(X)
    weights = Weights(**step.params["moe"])
    wanted = reference(jnp.asarray(X), weights, RoutingOptions(top_k=3))
    np.testing.assert_allclose(out, wanted, atol=1e-5)
    assert router.tokens_per_expert.sum() == 4 * 6 * 3


@pytest.mark.slow(reason="the one test of experts on a mesh with gradients")
@pytest.mark.parametrize(
    ("axes", "sizes", "axis"),
    [
        pytest.param(["fsdp", "ep", "tp"], [2, 2, 2], "ep", marks=pytest.mark.full),
        pytest.param(
            *(["across", "inside"], [2, 2], ("across", "inside")),
            marks=pytest.mark.full,
        ),
        (["dp", "tp"], [2, 2], "ep"),
    ],
    ids=str,
)
def test_on_a_mesh_it_computes_the_same(axes, sizes, axis):
    want = filled(moe_step(), X)(X)
    mesh = Mesh(axes, devices=range(int(np.prod(sizes))), shape=sizes)
    step = filled(moe_step(mesh, axis=axis), X)
    got = step(X)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_experts_are_split_over_ep_hidden_dims_over_tp_the_others_over_fsdp():
    mesh = Mesh(["fsdp", "ep", "tp"], devices=range(8), shape=[2, 2, 2])
    step = moe_step(mesh)
    step.trace(X)
    local = {name: p.local_shape for name, p in step.params["moe"].items()}
    assert local == {
        "router": (8, 4),
        "gate": (2, 4, 8),
        "up": (2, 4, 8),
        "down": (2, 8, 4),
    }


@pytest.mark.full
def test_narrow_activations_stay_narrow():
    @graph.training_step()
    def step(x):
        return moe(x, experts=4)

    out, router = step(jnp.asarray(X, jnp.bfloat16))
    assert out.dtype == jnp.bfloat16
    assert router.z_loss.dtype == jnp.float32


@pytest.mark.full
def test_under_autocast_experts_are_narrow_and_the_router_is_not():
    @graph.training_step()
    def autocast_step(x):
        with ts.autocast("bf16"):
            return moe(x, experts=4, hidden=16)

    wide = filled(moe_step(), X)(X)
    narrow = filled(autocast_step, X)(X)
    assert np.abs(np.asarray(narrow[0] - wide[0])).max() > 1e-3
    assert narrow[1].z_loss == wide[1].z_loss


# --- mistakes


def test_outside_a_step_it_says_so():
    with pytest.raises(OutsideTraceError):
        moe(X, experts=4)


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (
            X[0],
            {},
            "[T401] moe takes activations of shape [batch, sequence, features]\n"
            "  got: shape (6, 8), dtype float32\n"
            "  fix: embed token ids first, and add a batch dim to single sequences\n"
            "  docs: https://tessera-spmd.github.io/tessera/errors/T401.html",
        ),
        (
            X,
            {"top_k": 5},
            "[T401] a token of moe cannot have that many experts\n"
            "  got: top_k=5, experts=4\n"
            "  fix: use a top_k from 1 to 4\n"
            "  docs: https://tessera-spmd.github.io/tessera/errors/T401.html",
        ),
        (
            X,
            {"buffer_factor": 0.0},
            "[T401] buffer_factor of moe is not positive\n"
            "  got: buffer_factor=0.0\n"
            "  fix: use buffer_factor=1 or more\n"
            "  docs: https://tessera-spmd.github.io/tessera/errors/T401.html",
        ),
    ],
    ids=["rank", "top_k", "buffer"],
)
def test_a_mistake_is_an_error_that_names_it(x, options, message):
    with pytest.raises(OperandError) as caught:
        moe_step(**options).trace(x)
    assert str(caught.value) == message


def test_experts_that_ep_does_not_divide_are_an_error():
    mesh = Mesh(["ep"], devices=range(4))
    with pytest.raises(ShardDivisibilityError, match="'moe/gate'"):
        moe_step(mesh, experts=6).trace(X)


def test_a_batch_that_the_axes_do_not_divide_is_an_error():
    mesh = Mesh(["dp", "ep"], devices=range(8), shape=[2, 4])
    with pytest.raises(ShardDivisibilityError, match="the batch of op"):
        moe_step(mesh).trace(X)


def test_an_axis_that_the_mesh_lacks_is_an_error():
    mesh = Mesh(["dp", "experts"], devices=range(4))
    with pytest.raises(UnknownAxisError, match="expert"):
        moe_step(mesh, axis="expert").trace(X)


def test_in_a_kernel_it_says_so():
    mesh = Mesh(["ep"], devices=range(4))

    @graph.training_step(mesh=mesh)
    def step(x):
        return op.kernel(lambda x: moe(x, experts=4)[0])(x)

    with pytest.raises(OperandError) as caught:
        step.trace(X)
    assert str(caught.value) == (
        "[T401] moe cannot be called in a kernel: it takes global arrays\n"
        "  got: an SPMD region over 'ep'\n"
        "  fix: call it outside of the kernel, on the kernel's arguments or results\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T401.html"
    )
