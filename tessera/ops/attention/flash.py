# SPDX-License-Identifier: Apache-2.0
"""``op.flash_attention``: attention over whole sequences, by the fastest kernel.

flash          checks the arguments
  dispatch     chooses the implementation for this device
    cudnn, splash, xla   compute
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tessera.annotations import refuse_options
from tessera.errors import OperandError
from tessera.ops.attention.blockwise import varying_alike
from tessera.ops.attention.context_parallel_variants import wire_of
from tessera.ops.attention.dispatch import (
    KERNELS,
    Device,
    Operands,
    Options,
    attend,
    check_supported,
    fastest,
)
from tessera.ops.operand_checks import check_one_dtype, raise_problems
from tessera.ops.operand_layouts import as_array

# The shapes of another order are often legal too, and then mean something else.
_LAYOUT: Final = "heads come before the sequence: x.swapaxes(1, 2) for [B, S, H, D]"

_MASKED: Final = "use jax.nn.dot_product_attention, whose arrays are [B, S, H, D]"
_ELSEWHERE: Final = {
    "is_causal": "write causal=True",
    "enable_gqa": "leave it out: there may be fewer heads of keys than of queries",
    **dict.fromkeys(("mask", "attn_mask", "bias", "dropout_p"), _MASKED),
}


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
    sinks: Any = None,
    implementation: str | None = None,
    **others: Any,
) -> Array:
    """Attention, with memory linear in the length of the sequence.

    Scores and sums are f32 whatever the dtype of the operands, f64 for f64; under
    ``ts.autocast`` the matmuls of f32 operands are in its dtype. No array is as large
    as the square of the sequence, in either pass. Query head h attends to key/value
    head ``h // (H / G)``. Global arrays may be split over B and over heads; for
    sequences that are split over devices, use ``op.context_attention``.

    Args:
      q: Queries ``[B, H, S, D]``, heads before the sequence: ``x.swapaxes(1, 2)`` for
        ``[B, S, H, D]``, which ``jax.nn.dot_product_attention`` takes.
      k: Keys ``[B, G, T, D]``, G dividing H.
      v: Values ``[B, G, T, D]``.
      causal: Whether a query attends only to keys at or before its position; S is T.
      scale: The factor of the products of queries and keys; ``D ** -0.5`` by default.
      window: How many positions back a causal query attends, including its own: an
        integer, or an integer array of shape (). None is all.
      soft_cap: Scores s become ``soft_cap * tanh(s / soft_cap)``; None leaves them.
      segment_ids: A query attends to the keys of its own segment: integers ``[B, S]``,
        where S is T.
      sinks: A score of each head beside those of its keys, ``[H]``: it takes a share of
        the softmax and has no value. None is none.
      implementation: ``cudnn``, ``splash`` or ``xla``; None is the first of these that
        supports this call on this device.
      **others: None: those of JAX's and PyTorch's attention say what to write.

    Returns:
      ``[B, H, S, D]`` in the dtype of the operands.

    Raises:
      ArgumentError: [T301] there is no such option.
      OperandError: [T401] shapes, dtypes or options that are not valid.
      ImplementationError: [T406] the implementation does not support this call.

    Example:
      >>> q = jnp.ones((1, 4, 16, 8))
      >>> kv = jnp.ones((1, 2, 16, 8))
      >>> flash_attention(q, kv, kv, causal=True).shape
      (1, 4, 16, 8)

    Source: T. Dao et al., FlashAttention, arXiv 2205.14135.
    """
    refuse_options(others, flash_attention, _ELSEWHERE)
    q, k, v = as_array(q), as_array(k), as_array(v)
    _check_operands(q, k, v)
    segments = _segments(q, k, segment_ids)
    _check_options(q, k, causal, window, soft_cap)
    width, dynamic_width = _static_or_dynamic(window)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    options = Options(causal, scale, width, soft_cap)
    sinks = None if sinks is None else as_array(sinks).astype(jnp.float32)
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise OperandError(
            "flash_attention takes one sink for each head",
            got=f"sinks {sinks.shape}, queries {q.shape}",
            fix=f"pass numbers of shape {q.shape[1:2]}",
        )
    operands = Operands(*varying_alike(q, k, v, segments, dynamic_width, sinks))
    if narrow := wire_of(q.dtype):
        # No pass can change the matmuls inside of a kernel.
        def cast(x: Array) -> Array:
            return x.astype(narrow)

        structs = _in_dtype(operands, partial(jax.eval_shape, cast))
        name = _dispatch(implementation, structs, options)
        if name in KERNELS:
            return attend(name, _in_dtype(operands, cast), options).astype(q.dtype)
    return attend(_dispatch(implementation, operands, options), operands, options)


def _in_dtype(operands: Operands, cast: Callable[[Array], Any]) -> Operands:
    q, k, v = (cast(x) for x in operands[:3])
    return operands._replace(q=q, k=k, v=v)


def _dispatch(implementation: str | None, operands: Operands, options: Options) -> str:
    device = Device.here()
    if implementation is None:
        return fastest(operands, options, device)
    return check_supported(implementation, operands, options, device)


def _static_or_dynamic(window: Any) -> tuple[int | None, Array | None]:
    """A window that is known while tracing, or else an int32 scalar."""
    if window is None or isinstance(window, (int, np.integer)):
        return None if window is None else int(window), None
    array = jnp.asarray(window)
    if array.shape or not jnp.issubdtype(array.dtype, jnp.integer):
        raise OperandError(
            "flash_attention takes one window for all queries",
            got=f"window {array.dtype.name}{list(array.shape)}",
            fix="pass an integer, or an array of shape () and an integer dtype",
        )
    return None, array.astype(jnp.int32)


def _segments(q: Array, k: Array, segment_ids: Any) -> Array | None:
    """The segments of queries and of keys, int32."""
    if segment_ids is None:
        return None
    ids, shape = jnp.asarray(segment_ids), (q.shape[0], q.shape[2])
    if ids.shape != shape or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise OperandError(
            "flash_attention takes a segment id for each query",
            got=f"segment_ids {ids.dtype.name}{list(ids.shape)}",
            fix=f"pass integers of shape {shape}\n{_LAYOUT}",
        )
    if q.shape[2] != k.shape[2]:
        raise OperandError(
            "flash_attention takes segments of as many queries as keys",
            got=f"segment_ids, {q.shape[2]} queries, {k.shape[2]} keys",
            fix="use jax.nn.dot_product_attention with a mask",
        )
    return ids.astype(jnp.int32)


def _check_operands(q: Array, k: Array, v: Array) -> None:
    fits = q.ndim == k.ndim == 4 and k.shape == v.shape and min(q.shape) > 0
    fits = fits and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    if not fits or min(k.shape) == 0 or q.shape[1] % k.shape[1]:
        raise OperandError(
            "flash_attention takes queries [B, H, S, D], and keys and values "
            "[B, G, T, D] whose G divides H",
            got=f"queries {q.shape}, keys {k.shape}, values {v.shape}",
            fix=f"give all three the same B and D\n{_LAYOUT}",
        )
    check_one_dtype("flash_attention", q, k, v)


def _check_options(
    q: Array,
    k: Array,
    causal: bool,
    window: Any,
    soft_cap: float | None,
) -> None:
    queries, keys = q.shape[2], k.shape[2]
    problems = list[tuple[str, str]]()
    if causal and queries != keys:
        problems.append(
            (
                f"{queries} queries, {keys} keys, causal=True",
                "pass causal=False, or use jax.nn.dot_product_attention with a mask\n"
                + _LAYOUT,
            )
        )
    known = isinstance(window, (int, np.integer))
    if window is not None and (not causal or (known and window < 1)):
        problems.append(
            (f"window={window}, causal={causal}", "use a window of 1 or more, causal")
        )
    if soft_cap is not None and not soft_cap > 0:
        problems.append((f"soft_cap={soft_cap}", "use a positive soft_cap, or None"))
    raise_problems("flash_attention cannot do this", problems)
