# SPDX-License-Identifier: Apache-2.0
"""Attention on Hopper and Blackwell by tokamax's Pallas kernels.

tokamax is optional, the extra ``kernels``. Its kernels have what cuDNN lacks: a soft
cap. They serve only calls that ask for them by name, until their results with a soft
cap were compared on a GPU. tokamax chooses tiles by the machine's own default device,
so that programs for an absent GPU use other implementations.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from tessera.jax_compat.traces import checks_varying_axes
from tessera.ops.attention.dispatch import Device, Operands, Options

_WIDEST = 256
# Ampere's kernels have no gradient.
_GENERATIONS = (9, 10)


def unsupported_reason(
    operands: Operands, options: Options, device: Device
) -> str | None:
    """Why tokamax's kernels do not support such a call there; or None."""
    q, k = operands.q, operands.k
    if device.platform != "cuda" or device.capability[0] not in _GENERATIONS:
        return "tokamax's kernels run on Hopper and Blackwell"
    if not _is_installed():
        return "tokamax is not installed: pip install 'tessera-spmd[kernels]'"
    if device != _device_of_machine():
        return "tokamax chooses tiles by this machine's device, and this is another"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"tokamax's kernels take bfloat16 and float16, and got {q.dtype}"
    if q.shape[3] % 8 or q.shape[3] > _WIDEST:
        return (
            f"tokamax's kernels take heads of a multiple of 8 up to {_WIDEST}, "
            f"and got {q.shape[3]}"
        )
    if operands.query_segments is not None:
        return "tokamax's kernels have no segment ids"
    if operands.offset is not None or options.offset:
        return "tokamax's kernels have no query_offset"
    if options.causal and q.shape[2] != k.shape[2]:
        return "tokamax's causal attention is used for as many queries as keys only"
    if checks_varying_axes():
        return "tokamax's kernels do not say which mesh axes their results vary over"
    return None


def slow_reason(operands: Operands, options: Options, device: Device) -> str | None:
    """Why such a call should use a kernel only if it asks for it by name; or None."""
    del operands, options, device
    return "its results with a soft cap were not compared on a GPU yet"


def attend(operands: Operands, options: Options) -> Array:
    """The output of the queries: ``[B, H, S, D]``."""
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in operands[:3])
    # tokamax does not count the query's own position.
    window = None if options.window is None else (options.window - 1, 0)
    out = _tokamax().dot_product_attention(
        q,
        k,
        v,
        scale=options.scale,
        is_causal=options.causal,
        local_window_size=window,
        logits_soft_cap=options.soft_cap,
        implementation="mosaic",
    )
    return jnp.swapaxes(out, 1, 2)


@cache
def _is_installed() -> bool:
    return find_spec("tokamax") is not None


def _device_of_machine() -> Device:
    return Device.of(jax.devices()[0])


def _tokamax() -> Any:
    """Imported at its first use: it needs newer versions than Tessera, and is large."""
    return import_module("tokamax")
