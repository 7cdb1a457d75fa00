# SPDX-License-Identifier: Apache-2.0
"""Attention by the Pallas kernels for Hopper: supported calls, padding, gradient."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from tessera._jax_traces import HAS_MOSAIC_GPU_KERNELS
from tessera.ops.attention.blockwise import (
    OutputGradients,
    delta_of,
    varying_alike,
    varying_as,
)
from tessera.ops.attention.dispatch import Device, Operands, Options, split_reason
from tessera.ops.attention.pallas.block_sizes import (
    WIDEST,
    Hopper,
    kernel_for,
    padded_width,
)
from tessera.ops.attention.pallas.mask_rules import Rules
from tessera.ops.rematerialization import ATTENTION_RESIDUALS

_HOPPER = (9, 0)


def unsupported_reason(
    operands: Operands, options: Options, device: Device
) -> str | None:
    """Why the kernels do not support such a call there; or None."""
    del options
    q = operands.q
    if device.platform != "cuda" or device.capability != _HOPPER:
        return "the kernel for Hopper runs on GPUs of compute capability 9.0"
    if not HAS_MOSAIC_GPU_KERNELS:
        return "the kernel for Hopper needs JAX 0.12"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the kernel for Hopper takes bfloat16 and float16, and got {q.dtype}"
    if q.shape[3] > WIDEST:
        return f"the kernel for Hopper takes heads up to {WIDEST}, and got {q.shape[3]}"
    if operands.query_segments is not None:
        return "the kernel for Hopper has no segment ids"
    if operands.offset is not None:
        return "the kernel for Hopper has no offset that changes from run to run"
    return None


def slow_reason(operands: Operands, options: Options, device: Device) -> str | None:
    """Why such a call should use a kernel only if it asks for it by name; or None."""
    del operands, options, device
    return split_reason()


def attend(operands: Operands, options: Options) -> Array:
    """The output of the queries: ``[B, H, S, D]``."""
    kernel = kernel_for(operands, options, Device.here())
    return attend_with(kernel, operands, options)


def attend_with(kernel: Hopper, operands: Operands, options: Options) -> Array:
    """The output of the queries, by a kernel with its tile sizes."""
    return _attend((kernel, options), *varying_alike(*operands[:3]))


_Plan = tuple[Hopper, Options]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: _Plan, q: Array, k: Array, v: Array) -> Array:
    return _forward(plan, q, k, v)[0]


def _forward(plan: _Plan, q: Array, k: Array, v: Array) -> Any:
    # Imported here: other devices load no kernel language.
    from tessera.ops.attention.pallas.hopper import forward

    kernel, _ = plan
    operands, rules = _padded(plan, q, k, v, backward=False)
    results = forward(operands, rules, kernel.forward, kernel.interpret)
    out, lse = (varying_as(q, x) for x in results)
    length, width = q.shape[2:]
    out = checkpoint_name(out[:, :, :length, :width], ATTENTION_RESIDUALS)
    lse = checkpoint_name(lse[:, :, :length], ATTENTION_RESIDUALS)
    return out, (q, k, v, out, lse)


def _backward(plan: _Plan, residuals: Any, dout: Array) -> tuple[Array, ...]:
    from tessera.ops.attention.pallas.hopper_backward import backward

    kernel, _ = plan
    q, k, v, out, lse = residuals
    operands, rules = _padded(plan, q, k, v, backward=True)
    rows, width = operands.q.shape[2:]
    outputs = OutputGradients(
        _pad(dout, {2: rows, 3: width}),
        *(_pad(x, {2: rows}) for x in (lse, delta_of(out, dout))),
    )
    results = backward(operands, outputs, rules, kernel.backward, kernel.interpret)
    return tuple(
        varying_as(x, dx[:, :, : x.shape[2], : x.shape[3]])
        for x, dx in zip((q, k, v), results, strict=True)
    )


_attend.defvjp(_forward, _backward)


def _padded(
    plan: _Plan, q: Array, k: Array, v: Array, *, backward: bool
) -> tuple[Operands, Rules]:
    """Operands padded to whole tiles."""
    kernel, options = plan
    num_keys, width = k.shape[2], padded_width(q.shape[3])
    multiples = kernel.multiples(backward=backward)
    queries, keys = (
        -(-x.shape[2] // multiple) * multiple
        for x, multiple in zip((q, k), multiples, strict=True)
    )
    padded = Operands(
        _pad(q, {2: queries, 3: width}),
        _pad(k, {2: keys, 3: width}),
        _pad(v, {2: keys, 3: width}),
    )
    return padded, Rules(options, num_keys, keys > num_keys)


def _pad(x: Array, sizes: dict[int, int]) -> Array:
    """An array with some dims padded to the given sizes."""
    widths = [(0, sizes.get(d, size) - size) for d, size in enumerate(x.shape)]
    return jnp.pad(x, widths) if any(n for _, n in widths) else x
