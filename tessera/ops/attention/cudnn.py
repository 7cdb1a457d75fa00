# SPDX-License-Identifier: Apache-2.0
"""Attention by cuDNN's kernels, through JAX.

It supports what cuDNN can do without a mask array: such a mask is as large as the
square of the sequence, and slower than the kernels that need none. Of packed rows it
takes the first token and the length of each segment.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from tessera.foundations.tree import zeros
from tessera.jax_compat.packed_attention import PACKS_GROUPED_HEADS, packed_attention
from tessera.ops.attention import xla
from tessera.ops.attention.blockwise import varying_as
from tessera.ops.attention.dispatch import Device, Operands, Options
from tessera.ops.attention.packed_rows import Segments
from tessera.tracing.scope import FALLBACK

# Attention needs Ampere, heads wider than 128 need Hopper.
_AMPERE, _HOPPER = (8, 0), (9, 0)
# How many segments a row may have: this many, or one for each so many tokens. cuDNN
# schedules tiles for as many rows, of which those of segments that do not exist return
# at once, and stores a number for each query of each: with 64, as much as queries of
# 128 numbers take.
MAX_SEGMENTS, _SEGMENT_TOKENS = 64, 128


def unsupported_reason(
    operands: Operands, options: Options, device: Device
) -> str | None:
    """Why cuDNN does not support such a call on that device; or None."""
    q = operands.q
    if device.capability < _AMPERE:
        found = ".".join(map(str, device.capability))
        return f"cuDNN's attention needs compute capability 8.0, and this is {found}"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN's attention takes bfloat16 and float16, and got {q.dtype}"
    widest = 256 if device.capability >= _HOPPER else 128
    if q.shape[3] % 8 or q.shape[3] > widest:
        return (
            f"cuDNN takes heads of a multiple of 8 up to {widest} on this device, "
            f"and got {q.shape[3]}"
        )
    if options.soft_cap is not None:
        return "cuDNN has no soft_cap"
    if operands.segments is not None and device.capability < _HOPPER:
        return "cuDNN's attention over packed rows needs compute capability 9.0"
    return None


def max_segments(length: int) -> int:
    """How many segments a row of a length may have; with more, XLA computes it."""
    return min(MAX_SEGMENTS, max(16, length // _SEGMENT_TOKENS))


def attend(operands: Operands, options: Options) -> Array:
    """The output of the queries: ``[B, H, S, D]``."""
    if operands.segments is not None:
        return _attend_packed(operands, options)
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in operands[:3])
    # JAX does not count the query's own position.
    window = None if options.window is None else (options.window - 1, 0)
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=options.scale,
        is_causal=options.causal,
        local_window_size=window,
        implementation="cudnn",
    )
    return jnp.swapaxes(out, 1, 2)


def _attend_packed(operands: Operands, options: Options) -> Array:
    """Attention within segments, by XLA where these are too many or not runs of ids.

    The ids decide at run time: segments that cuDNN is not told of would be wrong.
    """
    assert operands.segments is not None
    segments = Segments.of(operands.segments, max_segments(operands.q.shape[2]))

    def by_cudnn(operands: Operands) -> Array:
        q, k, v = operands[:3]
        if not PACKS_GROUPED_HEADS:
            copies = q.shape[1] // k.shape[1]
            k, v = (jnp.repeat(x, copies, axis=1) for x in (k, v))
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
        out = packed_attention(
            q,
            k,
            v,
            segments.lengths,
            segments.offsets,
            scale=options.scale,
            causal=options.causal,
            window=options.window,
        )
        return jnp.swapaxes(out, 1, 2)

    def by_xla(operands: Operands) -> Array:
        with jax.named_scope(FALLBACK):
            return _fallback(options, *operands[:3], operands)

    return lax.cond(segments.are_listed, by_cudnn, by_xla, operands)


# JAX saves the residuals of both branches: of this one there are none but its operands.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fallback(options: Options, q: Array, k: Array, v: Array, rest: Operands) -> Array:
    def attend(q: Array, k: Array, v: Array) -> Array:
        return xla.attend(rest._replace(q=q, k=k, v=v), options)

    return _hidden(attend, q, k, v)


def _fallback_forward(options: Options, *operands: Any) -> tuple[Array, Any]:
    return _fallback(options, *operands), operands


def _fallback_backward(options: Options, operands: Any, dout: Array) -> Any:
    *arrays, rest = operands

    def gradients(dout: Array, *arrays: Array) -> Any:
        def attend(q: Array, k: Array, v: Array) -> Array:
            return xla.attend(rest._replace(q=q, k=k, v=v), options)

        return jax.vjp(attend, *arrays)[1](dout)

    return *_hidden(gradients, dout, *arrays), None


_fallback.defvjp(_fallback_forward, _fallback_backward)


def _hidden(function: Callable[..., Any], *arrays: Array) -> Any:
    """``function(*arrays)`` in a loop of one step.

    Policies of rematerialization see no matmuls in such a loop, and save none of them.
    """
    empty = zeros(jax.eval_shape(function, *arrays))
    empty = jax.tree.map(partial(varying_as, arrays[0]), empty)

    def body(carry: tuple[Any, Any]) -> tuple[Any, Any]:
        return carry[0] & False, function(*arrays)

    is_first = varying_as(arrays[0], jnp.bool_(True))
    return lax.while_loop(lambda carry: carry[0], body, (is_first, empty))[1]
