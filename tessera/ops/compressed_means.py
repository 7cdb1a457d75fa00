# SPDX-License-Identifier: Apache-2.0
"""Means over mesh axes that send less than the blocks they average, and how exact.

All run inside a manual region, on one device's blocks, and give every device the same
bits. ``averaging.py`` makes Optax transformations of them.

``bf16`` and ``int8`` do what an all-reduce does, in two exchanges: device j gets the
j-th part of everyone's blocks (all-to-all), adds the parts up in f32, and sends the
mean to all (all-gather). What is sent is narrow both times, what is added never is, so
nothing overflows and the error does not grow with the number of devices. All blocks go
in one exchange, as rows of up to 1024 neighbors of one block.
"""

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from tessera import _jax
from tessera.ops import device_collectives

COMPRESSIONS: Final = ("none", "bf16", "int8", "top_k")
# How many neighbors a row may have, which in int8 share a scale of four bytes.
WIDTHS: Final = (32, 64, 128, 256, 512, 1024)
LARGEST: Final = 127.0

# What is sent, as arrays of as many rows as the values have.
Sent: TypeAlias = tuple[Array, ...]


def means(
    blocks_of: Sequence[Array], axes: tuple[str, ...], compression: str
) -> list[Array]:
    """The means of all devices' blocks, sent as ``none``, ``bf16`` or ``int8``.

    Per device ``[...]`` of a float dtype to the same, alike on every device. With x
    the values of a block on one device, in exact arithmetic from there on:

    - ``none`` is ``dist.all_reduce(op="mean")``, bit for bit.
    - ``bf16`` rounds x, then the mean, to 8 significant bits: it errs by at most
      2⁻⁸ (mean of abs(x) + abs(mean)) for each value.
    - ``int8`` rounds each to the nearest of 255 multiples of a scale, which is the
      largest magnitude in a row of up to 1024 neighbors, divided by 127: it errs by at
      most (mean over devices of that magnitude + that of the mean) / 254. What is less
      than half a scale is sent as zero.

    An infinity or a NaN stays one in ``bf16``; in ``int8`` it leaves no finite value
    in its row.
    """
    if compression == "none":
        return [device_collectives.reduce(block, axes, "mean") for block in blocks_of]
    code = {"bf16": (_to_bf16, _from_bf16), "int8": (_to_int8, _from_int8)}[compression]
    found: dict[int, Array] = {}
    # Put together, blocks would all vary over the axes that any of them varies over.
    alike: dict[frozenset[str], list[int]] = defaultdict(list)
    for place, block in enumerate(blocks_of):
        if block.size:
            alike[_jax.varying_axes(block)].append(place)
        else:
            found[place] = device_collectives.reduce(block, axes, "mean")
    for places in alike.values():
        averaged = _in_two_exchanges([blocks_of[p] for p in places], axes, *code)
        found.update(zip(places, averaged, strict=True))
    return [found[place] for place in range(len(blocks_of))]


def top_k_mean(
    block: Array, residual: Array, axes: tuple[str, ...], ratio: float
) -> tuple[Array, Array]:
    """The mean of what is largest on each device, and what each keeps for next time.

    Every device adds its residual to its block, sends the ``ceil(ratio * size)``
    values of largest magnitude with their places, and keeps the others: so
    ``sent + new residual == block + residual`` exactly, and nothing is ever lost.
    (arXiv 1809.07599, algorithm 1 of Stich et al.; without the momentum correction of
    arXiv 1712.01887.)

    Args:
      block: Per device ``[...]``, of a float dtype.
      residual: What earlier calls kept, f32, of the block's shape.
      axes: Mesh axes to average over.
      ratio: Share of the values that each device sends.

    Returns:
      The mean, alike on every device, and the new residual, the device's own.
    """
    if not block.size:
        return device_collectives.reduce(block, axes, "mean"), residual
    count = lax.axis_size(axes)
    total = (block.astype(jnp.float32) + residual).reshape(-1)
    places = lax.top_k(jnp.abs(total), math.ceil(ratio * total.size))[1]
    values = total[places]
    kept = total.at[places].set(0.0, unique_indices=True)

    def add(sums: Array, sent: tuple[Array, Array]) -> tuple[Array, None]:
        return sums.at[sent[0]].add(sent[1], unique_indices=True), None

    # One device's values after the other's, each place once: several additions to one
    # place at a time would have an order of their own on each accelerator.
    sent = tuple(
        _jax.all_gather_invariant(part[None], axes, 0) for part in (places, values)
    )
    # The values may differ along other axes still.
    zeros = jnp.zeros(total.shape, total.dtype)
    zeros = _jax.varying_over(zeros, _jax.varying_axes(sent[1]))
    sums = lax.scan(add, zeros, sent)[0]
    averaged = (sums / count).astype(block.dtype).reshape(block.shape)
    return averaged, kept.reshape(block.shape)


def _in_two_exchanges(
    blocks_of: Sequence[Array],
    axes: tuple[str, ...],
    encode: Callable[[Array], Sent],
    decode: Callable[[Sent], Array],
) -> list[Array]:
    """The means of the blocks, of which each device computes one part."""
    count = lax.axis_size(axes)
    width = _width([block.size for block in blocks_of], count)

    def joined(*parts: Array) -> Array:
        rows = jnp.concatenate(parts)
        return jnp.pad(rows, ((0, -len(rows) % count), (0, 0)))

    def exchange(rows: Array) -> Array:
        return lax.all_to_all(rows, axes, 0, 0, tiled=True)

    def share(rows: Array) -> Array:
        return _jax.all_gather_invariant(rows, axes, 0)

    # Encoded before they are put together: what is copied is narrow.
    sent = jax.tree.map(joined, *(encode(_rows(block, width)) for block in blocks_of))
    parts = decode(jax.tree.map(exchange, sent))
    own = parts.reshape(count, -1, width).sum(axis=0) / count
    shared = jax.tree.map(share, encode(own))
    averaged, first = list[Array](), 0
    for block in blocks_of:
        last = first + -(-block.size // width)
        whole = decode(jax.tree.map(operator.itemgetter(slice(first, last)), shared))
        flat = whole.reshape(-1)[: block.size]
        averaged.append(flat.reshape(block.shape).astype(block.dtype))
        first = last
    return averaged


def _width(sizes: Sequence[int], count: int) -> int:
    """The width of rows that takes the fewest bytes, scales and padding included."""

    def nbytes(width: int) -> int:
        rows = sum(-(-size // width) for size in sizes)
        return -(-rows // count) * count * (width + 4)

    return min(WIDTHS, key=nbytes)


def _rows(block: Array, width: int) -> Array:
    """The values of a block in f32, in rows; the last one is filled up with zeros."""
    flat = block.astype(jnp.float32).reshape(-1)
    return jnp.pad(flat, (0, -flat.size % width)).reshape(-1, width)


def _to_bf16(rows: Array) -> Sent:
    # As integers: XLA sends bf16 as f32 where a backend cannot compute with it.
    return (lax.bitcast_convert_type(rows.astype(jnp.bfloat16), jnp.uint16),)


def _from_bf16(sent: Sent) -> Array:
    return lax.bitcast_convert_type(sent[0], jnp.bfloat16).astype(jnp.float32)


def _to_int8(rows: Array) -> Sent:
    scale = jnp.max(jnp.abs(rows), axis=1, keepdims=True) / LARGEST
    # A row of zeros is zeros by any scale.
    steps = rows / jnp.where(scale == 0.0, 1.0, scale)
    # A quotient may be a rounding error above the largest.
    steps = jnp.clip(jnp.round(steps), -LARGEST, LARGEST)
    return steps.astype(jnp.int8), scale


def _from_int8(sent: Sent) -> Array:
    steps, scale = sent
    return steps.astype(jnp.float32) * scale
