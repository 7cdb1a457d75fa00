# SPDX-License-Identifier: Apache-2.0
"""NNX objects in a jitted function that ``jax.grad`` or ``jax.vmap`` is applied to."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tessera as ts
from tessera.errors import TesseraWarning
from tests.graph.nnx_modules import X, block, check_equal, loss_of, state_of

STAYS = "'{}' changed a {} inside of jax.grad or another transformation"


def linear():
    return nnx.Linear(4, 4, rngs=nnx.Rngs(0))


def loss_by_update(params, model, x):
    """Of the model, with other parameters in it."""
    nnx.update(model, params)
    return jnp.mean(model(x) ** 2)


def gradient(jit, outer):
    inner = jit(loss_by_update)

    def step(params, model, x):
        return jax.value_and_grad(lambda p: inner(p, model, x))(params)

    return outer(step)


@pytest.mark.slow(reason="it compiles several programs")
@pytest.mark.parametrize("outer", [ts.jit, jax.jit, lambda step: step])
def test_an_update_inside_of_jax_grad_stays_in_the_call_as_in_jax_jit(outer):
    model = linear()
    params = jax.tree.map(lambda leaf: leaf * 2, nnx.state(model, nnx.Param))
    expected = jax.jit(gradient(jax.jit, jax.jit))(params, model, X)
    before = state_of(model)
    with pytest.warns(TesseraWarning, match=STAYS.format("loss_by_update", "Linear")):
        found = gradient(ts.jit, outer)(params, model, X)
    jax.tree.map(np.testing.assert_allclose, found, expected)
    check_equal(state_of(model), before)


def test_an_update_inside_of_jax_vmap_stays_in_the_call():
    model = linear()
    params = nnx.state(model, nnx.Param)
    several = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf * 2]), params)

    def losses(inner):
        return jax.vmap(lambda p: inner(p, model, X))(several)

    with pytest.warns(TesseraWarning, match="loss_by_update"):
        found = ts.jit(lambda: losses(ts.jit(loss_by_update)))()
    np.testing.assert_allclose(found, losses(jax.jit(loss_by_update)), rtol=1e-6)


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


def test_a_model_that_is_only_read_is_no_reason_to_warn():
    model = linear()

    def step(x):
        return jax.grad(lambda x: jnp.sum(ts.jit(nnx.Linear.__call__)(model, x)))(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error", TesseraWarning)
        found = ts.jit(step)(X)
    np.testing.assert_allclose(
        found, jnp.broadcast_to(model.kernel[...].sum(1), X.shape), rtol=1e-6
    )


def test_objects_that_share_a_variable_share_it_in_the_call():
    first, second = linear(), linear()
    second.kernel = first.kernel

    def loss(scale, first, second):
        first.kernel[...] = first.kernel[...] * scale
        return jnp.sum(second.kernel[...])

    def slope(jit):
        return jax.grad(lambda s: jit(loss)(s, first, second))(jnp.float32(2.0))

    expected = jnp.sum(first.kernel[...])
    with pytest.warns(TesseraWarning):
        found = ts.jit(lambda: slope(ts.jit))()
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert second.kernel is first.kernel
