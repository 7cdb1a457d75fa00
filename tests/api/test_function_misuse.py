# SPDX-License-Identifier: Apache-2.0
"""Calls that a function does not take."""

import jax.numpy as jnp
import pytest

import tessera as ts
from tessera import op
from tessera.errors import ArgumentError

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
        "  docs: docs/errors/T301.md"
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
