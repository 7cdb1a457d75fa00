# SPDX-License-Identifier: Apache-2.0
"""Attention by Tessera's Pallas kernels: choice of the kernel, padding, gradient.

On Hopper, with a JAX that has Mosaic GPU kernels, calls that the Hopper kernel supports
use it; all others use the portable kernel.
"""

from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from tessera import _jax
from tessera._jax_traces import HAS_MOSAIC_GPU_KERNELS
from tessera.ops.attention.blockwise import (
    OutputGradients,
    delta_of,
    varying_alike,
    varying_as,
)
from tessera.ops.attention.dispatch import Device, Operands, Options
from tessera.ops.attention.pallas.block_sizes import (
    WIDEST,
    Hopper,
    Kernel,
    padded_width,
)
from tessera.ops.attention.pallas.mask_rules import Rules
from tessera.ops.attention.pallas.tuning import kernel_for

_HOPPER = (9, 0)
_PACKAGE = "tessera.ops.attention.pallas"


def unsupported_reason(
    operands: Operands, options: Options, device: Device
) -> str | None:
    """Why neither kernel supports such a call there; or None."""
    if hopper_unsupported_reason(operands, options, device) is None:
        return None
    if any(_jax.varying_axes(x) for x in operands if x is not None):
        return (
            "Pallas' interpreter, which runs the portable kernel, does not say what "
            "varies between devices, and this region checks it (check_vma=True)"
        )
    return None


def slow_reason(operands: Operands, options: Options, device: Device) -> str | None:
    """Why such a call should use a kernel only if it asks for it by name; or None."""
    if reason := hopper_unsupported_reason(operands, options, device):
        return f"{reason}, and the portable kernel is exact, and slow"
    if jax.device_count() > 1 and not _in_spmd_region():
        return "its operands may be split over devices, and XLA cannot split a kernel"
    return None


def hopper_unsupported_reason(
    operands: Operands, options: Options, device: Device
) -> str | None:
    """Why the Hopper kernel does not support such a call there; or None."""
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


def _in_spmd_region() -> bool:
    """Whether this is an SPMD region over all axes of its mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return bool(mesh.axis_names) and set(mesh.manual_axes) == set(mesh.axis_names)


def attend(operands: Operands, options: Options) -> Array:
    """The output of the queries: ``[B, H, S, D]``."""
    kernel = kernel_for(operands, options, Device.here())
    return attend_with(kernel, operands, options)


def attend_with(kernel: Kernel, operands: Operands, options: Options) -> Array:
    """The output of the queries, by that kernel and its block sizes."""
    return _attend((kernel, options), Operands(*varying_alike(*operands)))


_Plan = tuple[Kernel, Options]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: _Plan, operands: Operands) -> Array:
    return _forward(plan, operands)[0]


def _forward(plan: _Plan, operands: Operands) -> Any:
    kernel, _ = plan
    padded, rules = _padded(operands, plan, backward=False)
    if isinstance(kernel, Hopper):
        run = import_module(f"{_PACKAGE}.hopper").forward
        results = run(padded, rules, kernel.forward, kernel.interpret)
    else:
        run = import_module(f"{_PACKAGE}.portable").forward
        results = run(padded, rules, kernel.blocks)
    out, lse = (varying_as(operands.q, x) for x in results)
    length, width = operands.q.shape[2:]
    out, lse = out[:, :, :length, :width], lse[:, :, :length]
    return out, (operands, out, lse)


def _backward(plan: _Plan, residuals: Any, dout: Array) -> tuple[Operands]:
    kernel, _ = plan
    operands, out, lse = residuals
    padded, rules = _padded(operands, plan, backward=True)
    delta = delta_of(out, dout)
    rows = padded.q.shape[2]
    outputs = OutputGradients(
        _pad(dout, {2: rows, 3: padded.q.shape[3]}),
        *(_pad(x, {2: rows}) for x in (lse, delta)),
    )
    if isinstance(kernel, Hopper):
        run = import_module(f"{_PACKAGE}.hopper_backward").backward
        results = run(padded, outputs, rules, kernel.backward, kernel.interpret)
    else:
        run = import_module(f"{_PACKAGE}.portable_backward").backward
        results = run(padded, outputs, rules, kernel.blocks)
    gradients = (
        varying_as(x, dx[:, :, : x.shape[2], : x.shape[3]])
        for x, dx in zip(operands[:3], results, strict=True)
    )
    return (Operands(*gradients),)


_attend.defvjp(_forward, _backward)


def _padded(
    operands: Operands, plan: _Plan, *, backward: bool
) -> tuple[Operands, Rules]:
    """Operands padded to whole blocks; the portable kernel gets the whole offset."""
    kernel, options = plan
    queries, keys = (
        -(-length // multiple) * multiple
        for length, multiple in zip(
            (operands.q.shape[2], operands.k.shape[2]),
            kernel.multiples(backward=backward),
            strict=True,
        )
    )
    width, offset = operands.q.shape[3], None
    if isinstance(kernel, Hopper):
        width = padded_width(width)
    else:
        offset = jnp.full(1, options.offset, jnp.int32)
        if operands.offset is not None:
            offset += operands.offset.astype(jnp.int32)

    def segments(x: Array | None, rows: int) -> Array | None:
        return None if x is None else _pad(x.astype(jnp.int32), {1: rows}, "edge")

    padded = Operands(
        _pad(operands.q, {2: queries, 3: width}),
        _pad(operands.k, {2: keys, 3: width}),
        _pad(operands.v, {2: keys, 3: width}),
        segments(operands.query_segments, queries),
        segments(operands.key_segments, keys),
        offset,
    )
    num_keys = operands.k.shape[2]
    return padded, Rules(options, num_keys, keys > num_keys)


def _pad(x: Array, sizes: dict[int, int], mode: str = "constant") -> Array:
    """An array with some dims padded to the given sizes."""
    widths = [(0, sizes.get(d, size) - size) for d, size in enumerate(x.shape)]
    return jnp.pad(x, widths, mode) if any(n for _, n in widths) else x
