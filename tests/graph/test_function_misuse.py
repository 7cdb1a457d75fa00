# SPDX-License-Identifier: Apache-2.0
"""Calls that a function does not take."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import tessera as ts
from tessera import op
from tessera.errors import ArgumentError, UndecidedRoleError

X = jnp.ones(8)


def test_a_call_that_does_not_fit_names_the_function_and_its_signature():
    @ts.function
    def update(weights: ts.Tensor["..."], batch, *, rate=0.1): ...

    with pytest.raises(ArgumentError) as caught:
        update(X, X, X, rate=0.2)
    assert str(caught.value) == (
        "[T301] 'update' cannot be called like this: too many positional arguments\n"
        "  got: 3 positional arguments, and by keyword 'rate'\n"
        "  fix: call it as update(weights, batch, *, rate=0.1)\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T301.html"
    )
    with pytest.raises(ArgumentError, match="missing a required argument: 'batch'"):
        update.trace(X)
    with pytest.raises(ArgumentError, match="did you mean 'rate'"):
        update(X, X, rat=0.2)


@pytest.mark.parametrize(
    "wrap",
    [
        ts.function,
        ts.graph.training_step,
        ts.graph.stage("first"),
        ts.distribute("data_parallel"),
        ts.value_and_grad,
        ts.function(mesh=ts.Mesh(["dp"], devices=range(8))),
    ],
)
def test_whatever_compiles_a_function_says_how_it_is_called(wrap):
    def total(weights, batch):
        return jnp.sum(weights * batch)

    with pytest.raises(TypeError, match="'total' cannot be called like this"):
        wrap(total)(X)


def test_a_call_inside_another_function_that_does_not_fit_names_the_inner_one():
    @ts.function
    def inner(x: ts.Tensor[ts.f32]):
        return x

    for function in (inner, op.kernel(lambda x: x)):
        outer = ts.function(lambda x, inner=function: inner(x, x))
        with pytest.raises(ArgumentError, match="too many positional arguments"):
            outer(X)


def test_a_shape_is_no_array_to_run_on_and_is_named_by_its_path():
    with pytest.raises(ArgumentError, match="argument 'tree/x' has no values"):
        ts.jit(lambda tree: tree["x"] + 1)({"x": jax.ShapeDtypeStruct((3,), "f4")})


def test_a_shape_of_which_a_function_uses_the_sizes_alone_is_taken_as_by_jax():
    shape = jax.ShapeDtypeStruct((3, 2), "f4")
    for jit in (jax.jit, ts.jit):
        assert jit(lambda x, y: x * y.shape[0])(X, shape)[0] == 3.0


def test_a_leaked_tracer_is_explained_as_jax_explains_it():
    leaked = []
    ts.jit(lambda x: leaked.append(x) or x)(X)
    one = ts.jit(lambda x: x + 1)
    for call in (lambda: one(leaked[0]), ts.jit(lambda: leaked[0] + 1)):
        with pytest.raises(jax.errors.UnexpectedTracerError, match="side effect"):
            call()


def test_a_traceback_has_the_users_frames_and_one_of_the_function():
    def product(x):
        return x @ X[:3]

    for jit in (jax.jit, ts.jit):
        with pytest.raises(TypeError, match="dot_general") as caught:
            jit(product)(X)
        files = [Path(str(frame.path)).name for frame in caught.traceback]
        own = [name for name in files if name == "function.py"]
        assert files[0] == Path(__file__).name
        assert own == ["function.py"] * (jit is ts.jit)
        assert len(files) - len(own) <= 5


def test_the_argument_that_may_be_a_key_is_not_split_by_what_an_error_says():
    step = ts.distribute("fsdp")(lambda w, x, key: w + x + jax.random.normal(key))
    with pytest.raises(UndecidedRoleError) as caught:
        step(X, X, jax.random.PRNGKey(0))
    text = str(caught.value)
    assert "which of 'w', 'x' are what" in text
    assert "'key' looks like a raw PRNG key" in text


def test_a_shape_is_no_result():
    shape = jax.ShapeDtypeStruct((3, 2), "f4")
    for jit in (ts.jit, jax.jit):
        with pytest.raises(TypeError, match=r"no values|does not have a value"):
            jit(lambda x: (x, shape))(X)
