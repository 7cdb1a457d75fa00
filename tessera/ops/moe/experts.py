# SPDX-License-Identifier: Apache-2.0
"""The experts of a mixture: gated MLPs, and all-to-all between devices.

The collectives here run in an SPMD region over the axes that they are given.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from tessera.ops.activations import GATES


class Weights(NamedTuple):
    """The parameters of one layer of experts, or their shapes, or their layouts.

    Attributes:
      router: ``[D, E]``.
      gate: ``[E, D, F]``.
      up: ``[E, D, F]``.
      down: ``[E, F, D]``.
      router_bias: ``[E]``; None, as the others, if experts have no biases.
      gate_bias: ``[E, F]``.
      up_bias: ``[E, F]``.
      down_bias: ``[E, D]``.
    """

    router: Any
    gate: Any
    up: Any
    down: Any
    router_bias: Any = None
    gate_bias: Any = None
    up_bias: Any = None
    down_bias: Any = None


def grouped(rows_RD: Array, sizes_E: Array, weights: Weights, activation: str) -> Array:
    """Each expert on its own group of rows, by ragged matmuls.

    Args:
      rows_RD: ``[R, D]``, rows of expert 0 first, then those of 1, and so on.
      sizes_E: int32, the number of rows of each expert. The results of rows after the
        last group are undefined.
      weights: Of these experts.
      activation: Of the gates, by its name.

    Returns:
      ``[R, D]``.

    Source: MegaBlocks, arXiv 2211.15841; GeGLU, arXiv 2002.05202.
    """
    matmul = partial(lax.ragged_dot, group_sizes=sizes_E)

    def of_rows(bias_EF: Array) -> Array:
        # Rows after the last group have none: their gradients are undefined, too.
        rest = jnp.append(sizes_E, len(rows_RD) - sizes_E.sum())
        padded = jnp.pad(bias_EF, ((0, 1), (0, 0)))
        return jnp.repeat(padded, rest, axis=0, total_repeat_length=len(rows_RD))

    return _gated_mlp(rows_RD, weights, matmul, of_rows, activation)


def batched(rows_ECD: Array, weights: Weights, activation: str) -> Array:
    """Each expert on the same number of rows: ``[E, C, D]`` to ``[E, C, D]``."""

    def of_rows(bias_EF: Array) -> Array:
        return bias_EF[:, None]

    return _gated_mlp(rows_ECD, weights, jnp.matmul, of_rows, activation)


def _gated_mlp(
    rows: Array,
    weights: Weights,
    matmul: Callable[..., Array],
    of_rows: Callable[[Array], Array],
    activation: str,
) -> Array:
    def project(rows: Array, kernel: Array, bias: Array | None) -> Array:
        out = matmul(rows, kernel)
        return out if bias is None else out + of_rows(bias).astype(out.dtype)

    gate = project(rows, weights.gate, weights.gate_bias)
    up = project(rows, weights.up, weights.up_bias)
    return project(GATES[activation](gate, up), weights.down, weights.down_bias)


def all_to_all(buffer: Array, axes: tuple[str, ...], *, reverse: bool = False) -> Array:
    """Send block p to device p, and receive one block from each.

    Over several axes, outer first, a block makes one hop per axis: first along the last
    axis, to the device with the inner coordinate of its destination, and then across.
    So the outer links carry few large messages instead of many small ones. The reverse
    makes the same hops in the opposite order.

    Args:
      buffer: ``[P, ...]``, one block for each device; the rank along the last axis
        varies fastest.
      axes: Mesh axes of the region.
      reverse: Whether to undo an exchange.

    Returns:
      ``[P, ...]``, block p from device p.
    """
    sizes = tuple(lax.axis_size(axis) for axis in axes)
    grid = buffer.reshape(*sizes, *buffer.shape[1:])
    hops = list(enumerate(axes))
    for dim, axis in hops if reverse else reversed(hops):
        grid = lax.all_to_all(grid, axis, dim, dim, tiled=True)
    return grid.reshape(buffer.shape)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def sum_of_results(x: Array, axes: tuple[str, ...]) -> Array:
    """``psum`` of a result of the region that is replicated along the axes.

    A region with ``check_vma=False`` gives each of n devices 1 / n of the gradient of
    such a result. The gradient of ``psum`` would add these up in an all-reduce as large
    as the result; n times the device's own part is the same.
    """
    return lax.psum(x, axes)


def _forward(x: Array, axes: tuple[str, ...]) -> tuple[Array, None]:
    return lax.psum(x, axes), None


def _backward(axes: tuple[str, ...], _: None, gradient: Array) -> tuple[Array]:
    return (gradient * lax.psum(1, axes),)


sum_of_results.defvjp(_forward, _backward)
