# SPDX-License-Identifier: Apache-2.0
"""Attention whose memory grows with the sequence, not with its square.

The blocks of ``blockwise`` on whole sequences. What is kept for the backward pass is
the operands, the result and one number for each query; the weights are computed again.

Source: T. Dao et al., FlashAttention, arXiv 2205.14135.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from tessera.errors import OperandError
from tessera.ops.attention.blockwise import (
    Keys,
    Mask,
    Queries,
    Rows,
    Saved,
    Softmax,
    Tiling,
    fold,
    fold_gradients,
    varying_alike,
    zeros_like,
)
from tessera.ops.attention.spread import NO_WINDOW


def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    segment_ids: Any = None,
) -> Array:
    """Attention of every query to the keys that it may see.

    Scores and sums are f32 whatever the dtype of the operands; no array is as large as
    the square of the sequence, in the backward pass neither. Query head h reads
    key/value head ``h // (H / G)``. Global arrays may be split over B and over heads;
    for sequences that are split over devices there is ``op.context_attention``.

    Args:
      q: Queries ``[B, H, S, D]``.
      k: Keys ``[B, G, T, D]``, G dividing H.
      v: Values ``[B, G, T, D]``.
      causal: Whether a query sees only the keys up to its own place; S is T then.
      scale: What scores are multiplied by; ``D ** -0.5`` when not given.
      window: How many tokens back a query sees, its own included; None is all.
      soft_cap: Scores s become ``soft_cap * tanh(s / soft_cap)``; None leaves them.
      segment_ids: Integers ``[B, S]``; a token sees those of its own segment. S is T.

    Returns:
      ``[B, H, S, D]`` in the dtype of the operands.

    Raises:
      OperandError: [T401] shapes, dtypes or settings that do not fit.

    Example:
      >>> q = jnp.ones((1, 4, 16, 8))
      >>> kv = jnp.ones((1, 2, 16, 8))
      >>> flash_attention(q, kv, kv, causal=True).shape
      (1, 4, 16, 8)
    """
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    segments = None if segment_ids is None else jnp.asarray(segment_ids)
    _check_operands(q, k, v)
    _check_settings(q, k, causal, window, soft_cap, segments)
    setting = _Setting(
        causal, NO_WINDOW if window is None else window, soft_cap, segments is not None
    )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    # Rows before heads, as the blocks have them.
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    q = q * jnp.asarray(scale, q.dtype)
    out = _compiled(setting, *varying_alike(q, k, v, segments))
    return jnp.swapaxes(out, 1, 2)


class _WholeBatch(Mask):
    """A mask whose blocks are skipped by places alone.

    Where a batch is split over devices, whether a segment is met anywhere in it would
    be a collective for each pair of blocks.
    """

    def may_see(self, queries: Rows, keys: Rows) -> Array:
        """False only where no row of the batch may see a key, segments aside."""
        return super().may_see(
            queries._replace(segment=None), keys._replace(segment=None)
        )


@dataclass(frozen=True)
class _Setting:
    """What a call asks for, besides its arrays."""

    causal: bool
    window: int
    soft_cap: float | None
    has_segments: bool

    @property
    def mask(self) -> Mask:
        kind = _WholeBatch if self.has_segments else Mask
        return kind(self.causal, jnp.int32(self.window), self.soft_cap)


def _blocks(
    q: Array, k: Array, v: Array, segments: Array | None
) -> tuple[Queries, Tiling, Keys, Tiling]:
    """Queries and keys cut into blocks."""
    rows, columns = Tiling(1, q.shape[1]), Tiling(1, k.shape[1])

    def placed(tiling: Tiling) -> Rows:
        return Rows.of(tiling, jnp.arange(tiling.length, dtype=jnp.int32), segments)

    queries = Queries(rows.heads(q, k.shape[2]), placed(rows))
    keys = Keys(columns.heads(k), columns.heads(v), placed(columns))
    return queries, rows, keys, columns


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    setting: _Setting, q: Array, k: Array, v: Array, segments: Array | None
) -> Array:
    return _forward(setting, q, k, v, segments)[0]


def _forward(
    setting: _Setting, q: Array, k: Array, v: Array, segments: Array | None
) -> Any:
    queries, rows, keys, _ = _blocks(q, k, v, segments)
    state = fold(Softmax.before(queries), queries, keys, setting.mask)
    read, log_total = state.result()
    out = rows.unheads(read).astype(q.dtype)
    log_total = rows.unheads(log_total[..., None])[..., 0]
    return out, (q, k, v, segments, out, log_total)


def _backward(setting: _Setting, kept: Any, gradient: Array) -> Any:
    q, k, v, segments, out, log_total = kept
    queries, rows, keys, columns = _blocks(q, k, v, segments)
    saved = Saved.of(rows, k.shape[2], log_total, out, gradient)
    zeros = zeros_like(queries.q), zeros_like(keys.k), zeros_like(keys.v)
    of_q, of_k, of_v = fold_gradients(zeros, queries, saved, keys, setting.mask)
    return (
        rows.unheads(of_q).astype(q.dtype),
        columns.unheads(of_k).astype(k.dtype),
        columns.unheads(of_v).astype(v.dtype),
        None,
    )


_attend.defvjp(_forward, _backward)
# Calls that are alike share a program where nothing is traced around them.
_compiled = jax.jit(_attend, static_argnums=0)


def _check_operands(q: Array, k: Array, v: Array) -> None:
    fits = q.ndim == k.ndim == 4 and k.shape == v.shape and min(q.shape) > 0
    fits = fits and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    if not fits or q.shape[1] % k.shape[1]:
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
    window: int | None,
    soft_cap: float | None,
    segments: Array | None,
) -> None:
    length, wrong = q.shape[2], list[tuple[str, str]]()
    if (causal or segments is not None) and k.shape[2] != length:
        wrong.append(
            (
                f"{length} queries, {k.shape[2]} keys, and causal=True or segment_ids",
                "give every query the key of its own place, or pass causal=False",
            )
        )
    if window is not None and (window < 1 or not causal):
        wrong.append(
            (f"window={window}, causal={causal}", "use a window of 1 or more, causal")
        )
    if soft_cap is not None and not soft_cap > 0:
        wrong.append((f"soft_cap={soft_cap}", "use a positive soft_cap, or None"))
    if segments is not None and (
        segments.shape != (q.shape[0], length)
        or not jnp.issubdtype(segments.dtype, jnp.integer)
    ):
        wrong.append(
            (
                f"segment_ids {segments.dtype.name}{list(segments.shape)}",
                f"pass integers of shape {(q.shape[0], length)}",
            )
        )
    if wrong:
        raise OperandError(
            "flash_attention cannot do this",
            got="\n".join(got for got, _ in wrong),
            fix="\n".join(fix for _, fix in wrong),
        )
