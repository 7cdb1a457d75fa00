# SPDX-License-Identifier: Apache-2.0
"""Rows on their way between devices and back: all-to-all, in one hop or several.

Everything here is inside a manual region over the axes that it names.
"""

import functools

import jax
from jax import Array, lax


def num_devices(axes: tuple[str, ...]) -> int:
    """How many devices the axes span together."""
    return lax.psum(1, axes) if axes else 1


def all_to_all(
    buffer: Array, axes: tuple[str, ...], *, returning: bool = False
) -> Array:
    """Send block p to device p, and get one block from each.

    Over several axes, outer first, a block makes one hop for each: first inside, along
    the last axis, to the device that stands where its destination does, and then
    across. So the outer links carry few large messages instead of many small ones. The
    way back is the same hops in reverse.

    Args:
      buffer: ``[P, ...]``, one block for each device; rank along the last axis is
        fastest.
      axes: Mesh axes of the region.
      returning: Whether the blocks go back to where they came from.

    Returns:
      ``[P, ...]``, block p from device p.
    """
    sizes = tuple(lax.psum(1, axis) for axis in axes)
    grid = buffer.reshape(*sizes, *buffer.shape[1:])
    hops = list(enumerate(axes))
    for dim, axis in hops if returning else reversed(hops):
        grid = lax.all_to_all(grid, axis, dim, dim, tiled=True)
    return grid.reshape(buffer.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def sum_of_results(x: Array, axes: tuple[str, ...]) -> Array:
    """Add up what is a result of the region, the same on all devices along the axes.

    A region that does not track what varies gives each of n devices 1/n of the
    gradient of such a result. The gradient of ``psum`` adds these up again, in an
    all-reduce as large as the result; n times the own part is the same number.
    """
    return lax.psum(x, axes)


def _forward(x: Array, axes: tuple[str, ...]) -> tuple[Array, None]:
    return lax.psum(x, axes), None


def _backward(axes: tuple[str, ...], _: None, gradient: Array) -> tuple[Array]:
    return (gradient * lax.psum(1, axes),)


sum_of_results.defvjp(_forward, _backward)
