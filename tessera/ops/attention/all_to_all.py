# SPDX-License-Identifier: Apache-2.0
"""All-to-all attention: devices exchange their part of the sequence for heads.

Before, each device has all heads of its tokens; in between, all tokens of its heads.
Four exchanges forward (queries, keys, values, output) and four backward, each of 1 / n
of the bytes of the whole array, whatever n is. In between, attention is that of whole
sequences, so it runs on the kernels of GPUs and TPUs.

Source: S. A. Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from tessera.errors import HeadCountError, nearest
from tessera.ops.attention.context_parallel_variants import wire_of


def attend_by_heads(
    attend: Callable[[Array, Array, Array], Array],
    axis: str,
    q: Array,
    k: Array,
    v: Array,
) -> Array:
    """``attend`` over an axis that splits heads instead of sequences meanwhile.

    Args:
      attend: From queries, keys and values of whole sequences to an output as the
        queries, all ``[B, T, heads, K]``.
      axis: A mesh axis of the SPMD region. Its size divides the query heads. It divides
        the key/value heads, or they divide it: then each device gets a copy of the one
        that its queries attend to.
      q: ``[B, S, H, K]``; S are the tokens of this device, in order.
      k: ``[B, S, G, K]``, G dividing H.
      v: ``[B, S, G, K]``.

    Returns:
      ``[B, S, H, K]``.
    """

    def to_heads(x_BSHK: Array) -> Array:
        copies = max(lax.axis_size(axis) // x_BSHK.shape[2], 1)
        # Operands of matmuls are sent as these round them.
        wire = x_BSHK.astype(wire_of(x_BSHK.dtype) or x_BSHK.dtype)
        wire = jnp.repeat(wire, copies, axis=2) if copies > 1 else wire
        return lax.all_to_all(wire, axis, 2, 1, tiled=True).astype(x_BSHK.dtype)

    out_BTHK = attend(to_heads(q), to_heads(k), to_heads(v))
    return lax.all_to_all(out_BTHK, axis, 1, 2, tiled=True)


def check_exchange(heads: int, kv_heads: int, size: int, axis: str) -> None:
    """Raise [T402] where the axis does not divide the heads for an all-to-all."""
    fit = kv_heads % size == 0 or size % kv_heads == 0
    if heads % size == 0 and fit:
        return
    legal = [
        n
        for n in range(1, heads + 1)
        if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)
    ]
    raise HeadCountError(
        f"all-to-all attention cannot divide the heads over mesh axis {axis!r}",
        got=f"{heads} query heads and {kv_heads} key/value heads on each device, "
        f"axis size {size}",
        fix=f"use {axis} {nearest(legal, size)}, or the ring, which divides no heads",
    )
