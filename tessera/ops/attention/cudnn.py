# SPDX-License-Identifier: Apache-2.0
"""Attention by cuDNN's kernels, through ``jax.nn.dot_product_attention``.

It takes what cuDNN can be told without a mask: a mask in memory is as large as the
square of the sequence, and slower than the kernels that do without one.
"""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from tessera.ops.attention.attention_call import Operands, Setting

if TYPE_CHECKING:
    from tessera.ops.attention.dispatch import Device

# Since Ampere; heads wider than 128 since Hopper.
_AMPERE, _HOPPER = (8, 0), (9, 0)


def why_not(operands: Operands, setting: Setting, device: "Device") -> str | None:
    """Why cuDNN cannot serve such a call on that device; or None."""
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
    if setting.soft_cap is not None:
        return "cuDNN has no soft_cap"
    if operands.query_segments is not None:
        return "cuDNN cannot be told segment ids without a mask in memory"
    if operands.offset is not None or setting.offset:
        return "cuDNN has no query_offset"
    if setting.causal and q.shape[2] != k.shape[2]:
        return "cuDNN's causal attention is asked for as many queries as keys alone"
    return None


def attend(operands: Operands, setting: Setting) -> Array:
    """What the queries read: ``[B, H, S, D]``."""
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in operands[:3])
    # JAX counts how many keys are seen besides a query's own.
    window = None if setting.window is None else (setting.window - 1, 0)
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=setting.scale,
        is_causal=setting.causal,
        local_window_size=window,
        implementation="cudnn",
    )
    return jnp.swapaxes(out, 1, 2)
