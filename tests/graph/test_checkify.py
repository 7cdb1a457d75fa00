# SPDX-License-Identifier: Apache-2.0
"""``checkify``: a ``ts.function`` in it is checked as one of ``jax.jit`` is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import tessera as ts

X = jnp.linspace(-1.0, 1.0, 8, dtype=jnp.float32)
POSITIVE = jnp.abs(X) + 1


def checked(x):
    checkify.check(jnp.all(x > 0), "not positive: {low}", low=x.min())
    return jnp.log(x)


@pytest.mark.parametrize("x", [X, POSITIVE])
@pytest.mark.parametrize(
    ("function", "errors"),
    [
        (checked, checkify.user_checks),
        (jnp.log, checkify.nan_checks),
        (lambda x: x[jnp.int32(x.sum() * 9) + 20], checkify.index_checks),
        (lambda x: x / (x - X), checkify.float_checks | checkify.div_checks),
        (lambda x: jax.lax.map(checked, x), checkify.all_checks),
        (
            lambda x: ts.function(checked)(x) * ts.function(jnp.log)(x),
            checkify.user_checks | checkify.nan_checks,
        ),
    ],
)
def test_errors_are_those_that_a_jitted_function_has(function, errors, x):
    expected = checkify.checkify(jax.jit(lambda x: function(x)), errors=errors)(x)
    found = checkify.checkify(ts.function(lambda x: function(x)), errors=errors)(x)

    def what(error):
        return (error.get() or "").partition(" (`check` failed)")[0].splitlines()[:1]

    assert what(found[0]) == what(expected[0])
    np.testing.assert_array_equal(found[1], expected[1])


def test_a_check_of_a_gradient_is_functionalized():
    @ts.function
    def slope(x):
        return ts.grad(jnp.sum(jnp.sqrt(x * 0)), x)

    error, _ = checkify.checkify(slope, errors=checkify.nan_checks)(POSITIVE)
    assert "nan" in error.get()


def test_a_step_with_parameters_is_checked():
    from tessera import graph
    from tessera.tracing import scope

    @graph.training_step
    def step(x):
        weight = scope.parameter("weight", (8,), init="ones")
        return jnp.sum(checked(x * weight))

    error, _ = checkify.checkify(step)(X[None])
    assert "not positive: -1.0" in error.get()
    error, total = checkify.checkify(step)(POSITIVE[None])
    assert error.get() is None
    np.testing.assert_allclose(total, jnp.sum(jnp.log(POSITIVE)), rtol=1e-6)


def test_a_checked_function_may_be_compiled_by_tessera():
    function = ts.function(checkify.checkify(checked))
    error, _ = function(X)
    with pytest.raises(ValueError, match=r"not positive: -1\.0"):
        error.throw()
    error, found = function(POSITIVE)
    assert error.get() is None
    np.testing.assert_allclose(found, jnp.log(POSITIVE), rtol=1e-6)


def test_a_check_that_nobody_functionalizes_is_jaxs_error():
    with pytest.raises(ValueError, match="checkify"):
        ts.function(checked)(X)


def test_what_is_called_in_a_trace_of_jax_with_known_arrays_is_a_part_of_it():
    double = ts.function(lambda x: x * 2)
    program = jax.make_jaxpr(lambda: double(X))()
    assert "mul" in str(program)
