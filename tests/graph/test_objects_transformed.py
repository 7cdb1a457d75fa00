# SPDX-License-Identifier: Apache-2.0
"""NNX objects in a jitted function that ``jax.grad`` or ``jax.vmap`` is applied to."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera.errors import TesseraWarning, WriteBackError
from tests.graph.nnx_modules import X, block, check_equal, loss_of, state_of


def linear():
    return nnx.Linear(4, 4, rngs=nnx.Rngs(0))


def loss_by_update(params, model, x):
    """Of the model, with other parameters in it."""
    nnx.update(model, params)
    return jnp.mean(model(x) ** 2)


OUTER = [ts.jit, jax.jit, lambda step: step]


@pytest.mark.slow(reason="it compiles several programs")
@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("transform", [jax.grad, lambda f: jax.vmap(f, axis_size=2)])
def test_a_change_of_a_model_from_outside_is_refused(outer, transform):
    model = linear()
    params, before = nnx.state(model, nnx.Param), state_of(model)
    several = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), params)
    given = params if transform is jax.grad else several

    def step(given):
        return transform(lambda p: ts.jit(loss_by_update)(p, model, X))(given)

    with pytest.raises(WriteBackError, match="T320"):
        outer(step)(given)
    check_equal(state_of(model), before)


@pytest.mark.parametrize("outer", OUTER)
def test_a_model_that_the_call_makes_itself_may_change(outer):
    graphdef, params = nnx.split(linear(), nnx.Param)

    def loss(params, x):
        model = nnx.merge(graphdef, params)
        model.kernel[...] = model.kernel[...] * 2
        return jnp.mean(model(x) ** 2)

    found = outer(lambda p: jax.grad(lambda p: ts.jit(loss)(p, X))(p))(params)
    expected = jax.grad(loss)(params, X)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6), found, expected
    )


@pytest.mark.full
def test_a_model_of_the_transformation_itself_keeps_its_changes():
    """Flax's own gradient makes the model anew inside of the transformation."""
    ours, theirs = block(), block()
    with warnings.catch_warnings():
        warnings.simplefilter("error", TesseraWarning)
        found = ts.jit(nnx.grad(ts.jit(loss_of)))(ours, X)
    expected = nnx.jit(nnx.grad(loss_of))(theirs, X)
    check_equal(state_of(found), state_of(expected))
    check_equal(state_of(ours), state_of(theirs))


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("options", [{}, {"in_specs": {"inputs": P()}}])
def test_a_model_from_outside_can_be_read(outer, options):
    model = linear()
    before = state_of(model)
    mesh = ts.Mesh(["dp"], devices=[0]) if options else None
    call = ts.jit(nnx.Linear.__call__, mesh=mesh, **options)

    def step(x):
        slope = jax.grad(lambda x: jnp.sum(call(model, x)))(x)
        mapped = jax.vmap(lambda row: call(model, row))(x)
        carry, _ = jax.lax.scan(lambda c, _: (call(model, c), None), x, length=2)
        return slope, mapped, carry

    slope, mapped, carry = outer(step)(X)
    np.testing.assert_allclose(
        slope, jnp.broadcast_to(model.kernel[...].sum(1), X.shape), rtol=1e-6
    )
    np.testing.assert_allclose(mapped, model(X), rtol=1e-6)
    np.testing.assert_allclose(carry, model(model(X)), rtol=1e-6)
    check_equal(state_of(model), before)


def test_a_model_from_outside_is_not_a_result():
    model = linear()

    def with_model(model, x):
        return model, jnp.sum(model(x))

    with pytest.raises(WriteBackError, match="a part of its result"):
        jax.grad(lambda x: ts.jit(with_model)(model, x)[1])(X)
    assert model(X).shape == X.shape
