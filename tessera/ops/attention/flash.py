# SPDX-License-Identifier: Apache-2.0
"""``op.flash_attention``: attention to whole sequences, by the fastest way there is.

flash          checks what is asked for
  choice       which implementation serves it on this device
    reference, xla, cudnn, pallas   what is computed
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tessera.errors import OperandError
from tessera.ops.attention.attention_call import Operands, Setting
from tessera.ops.attention.blockwise import varying_alike
from tessera.ops.attention.context_variants import wire_of
from tessera.ops.attention.dispatch import (
    KERNELS,
    Device,
    Name,
    attend,
    check_choice,
    choose,
)
from tessera.ops.operand_layouts import as_array


def flash_attention(  # noqa: PLR0913
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Any = None,
    soft_cap: float | None = None,
    segment_ids: Any = None,
    query_offset: Any = None,
    implementation: str | None = None,
) -> Array:
    """Attention of every query to the keys that it may see.

    Scores and sums are f32 whatever the dtype of the operands, f64 for f64; under
    ``ts.autocast`` the matmuls of f32 operands are in its dtype. But for the
    implementation ``reference`` no array is as large as the square of the sequence, in
    the backward pass neither. Query head h reads key/value head ``h // (H / G)``.
    Global arrays may be split over B and over heads; for sequences that are split over
    devices there is ``op.context_attention``.

    Args:
      q: Queries ``[B, H, S, D]``.
      k: Keys ``[B, G, T, D]``, G dividing H.
      v: Values ``[B, G, T, D]``.
      causal: Whether a query sees only the keys up to its own place.
      scale: What scores are multiplied by; ``D ** -0.5`` when not given.
      window: How many keys back a causal query sees, its own place included: an
        integer, or an array of shape () that holds one. None is all.
      soft_cap: Scores s become ``soft_cap * tanh(s / soft_cap)``; None leaves them.
      segment_ids: A query sees the keys of its own segment. Integers ``[B, S]`` where S
        is T, or a pair of those of queries and of keys, ``[B, S]`` and ``[B, T]``.
      query_offset: The place of the first query among those of the keys, which is how
        many keys lie before it: an integer, or an array of shape () that holds one.
        None is 0, and S is T where the places make a difference.
      implementation: ``cudnn``, ``pallas``, ``xla`` or ``reference``; None is the first
        of these that is fast on this device and that these arguments allow.

    Returns:
      ``[B, H, S, D]`` in the dtype of the operands. A query that sees no key reads
      zeros.

    Raises:
      OperandError: [T401] shapes, dtypes or settings that do not fit.
      ImplementationError: [T406] the implementation cannot serve this call.

    Example:
      >>> q = jnp.ones((1, 4, 16, 8))
      >>> kv = jnp.ones((1, 2, 16, 8))
      >>> flash_attention(q, kv, kv, causal=True).shape
      (1, 4, 16, 8)

    Source: T. Dao et al., FlashAttention, arXiv 2205.14135.
    """
    q, k, v = as_array(q), as_array(k), as_array(v)
    _check_operands(q, k, v)
    segments = _segments(q, k, segment_ids)
    _check_settings(q, k, causal, window, soft_cap, query_offset)
    place, offset = _now_or_later("query_offset", query_offset)
    width, later_width = _now_or_later("window", window)
    if not causal:
        place, offset = None, None  # places make no difference
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    setting = Setting(causal, scale, width, soft_cap, place or 0)
    operands = Operands(*varying_alike(q, k, v, *segments, offset, later_width))
    if narrow := wire_of(q.dtype):
        # No pass reaches the matmuls inside of a kernel.
        def cast(x: Array) -> Array:
            return x.astype(narrow)

        wanted = _in_dtype(operands, partial(jax.eval_shape, cast))
        name = _chosen(implementation, wanted, setting)
        if name in KERNELS:
            return attend(name, _in_dtype(operands, cast), setting).astype(q.dtype)
    return attend(_chosen(implementation, operands, setting), operands, setting)


def _in_dtype(operands: Operands, cast: Callable[[Array], Any]) -> Operands:
    q, k, v = (cast(x) for x in operands[:3])
    return operands._replace(q=q, k=k, v=v)


def _chosen(implementation: str | None, operands: Operands, setting: Setting) -> Name:
    device = Device.here()
    if implementation is None:
        return choose(operands, setting, device)
    return check_choice(implementation, operands, setting, device)


def _now_or_later(name: str, value: Any) -> tuple[int | None, Array | None]:
    """An integer that is known now, or one that is known at run time."""
    if value is None or isinstance(value, (int, np.integer)):
        return None if value is None else int(value), None
    found = jnp.asarray(value)
    if found.shape or not jnp.issubdtype(found.dtype, jnp.integer):
        raise OperandError(
            f"flash_attention takes one {name} for all queries",
            got=f"{name} {found.dtype.name}{list(found.shape)}",
            fix="pass an integer, or an array of shape () and an integer dtype",
        )
    return None, found.astype(jnp.int32)


def _segments(q: Array, k: Array, segment_ids: Any) -> tuple[Array | None, ...]:
    """Segments of queries and of keys, int32; or twice None."""
    if segment_ids is None:
        return None, None
    pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids,) * 2
    found = tuple(jnp.asarray(ids) for ids in pair)
    shapes = [(q.shape[0], q.shape[2]), (k.shape[0], k.shape[2])]
    integers = all(jnp.issubdtype(ids.dtype, jnp.integer) for ids in found)
    if [ids.shape for ids in found] != shapes or not integers:
        raise OperandError(
            "flash_attention takes a segment id for each query and for each key",
            got="segment_ids "
            + ", ".join(f"{ids.dtype.name}{list(ids.shape)}" for ids in found),
            fix=f"pass integers of shape {shapes[0]}"
            if shapes[0] == shapes[1]
            else f"pass a pair of integer arrays of shapes {shapes[0]} and {shapes[1]}",
        )
    return tuple(ids.astype(jnp.int32) for ids in found)


def _check_operands(q: Array, k: Array, v: Array) -> None:
    fits = q.ndim == k.ndim == 4 and k.shape == v.shape and min(q.shape) > 0
    fits = fits and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    if not fits or min(k.shape) == 0 or q.shape[1] % k.shape[1]:
        raise OperandError(
            "flash_attention takes queries [B, H, S, D], and keys and values "
            "[B, G, T, D] whose G divides H",
            got=f"queries {q.shape}, keys {k.shape}, values {v.shape}",
            fix="give all three the same B and D; heads come before the sequence: "
            "x.reshape(B, S, H, D).transpose(1, 2)",
        )
    if not q.dtype == k.dtype == v.dtype or not jnp.issubdtype(q.dtype, jnp.floating):
        raise OperandError(
            "flash_attention takes operands of one floating-point dtype",
            got=f"queries {q.dtype}, keys {k.dtype}, values {v.dtype}",
            fix="cast them to one dtype first",
        )


def _check_settings(
    q: Array,
    k: Array,
    causal: bool,
    window: Any,
    soft_cap: float | None,
    query_offset: Any,
) -> None:
    queries, keys = q.shape[2], k.shape[2]
    wrong = list[tuple[str, str]]()
    if causal and queries != keys and query_offset is None:
        wrong.append(
            (
                f"{queries} queries, {keys} keys, causal=True and no query_offset",
                f"say which place the first query has: query_offset={keys - queries} "
                "where the queries are the last, or pass causal=False",
            )
        )
    known = isinstance(window, (int, np.integer))
    if window is not None and (not causal or (known and window < 1)):
        wrong.append(
            (f"window={window}, causal={causal}", "use a window of 1 or more, causal")
        )
    if soft_cap is not None and not soft_cap > 0:
        wrong.append((f"soft_cap={soft_cap}", "use a positive soft_cap, or None"))
    if wrong:
        raise OperandError(
            "flash_attention cannot do this",
            got="\n".join(got for got, _ in wrong),
            fix="\n".join(fix for _, fix in wrong),
        )
