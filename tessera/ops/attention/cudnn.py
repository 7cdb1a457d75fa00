# SPDX-License-Identifier: Apache-2.0
"""Attention by cuDNN's kernels, through ``jax.nn.dot_product_attention``.

It supports what cuDNN can do without a mask array: such a mask is as large as the
square of the sequence, and slower than the kernels that need none.
"""

import jax
import jax.numpy as jnp
from jax import Array

from tessera.ops.attention.dispatch import Device, Operands, Options

# Attention needs Ampere, heads wider than 128 need Hopper.
_AMPERE, _HOPPER = (8, 0), (9, 0)


def unsupported_reason(
    operands: Operands, options: Options, device: Device
) -> str | None:
    """Why cuDNN does not support such a call on that device; or None."""
    q, k = operands.q, operands.k
    if device.platform != "cuda":
        return f"cuDNN runs on NVIDIA GPUs, and this call on {device.platform}"
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
    if operands.query_segments is not None:
        return "cuDNN takes segment ids only as a mask in memory"
    if operands.offset is not None or options.offset:
        return "cuDNN has no query_offset"
    if options.causal and q.shape[2] != k.shape[2]:
        return "cuDNN's causal attention is used for as many queries as keys only"
    return None


def attend(operands: Operands, options: Options) -> Array:
    """The output of the queries: ``[B, H, S, D]``."""
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
