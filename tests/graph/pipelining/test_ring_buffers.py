# SPDX-License-Identifier: Apache-2.0
"""Residuals in a ring buffer: read as arrays are, and row by row in loops."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.graph.pipelining.ring_buffers import Stored
from tessera.graph.pipelining.stage_gradient import stage_gradient
from tests.graph.pipelines import cases
from tests.graph.pipelining.stages import STAGES
from tests.graph.pipelining.test_stage_gradient import equations_of


def in_a_buffer(residuals):
    """The arrays in the second of three slots; the others would show in any result."""

    def place(array):
        other = jnp.full_like(array, jnp.nan if array.dtype.kind in "fV" else 1)
        return Stored(jnp.stack([other, array, other]), jnp.int32(1))

    return [place(array) for array in residuals]


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("name", cases(STAGES, "mlp", "transformer, matmuls saved"))
def test_residuals_are_read_where_they_are_stored(name, splits):
    stage, weights, h, *more = STAGES[name]

    def with_nothing(*args):
        return stage(*args), None

    gradient = stage_gradient(with_nothing, weights, h, *more, splits_backward=splits)

    @partial(jax.jit, static_argnums=2)
    def run(weights, h, place):
        out, _, residuals = gradient.forward(weights, h, *more)
        back, rest = gradient.backward(place(residuals), weights, out, *more)
        if splits:
            rest = gradient.weight_gradients(place(rest), weights, *more)
        return back, rest

    jax.tree.map(
        np.testing.assert_array_equal,
        run(weights, h, in_a_buffer),
        run(weights, h, list),
    )


def test_a_loop_copies_no_stored_residuals_of_all_its_layers():
    stage, weights, h = STAGES["transformer, matmuls saved"]
    gradient = stage_gradient(
        lambda *args: (stage(*args), None), weights, h, splits_backward=False
    )

    def backward(residuals):
        return gradient.backward(in_a_buffer(residuals), weights, h)

    with jax.enable_x64(True):  # which has indices of two dtypes
        jax.eval_shape(backward, list(gradient.residuals))
    program = jax.make_jaxpr(backward)(list(gradient.residuals))
    reads = [
        equation.outvars[0].aval.shape[:2]
        for equation in equations_of(program)
        if equation.primitive.name == "dynamic_slice"
        and equation.outvars[0].aval.ndim == len(gradient.residuals[0].shape) + 1
    ]
    assert reads
    assert set(reads) == {(1, 1)}
