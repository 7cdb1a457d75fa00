# SPDX-License-Identifier: Apache-2.0
"""What ``jax.jit`` takes, ``ts.jit`` takes: the habits of JAX's users."""

import functools
import itertools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax._src.sharding_impls import GSPMDSharding  # noqa: TID251 - no public way
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera.errors import LayoutMismatchError

X = jnp.linspace(-1.0, 1.0, 8, dtype=jnp.float32)


def assert_alike(function, *args, **kwargs):
    found, expected = (
        ts.jit(function)(*args, **kwargs),
        jax.jit(function)(*args, **kwargs),
    )
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6), found, expected
    )


# --- annotations of others


class Training(NamedTuple):
    params: optax.Params
    opt_state: optax.OptState
    rng: "Missing"  # noqa: F821  # pyrefly: ignore


def test_annotations_of_other_libraries_are_left_alone():
    optimizer = optax.sgd(0.1, momentum=0.9)

    def train(state: Training, batch: optax.Updates) -> Training:
        slope = jax.grad(lambda w: jnp.sum((w - batch) ** 2))(state.params)
        updates, opt_state = optimizer.update(slope, state.opt_state)
        params = optax.apply_updates(state.params, updates)
        return Training(params, opt_state, state.rng)

    assert_alike(train, Training(X, optimizer.init(X), X), X + 1.0)


def test_a_train_state_of_flax_goes_in_and_comes_out():
    def apply(params, batch):
        return params["w"] * batch

    def train(state: TrainState, batch) -> TrainState:
        def loss(w):
            return jnp.sum((state.apply_fn(w, batch) - 1.0) ** 2)

        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    state = TrainState.create(apply_fn=apply, params={"w": X}, tx=optax.sgd(0.1))
    step = ts.jit(train)
    found, expected = state, state
    for _ in range(4):
        found, expected = step(found, X), jax.jit(train)(expected, X)
    np.testing.assert_allclose(found.params["w"], expected.params["w"], rtol=1e-6)
    assert found.step == 4
    assert step.num_programs() == 2  # its first step is a Python number


# --- functions that wrap others


@pytest.mark.parametrize(
    "function",
    [
        jax.vmap(jnp.sum),
        jax.vmap(lambda x, eps=1e-6: x / (jnp.sum(x) + eps)),
        jax.checkpoint(lambda x, axis=0: jnp.cumsum(x, axis)),
        jax.vmap(jnp.linalg.norm),
        jax.grad(lambda x, power=3: jnp.sum(x**power)),
        functools.partial(jnp.sum, axis=1),
    ],
    ids=["sum", "default", "checkpoint", "norm", "grad", "partial"],
)
def test_a_transformed_function_is_called_with_what_is_given(function):
    assert_alike(function, X.reshape(4, 2))


def test_a_decorator_may_change_the_arguments():
    def with_bias(function):
        @functools.wraps(function)
        def wrapper(*args):
            return function(args[0]) + args[1]

        return wrapper

    assert_alike(with_bias(jnp.sin), X, X)

    @with_bias
    def annotated(x: ts.Tensor["B"]):  # noqa: F821
        return x * 2.0

    assert_alike(annotated, X, X)


# --- transformations of a jitted function on a mesh


def on(mesh, *spec):
    return jax.device_put(X, NamedSharding(mesh.jax, P(*spec)))


@pytest.mark.parametrize("declared", [{}, {"in_specs": {"x": P("dp")}}], ids=["", "in"])
def test_it_is_transformed_on_arrays_of_a_mesh(dp_mesh, declared):
    step = ts.jit(lambda x, w: jnp.sum(jnp.sin(x) * w), **declared)
    with dp_mesh:
        x, w = on(dp_mesh, "dp"), on(dp_mesh)
        np.testing.assert_allclose(jax.grad(step)(x, w), jnp.cos(X) * X, rtol=1e-6)
        by_w = jax.grad(step, argnums=1)(x, w)
        np.testing.assert_allclose(by_w, jnp.sin(X), rtol=1e-6)
        slope = jax.jvp(step, (x, w), (w, w))[1]
        expected = jnp.sum(jnp.cos(X) * X * X + jnp.sin(X) * X)
        np.testing.assert_allclose(slope, expected, rtol=1e-5)


def test_it_is_mapped_over_arrays_of_a_mesh(dp_mesh):
    step = ts.jit(lambda x, w: x * w)
    with dp_mesh:
        found = jax.vmap(step, in_axes=(0, None))(on(dp_mesh, "dp"), on(dp_mesh))
    np.testing.assert_allclose(found, X[:, None] * X, rtol=1e-6)
    assert found.sharding.spec[0] == "dp"


# --- leaves that are no arrays


class Layer(eqx.Module):
    weight: jax.Array
    width: int
    scaled: bool
    scale: float = 0.5

    def __call__(self, x):
        return x[: self.width] * self.weight * (self.scale if self.scaled else 1.0)


def test_what_is_static_comes_back_as_it_went():
    step = ts.jit(lambda tree: tree | {"w": tree["w"] * len(range(tree["n"]))})
    tree = {"w": X, "n": 3, "rate": 0.1, "on": True, "name": "relu"}
    for _ in range(2):
        tree = step(tree)
    np.testing.assert_allclose(tree["w"], X * 9, rtol=1e-6)
    assert [type(tree[k]) for k in ("n", "rate", "on", "name")] == [
        int,
        float,
        bool,
        str,
    ]
    assert step.num_programs() == 1


def test_modules_of_equinox_with_numbers_are_taken_again():
    step = ts.jit(
        lambda layer, x: (eqx.tree_at(lambda m: m.weight, layer, x), layer(x))
    )
    layer = Layer(X, 8, True)
    for _ in range(2):
        layer, result = step(layer, X)
    np.testing.assert_allclose(result, X * X * 0.5, rtol=1e-6)
    assert layer.width == 8


def test_a_number_that_the_function_computes_is_an_array():
    found = ts.jit(lambda x, n: (n + 1000, 7.5, n))(X, 3)
    assert isinstance(found[0], jax.Array)
    assert isinstance(found[1], jax.Array)
    assert found[2] == 3


# --- arrays


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")
def test_an_array_of_64_bits_is_taken_as_jax_takes_it():
    with jax.enable_x64(True):
        numbers = jnp.arange(3)
    assert numbers.dtype == jnp.int64
    step = ts.jit(lambda x: x * 2)
    for _ in range(2):
        found = step(numbers)
        np.testing.assert_array_equal(found, [0, 2, 4])
        assert found.dtype == jax.jit(lambda x: x * 2)(numbers).dtype
    shape = jax.ShapeDtypeStruct((3,), "int64")
    assert step.eval_shape(shape).dtype == step.trace(shape).out_info.dtype == "int32"


def test_an_array_on_several_devices_says_on_which_mesh(dp_mesh):
    whole = on(dp_mesh).sharding._to_xla_hlo_sharding(1)
    there = jax.device_put(X, GSPMDSharding(dp_mesh.jax.devices, whole))
    with pytest.raises(LayoutMismatchError, match="'x' lies on several devices"):
        ts.jit(lambda x: x)(there)


# --- trees


@jax.tree_util.register_pytree_node_class
class Checked:
    """A tree that takes nothing but arrays, even when JAX makes it."""

    def __init__(self, value):
        assert isinstance(value, jax.Array), type(value)
        self.value = value

    def tree_flatten(self):
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_trees_that_check_themselves_are_made_of_arrays_alone(dp_mesh):
    step = ts.jit(lambda tree, x: (Checked(tree.value * x), {"t": tree}))
    for mesh in (None, dp_mesh):
        x = X if mesh is None else on(mesh, "dp")
        found, rest = step(Checked(x), x)
        np.testing.assert_allclose(found.value, X * X, rtol=1e-6)
        np.testing.assert_array_equal(rest["t"].value, X)


def test_an_iterator_may_be_closed_over():
    ones = itertools.repeat(1.0)
    assert_alike(lambda x: x + next(ones), X)


# --- objects under a strategy


@pytest.mark.slow(reason="it compiles a step of a model for eight devices")
def test_state_that_a_step_writes_and_does_not_read(dp_mesh):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(8, 8, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.drop(self.up(x))

    @ts.distribute("fsdp", mesh_axes=["dp"])
    def step(model, x):
        loss = jnp.mean(model(x) ** 2)
        weights = nnx.state(model, nnx.Param)
        slope = ts.grad(loss, weights)
        nnx.update(model, jax.tree.map(jnp.subtract, weights, slope))
        return loss

    model = Model(nnx.Rngs(0))
    before = int(model.drop.rngs.count.get_value())
    for _ in range(2):
        assert np.isfinite(step(model, jnp.ones((8, 8))))
    assert int(model.drop.rngs.count.get_value()) == before + 2


@pytest.mark.slow(reason="JAX looks for leaks among all objects of the process")
def test_leaks_are_checked_as_under_jax_jit(dp_mesh):
    leaked = []
    with jax.checking_leaks():
        np.testing.assert_allclose(ts.jit(lambda x: x * 2.0)(X), X * 2, rtol=1e-6)
        with dp_mesh:
            np.testing.assert_allclose(ts.jit(lambda x: x * 3.0)(X), X * 3, rtol=1e-6)
        with pytest.raises(Exception, match="Leaked"):
            ts.jit(lambda x: leaked.append(x))(X)
