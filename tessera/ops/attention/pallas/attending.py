# SPDX-License-Identifier: Apache-2.0
"""Attention by our kernels: which of them a call gets, padding, and the gradient."""

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from tessera import _jax
from tessera.ops.attention.operands import Operands, Setting
from tessera.ops.attention.pallas import portable, portable_backward
from tessera.ops.attention.pallas.portable import Blocks
from tessera.ops.attention.pallas.portable_backward import Saved
from tessera.ops.attention.pallas.rules import Rules

if TYPE_CHECKING:
    from tessera.ops.attention.choice import Device


def why_not(operands: Operands, setting: Setting, device: "Device") -> str | None:
    """Why neither kernel can serve such a call there; or None."""
    del setting, device
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
    del operands, setting, device
    return "the portable kernel is exact, and slow"


def attend(operands: Operands, setting: Setting) -> Array:
    """What the queries read: ``[B, H, S, D]``."""
    return attend_portably(operands, setting, Blocks(128, 128))


def attend_portably(operands: Operands, setting: Setting, blocks: Blocks) -> Array:
    """What the queries read, by the portable kernel: ``[B, H, S, D]``."""
    return _attend((setting, blocks), operands)


_Plan = tuple[Setting, Blocks]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: _Plan, operands: Operands) -> Array:
    return _forward(plan, operands)[0]


def _forward(plan: _Plan, operands: Operands) -> Any:
    setting, blocks = plan
    rules = _rules(operands, setting, blocks)
    out, log_total = portable.forward(_padded(operands, plan), rules, blocks)
    length = operands.q.shape[2]
    out, log_total = out[:, :, :length], log_total[:, :, :length]
    return out, (operands, out, log_total)


def _backward(plan: _Plan, kept: Any, gradient: Array) -> tuple[Operands]:
    setting, blocks = plan
    operands, out, log_total = kept
    rules = _rules(operands, setting, blocks)
    share = (out.astype(log_total.dtype) * gradient.astype(log_total.dtype)).sum(-1)
    saved = Saved(
        *(_with_rows(x, blocks.queries, 2) for x in (gradient, log_total, share))
    )
    of_q, of_k, of_v = portable_backward.backward(
        _padded(operands, plan), saved, rules, blocks
    )
    keys = operands.k.shape[2]
    length = operands.q.shape[2]
    return (Operands(of_q[:, :, :length], of_k[:, :, :keys], of_v[:, :, :keys]),)


_attend.defvjp(_forward, _backward)


def _rules(operands: Operands, setting: Setting, blocks: Blocks) -> Rules:
    keys = operands.k.shape[2]
    return Rules(setting, keys, keys % blocks.keys > 0)


def _padded(operands: Operands, plan: _Plan) -> Operands:
    """Whole blocks of rows, and all of the offset in one array."""
    setting, blocks = plan
    offset = jnp.full(1, setting.offset, jnp.int32)
    if operands.offset is not None:
        offset += operands.offset.astype(jnp.int32)

    def segments(x: Array | None, rows: int) -> Array | None:
        return None if x is None else _with_rows(x.astype(jnp.int32), rows, 1, "edge")

    return Operands(
        _with_rows(operands.q, blocks.queries, 2),
        _with_rows(operands.k, blocks.keys, 2),
        _with_rows(operands.v, blocks.keys, 2),
        segments(operands.query_segments, blocks.queries),
        segments(operands.key_segments, blocks.keys),
        offset,
    )


def _with_rows(x: Array, block: int, dim: int, mode: str = "constant") -> Array:
    if not (missing := -x.shape[dim] % block):
        return x
    return jnp.pad(x, [(0, missing if d == dim else 0) for d in range(x.ndim)], mode)
