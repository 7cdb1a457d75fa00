# SPDX-License-Identifier: Apache-2.0
"""Attention by our kernels: which of them a call gets, padding, and the gradient.

On Hopper, and with a JAX that has Mosaic GPU's kernels, that is the kernel for Hopper
wherever it serves the call; everywhere else the portable one.
"""

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from tessera import _jax
from tessera._jax_traces import HAS_MOSAIC_GPU_KERNELS
from tessera.ops.attention.attention_call import Operands, Setting
from tessera.ops.attention.blockwise import varying_alike, varying_as
from tessera.ops.attention.pallas.block_sizes import (
    WIDEST,
    Hopper,
    Kernel,
    padded_width,
)
from tessera.ops.attention.pallas.mask_rules import Rules
from tessera.ops.attention.pallas.tuning import kernel_for

if TYPE_CHECKING:
    from tessera.ops.attention.dispatch import Device

_HOPPER = (9, 0)
_PACKAGE = "tessera.ops.attention.pallas"


def why_not(operands: Operands, setting: Setting, device: "Device") -> str | None:
    """Why neither kernel can serve such a call there; or None."""
    if why_not_hopper(operands, setting, device) is None:
        return None
    if any(_jax.varying_axes(x) for x in operands if x is not None):
        return (
            "Pallas' interpreter, which runs the portable kernel, does not say what "
            "varies between devices, and this region checks it (check_vma=True)"
        )
    return None


def why_not_unasked(
    operands: Operands, setting: Setting, device: "Device"
) -> str | None:
    """Why it should serve such a call only when it is asked for by name; or None."""
    if reason := why_not_hopper(operands, setting, device):
        return f"{reason}, and the portable kernel is exact, and slow"
    if jax.device_count() > 1 and not _in_manual_region():
        return "its operands may be split over devices, and XLA cannot split a kernel"
    return None


def why_not_hopper(
    operands: Operands, setting: Setting, device: "Device"
) -> str | None:
    """Why the kernel for Hopper cannot serve such a call there; or None."""
    del setting
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


def _in_manual_region() -> bool:
    """Whether every device runs this code on its own, on all axes of its mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return bool(mesh.axis_names) and set(mesh.manual_axes) == set(mesh.axis_names)


def attend(operands: Operands, setting: Setting) -> Array:
    """What the queries read: ``[B, H, S, D]``."""
    from tessera.ops.attention.dispatch import Device

    kernel = kernel_for(operands, setting, Device.here())
    return attend_by(kernel, operands, setting)


def attend_by(kernel: Kernel, operands: Operands, setting: Setting) -> Array:
    """What the queries read, by a kernel that cuts its work as is said."""
    return _attend((kernel, setting), Operands(*varying_alike(*operands)))


_Plan = tuple[Kernel, Setting]


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
    out, log_total = (varying_as(operands.q, x) for x in results)
    length, width = operands.q.shape[2:]
    out, log_total = out[:, :, :length, :width], log_total[:, :, :length]
    return out, (operands, out, log_total)


def _backward(plan: _Plan, kept: Any, gradient: Array) -> tuple[Operands]:
    kernel, _ = plan
    operands, out, log_total = kept
    padded, rules = _padded(operands, plan, backward=True)
    share = (out.astype(log_total.dtype) * gradient.astype(log_total.dtype)).sum(-1)
    rows = padded.q.shape[2]
    saved = (
        _with(gradient, {2: rows, 3: padded.q.shape[3]}),
        *(_with(x, {2: rows}) for x in (log_total, share)),
    )
    backwards = import_module(f"{_PACKAGE}.portable_backward")
    saved = backwards.Saved(*saved)
    if isinstance(kernel, Hopper):
        run = import_module(f"{_PACKAGE}.hopper_backward").backward
        results = run(padded, saved, rules, kernel.backward, kernel.interpret)
    else:
        results = backwards.backward(padded, saved, rules, kernel.blocks)
    of_operands = (
        varying_as(x, of_x[:, :, : x.shape[2], : x.shape[3]])
        for x, of_x in zip(operands[:3], results, strict=True)
    )
    return (Operands(*of_operands),)


_attend.defvjp(_forward, _backward)


def _padded(
    operands: Operands, plan: _Plan, *, backward: bool
) -> tuple[Operands, Rules]:
    """Whole blocks of rows; for the portable kernel, all of the offset in one array."""
    kernel, setting = plan
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
        offset = jnp.full(1, setting.offset, jnp.int32)
        if operands.offset is not None:
            offset += operands.offset.astype(jnp.int32)

    def segments(x: Array | None, rows: int) -> Array | None:
        return None if x is None else _with(x.astype(jnp.int32), {1: rows}, "edge")

    padded = Operands(
        _with(operands.q, {2: queries, 3: width}),
        _with(operands.k, {2: keys, 3: width}),
        _with(operands.v, {2: keys, 3: width}),
        segments(operands.query_segments, queries),
        segments(operands.key_segments, keys),
        offset,
    )
    num_keys = operands.k.shape[2]
    return padded, Rules(setting, num_keys, keys > num_keys)


def _with(x: Array, sizes: dict[int, int], mode: str = "constant") -> Array:
    """Padded to some sizes of some dims."""
    widths = [(0, sizes.get(d, size) - size) for d, size in enumerate(x.shape)]
    return jnp.pad(x, widths, mode) if any(n for _, n in widths) else x
