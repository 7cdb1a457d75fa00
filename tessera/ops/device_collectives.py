# SPDX-License-Identifier: Apache-2.0
"""The collectives on the block of one device, inside an SPMD region.

JAX checks (``check_vma``) which values may differ between devices: a replicated result
must come from a primitive whose result is typed as replicated.
"""

import math
from collections.abc import Iterable
from typing import Literal, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tessera.errors import ShardDivisibilityError, nearest_multiples
from tessera.jax_compat import traces

Reduction: TypeAlias = Literal["sum", "mean", "max", "min"]


def reduce(block: Array, axes: tuple[str, ...], op: Reduction) -> Array:
    """Reduce the blocks of all devices; a sum over several axes is hierarchical."""
    block = traces.varying_over(block, axes)
    match op:
        case "sum":
            return _hierarchical_sum(block, axes)
        case "mean":
            total = _hierarchical_sum(block, axes)
            return total / jnp.asarray(lax.axis_size(axes), total.dtype)
        case "max":
            return lax.pmax(block, axes)
        case "min":
            return lax.pmin(block, axes)


def _hierarchical_sum(block: Array, axes: tuple[str, ...]) -> Array:
    *outer, inner = axes
    if not outer or not block.size:
        return lax.psum(block, axes)
    flat = block.reshape(-1)
    padding = -flat.size % lax.axis_size(inner)
    part = lax.psum_scatter(jnp.pad(flat, (0, padding)), inner, tiled=True)
    part = _hierarchical_sum(part, tuple(outer))
    whole = traces.all_gather_invariant(part, (inner,), 0)
    return whole[: flat.size].reshape(block.shape)


def reduce_scatter(
    block: Array, axes: tuple[str, ...], dim: int, op: Reduction
) -> Array:
    """This device's part, along ``dim``, of the reduced blocks."""
    part = _part_of_sum(block, axes, dim)
    if op == "sum":
        return part
    return part / jnp.asarray(lax.axis_size(axes), part.dtype)


def _part_of_sum(block: Array, axes: tuple[str, ...], dim: int) -> Array:
    _check_divides(block, axes, dim)
    if not block.size:
        return _empty(block, dim, block.shape[dim] // lax.axis_size(axes), over=axes)
    # JAX sums values that vary over all of the axes or over none, not over some.
    block = traces.varying_over(block, axes)
    return lax.psum_scatter(block, axes, scatter_dimension=dim, tiled=True)


def all_gather(block: Array, axes: tuple[str, ...], dim: int) -> Array:
    """The blocks of all devices concatenated along ``dim``."""
    if not block.size:
        alike = traces.varying_axes(block) - set(axes)
        return _empty(block, dim, block.shape[dim] * lax.axis_size(axes), over=alike)
    return traces.all_gather_invariant(block, axes, dim)


def all_to_all(block: Array, axes: tuple[str, ...], split: int, concat: int) -> Array:
    """Part ``rank`` of every block, concatenated along ``concat``."""
    _check_divides(block, axes, split)
    return lax.all_to_all(block, axes, split, concat, tiled=True)


def broadcast(block: Array, axes: tuple[str, ...], root: int) -> Array:
    """The root's block."""
    return lax.psum(_only_of(block, axes, root), axes).astype(block.dtype)


def scatter(block: Array, axes: tuple[str, ...], root: int, dim: int) -> Array:
    """This device's part of the root's block."""
    part = _part_of_sum(_only_of(block, axes, root), axes, dim)
    return part.astype(block.dtype)


def _only_of(block: Array, axes: tuple[str, ...], root: int) -> Array:
    """The block on its root and zeros elsewhere, so that a sum broadcasts it."""
    if block.dtype == jnp.bool_:
        block = block.astype(jnp.int8)
    # The rank along axes of one device is a constant, which varies over none of them.
    block = traces.varying_over(block, axes)
    return jnp.where(lax.axis_index(axes) == root, block, jnp.zeros_like(block))


def gather(block: Array, axes: tuple[str, ...], root: int, dim: int) -> Array:
    """The blocks of all devices on the root, zeros elsewhere."""
    if block.size:
        whole = lax.all_gather(block, axes, axis=dim, tiled=True)
    else:
        whole = all_gather(block, axes, dim)
    return jnp.where(lax.axis_index(axes) == root, whole, jnp.zeros_like(whole))


def recv(
    block: Array, axes: tuple[str, ...], pairs: tuple[tuple[int, int], ...]
) -> Array:
    """The received block, or the device's own where it receives none."""
    received = permuted(block, axes, pairs)
    receivers = jnp.asarray([destination for _, destination in pairs])
    return jnp.where(jnp.isin(lax.axis_index(axes), receivers), received, block)


def permuted(
    block: Array, axes: tuple[str, ...], pairs: Iterable[tuple[int, int]]
) -> Array:
    """``lax.ppermute`` by ranks along the axes in the given order, outer first.

    Devices that receive nothing get zeros. JAX itself counts ranks in the order of the
    mesh, whatever the order of the names.
    """
    ordered = tuple(axis for axis in traces.manual_axes() if axis in axes)
    sizes = [lax.axis_size(axis) for axis in axes]
    ranks = np.arange(math.prod(sizes)).reshape(sizes)
    # The rank at each index of the mesh, and its inverse.
    rank_at = ranks.transpose([axes.index(axis) for axis in ordered]).ravel()
    index_of = np.argsort(rank_at)
    jax_pairs = [(int(index_of[a]), int(index_of[b])) for a, b in pairs]
    return lax.ppermute(block, ordered, jax_pairs)


def _empty(block: Array, dim: int, size: int, over: Iterable[str]) -> Array:
    """An empty block of another size: XLA has no collectives of empty arrays."""
    shape = (*block.shape[:dim], size, *block.shape[dim + 1 :])
    return traces.varying_over(jnp.zeros(shape, block.dtype), over)


def _check_divides(block: Array, axes: tuple[str, ...], dim: int) -> None:
    count, size = lax.axis_size(axes), block.shape[dim]
    if size % count:
        near = nearest_multiples(count, size)
        raise ShardDivisibilityError(
            f"a block cannot be divided evenly over mesh axes {axes!r}",
            got=f"block of shape {block.shape}, dim {dim} = {size}, axis size {count}",
            fix=f"make dim {dim} of the block {near}, or use another dim",
        )
