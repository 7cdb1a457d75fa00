# SPDX-License-Identifier: Apache-2.0
"""Compressed means over mesh axes, and their error bounds.

They run inside an SPMD region, on the blocks of one device, and return the same bits on
every device. ``gradient_averaging.py`` wraps them as Optax transformations.

``bf16`` and ``int8`` are all-reduces of two exchanges: device j receives the j-th part
of all blocks (all-to-all), sums the parts in f32, and sends the mean to all devices
(all-gather). Both exchanges send narrow dtypes and every sum is wide, so nothing
overflows and the error does not grow with the number of devices. All blocks share one
exchange, as rows of up to 1024 consecutive values of one block.
"""

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from tessera.jax_compat import jaxprs
from tessera.ops import device_collectives

COMPRESSIONS: Final = ("none", "bf16", "int8", "top_k")
# Lengths of a row, whose values share a scale of four bytes in int8.
WIDTHS: Final = (32, 64, 128, 256, 512, 1024)
LARGEST: Final = 127.0

# The arrays that are sent, with as many rows as the values.
Sent: TypeAlias = tuple[Array, ...]


def means(
    blocks: Sequence[Array], axes: tuple[str, ...], compression: str
) -> list[Array]:
    """The means of all devices' blocks, sent as ``none``, ``bf16`` or ``int8``.

    Per device ``[...]`` of a float dtype to the same, replicated. With x
    the values of a block on one device, in exact arithmetic from there on:

    - ``none`` is ``dist.all_reduce(op="mean")``, bit for bit.
    - ``bf16`` rounds x, then the mean, to 8 significant bits: it errs by at most
      2⁻⁸ (mean of abs(x) + abs(mean)) for each value.
    - ``int8`` rounds each to the nearest of 255 multiples of a scale, which is the
      largest magnitude in a row of up to 1024 values, divided by 127: it errs by at
      most (mean over devices of that magnitude + that of the mean) / 254. Values
      below half a scale are sent as zero.

    An infinity or a NaN stays one in ``bf16``; in ``int8`` it leaves no finite value
    in its row.
    """
    if compression == "none":
        return [device_collectives.reduce(block, axes, "mean") for block in blocks]
    code = {"bf16": (_to_bf16, _from_bf16), "int8": (_to_int8, _from_int8)}[compression]
    averaged_at: dict[int, Array] = {}
    # Concatenated blocks would all vary over every axis that any of them varies over.
    by_axes: dict[frozenset[str], list[int]] = defaultdict(list)
    for index, block in enumerate(blocks):
        if block.size:
            by_axes[jaxprs.varying_axes(block)].append(index)
        else:
            averaged_at[index] = device_collectives.reduce(block, axes, "mean")
    for indices in by_axes.values():
        averaged = _in_two_exchanges([blocks[p] for p in indices], axes, *code)
        averaged_at.update(zip(indices, averaged, strict=True))
    return [averaged_at[index] for index in range(len(blocks))]


def top_k_mean(
    block: Array, residual: Array, axes: tuple[str, ...], ratio: float
) -> tuple[Array, Array]:
    """The mean of the largest values of each device, with error feedback.

    Every device adds its residual to its block, sends the ``ceil(ratio * size)``
    values of largest magnitude with their indices, and keeps the others as the new
    residual: ``sent + new residual == block + residual`` exactly.
    (arXiv 1809.07599, algorithm 1 of Stich et al.; without the momentum correction of
    arXiv 1712.01887.)

    Args:
      block: Per device ``[...]``, of a float dtype.
      residual: Values that earlier calls did not send, f32, of the block's shape.
      axes: Mesh axes to average over.
      ratio: Share of the values that each device sends.

    Returns:
      The mean, replicated, and the new residual of this device.
    """
    if not block.size:
        return device_collectives.reduce(block, axes, "mean"), residual
    count = lax.axis_size(axes)
    total = (block.astype(jnp.float32) + residual).reshape(-1)
    indices = lax.top_k(jnp.abs(total), math.ceil(ratio * total.size))[1]
    values = total[indices]
    rest = total.at[indices].set(0.0, unique_indices=True)

    def add(sums: Array, sent: tuple[Array, Array]) -> tuple[Array, None]:
        return sums.at[sent[0]].add(sent[1], unique_indices=True), None

    # One device's values after the other's, each index once: concurrent additions to
    # one index would have another order on each accelerator.
    sent = tuple(
        jaxprs.all_gather_invariant(part[None], axes, 0) for part in (indices, values)
    )
    # The values may still vary over other axes.
    zeros = jnp.zeros(total.shape, total.dtype)
    zeros = jaxprs.varying_over(zeros, jaxprs.varying_axes(sent[1]))
    sums = lax.scan(add, zeros, sent)[0]
    averaged = (sums / count).astype(block.dtype).reshape(block.shape)
    return averaged, rest.reshape(block.shape)


def _in_two_exchanges(
    blocks: Sequence[Array],
    axes: tuple[str, ...],
    encode: Callable[[Array], Sent],
    decode: Callable[[Sent], Array],
) -> list[Array]:
    """The means of the blocks, by an all-to-all and an all-gather."""
    count = lax.axis_size(axes)
    width = _width([block.size for block in blocks], count)

    def joined(*parts: Array) -> Array:
        rows = jnp.concatenate(parts)
        return jnp.pad(rows, ((0, -len(rows) % count), (0, 0)))

    def exchange(rows: Array) -> Array:
        return lax.all_to_all(rows, axes, 0, 0, tiled=True)

    def share(rows: Array) -> Array:
        return jaxprs.all_gather_invariant(rows, axes, 0)

    # Encoded before they are concatenated, so that narrow arrays are copied.
    sent = jax.tree.map(joined, *(encode(_rows(block, width)) for block in blocks))
    parts = decode(jax.tree.map(exchange, sent))
    own = parts.reshape(count, -1, width).sum(axis=0) / count
    shared = jax.tree.map(share, encode(own))
    averaged, first = list[Array](), 0
    for block in blocks:
        last = first + -(-block.size // width)
        whole = decode(jax.tree.map(operator.itemgetter(slice(first, last)), shared))
        flat = whole.reshape(-1)[: block.size]
        averaged.append(flat.reshape(block.shape).astype(block.dtype))
        first = last
    return averaged


def _width(sizes: Sequence[int], count: int) -> int:
    """The width of rows that needs the fewest bytes, including scales and padding."""

    def nbytes(width: int) -> int:
        rows = sum(-(-size // width) for size in sizes)
        return -(-rows // count) * count * (width + 4)

    return min(WIDTHS, key=nbytes)


def _rows(block: Array, width: int) -> Array:
    """The values of a block in f32, as rows; the last one is padded with zeros."""
    flat = block.astype(jnp.float32).reshape(-1)
    return jnp.pad(flat, (0, -flat.size % width)).reshape(-1, width)


def _to_bf16(rows: Array) -> Sent:
    # As integers: XLA sends bf16 as f32 where a backend cannot compute with it.
    return (lax.bitcast_convert_type(rows.astype(jnp.bfloat16), jnp.uint16),)


def _from_bf16(sent: Sent) -> Array:
    return lax.bitcast_convert_type(sent[0], jnp.bfloat16).astype(jnp.float32)


def _to_int8(rows: Array) -> Sent:
    scale = jnp.max(jnp.abs(rows), axis=1, keepdims=True) / LARGEST
    # A row of zeros has any scale.
    steps = rows / jnp.where(scale == 0.0, 1.0, scale)
    # By rounding, a quotient may exceed the largest.
    steps = jnp.clip(jnp.round(steps), -LARGEST, LARGEST)
    return steps.astype(jnp.int8), scale


def _from_int8(sent: Sent) -> Array:
    steps, scale = sent
    return steps.astype(jnp.float32) * scale
