# SPDX-License-Identifier: Apache-2.0
"""x.transpose(1, 2) swaps two dims in a ts.function, and nothing else changes."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tessera as ts
from tessera.errors import OperandError, TesseraWarning
from tessera.graph.tracer.torch_transpose import enable_torch_transpose
from tessera.tracing import scope

X = np.arange(120, dtype=np.float32).reshape(2, 3, 4, 5)


@pytest.mark.parametrize("dims", [(1, 2), (2, 1), (0, 3), (-1, -2), (1, 1)])
def test_two_integers_swap_these_dims_of_a_larger_array(dims):
    @ts.function
    def swapped(x):
        return x.transpose(*dims)

    np.testing.assert_array_equal(swapped(jnp.asarray(X)), X.swapaxes(*dims))


def test_other_calls_mean_what_they_mean_in_jax():
    @ts.function
    def several(x, matrix):
        return (
            x.transpose(),
            x.transpose((3, 1, 0, 2)),
            x.transpose(3, 1, 0, 2),
            x.transpose(None),
            matrix.transpose((0, 1)),
            matrix.transpose(1, 0),
        )

    expected = (
        X.transpose(),
        X.transpose(3, 1, 0, 2),
        X.transpose(3, 1, 0, 2),
        X.transpose(),
        X[0, 0],
        X[0, 0].T,
    )
    for one, other in zip(several(X, X[0, 0]), expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dims", [(0, 1), (-2, -1)])
def test_an_order_of_two_dims_that_changes_nothing_is_warned_of(dims):
    matrix = X[0, 0]
    with pytest.warns(
        TesseraWarning, match=r"changes nothing, as in NumPy: write x\.T"
    ):
        same = ts.function(lambda x: x.transpose(*dims))(matrix)
    np.testing.assert_array_equal(same, matrix)


def test_it_holds_in_loops_gradients_and_for_arrays_that_are_captured():
    captured = jnp.asarray(X)

    @ts.function
    def mixed(x):
        def body(total, row):
            return total + (row.transpose(0, 1) ** 2).sum(), None

        loss, _ = jax.lax.scan(body, jnp.float32(0.0), x.transpose(1, 2))
        batched = jax.vmap(lambda row: row.transpose(1, 2))(x)
        return ts.grad(loss, x), batched, captured.transpose(1, 2)

    gradient, batched, swapped = mixed(jnp.asarray(X))
    np.testing.assert_array_equal(gradient, 2 * X)
    np.testing.assert_array_equal(batched, X.swapaxes(2, 3))
    np.testing.assert_array_equal(swapped, X.swapaxes(1, 2))


def test_a_dim_that_there_is_not_is_an_error():
    with pytest.raises(OperandError) as caught:
        ts.function(lambda x: x.transpose(1, 7))(jnp.asarray(X))
    assert str(caught.value) == (
        "[T401] the operand of transpose does not have this dim\n"
        "  got: dim=7, shape (2, 3, 4, 5)\n"
        "  fix: use a dim from -4 to 3\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T401.html"
    )


def test_outside_of_a_trace_of_tessera_jax_refuses_as_before():
    ts.function(lambda x: x.transpose(1, 2))(jnp.asarray(X))
    with pytest.raises(TypeError, match="permutation"):
        jnp.asarray(X).transpose(1, 2)
    with pytest.raises(TypeError, match="permutation"):
        jax.jit(lambda x: x.transpose(1, 2))(X)


def test_another_thread_sees_nothing_of_an_open_trace():
    refused = []

    def elsewhere():
        try:
            jnp.asarray(X).transpose(1, 2)
        except TypeError:
            refused.append(True)

    enable_torch_transpose()
    with scope.opened(scope.Scope()):
        assert jnp.asarray(X).transpose(1, 2).shape == (2, 4, 3, 5)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert refused == [True]


def test_the_method_is_put_in_place_once():
    enable_torch_transpose()
    before = jax.core.Tracer.transpose
    enable_torch_transpose()
    assert jax.core.Tracer.transpose is before
