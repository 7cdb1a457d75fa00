# SPDX-License-Identifier: Apache-2.0
"""``op.matmul``: a matrix product whose errors show the shapes."""

from typing import Any

import jax
import jax.numpy as jnp

from tessera.errors import OperandError
from tessera.ops.operand_layouts import as_array


def matmul(a: Any, b: Any) -> jax.Array:
    """Matrix product of the last two dims; leading dims broadcast.

    Global arrays give the global product, whatever their layouts. Inside an SPMD
    region, such as ``op.kernel``, it is the product of this device's blocks.

    Args:
      a: ``[..., M, K]``, or ``[K]``.
      b: ``[..., K, N]``, or ``[K]``.

    Returns:
      ``[..., M, N]`` in the operands' promoted dtype.

    Raises:
      OperandError: [T401] the operands are scalars, or their inner or leading dims
        differ.

    Example:
      >>> matmul(jnp.ones((2, 3)), jnp.ones((3, 4))).shape
      (2, 4)
    """
    a, b = as_array(a), as_array(b)
    _check(a.shape, b.shape)
    return jnp.matmul(a, b)


def _check(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    got = f"shapes {a} and {b}"
    if not a or not b:
        raise OperandError(
            "matmul takes no scalars", got=got, fix="multiply by a scalar with *"
        )
    inner = b[-2] if len(b) > 1 else b[0]
    if a[-1] != inner:
        raise OperandError(
            "matmul cannot contract dims of different sizes",
            got=f"{got}: last dim of the first is {a[-1]}, "
            f"{'second-last' if len(b) > 1 else 'only'} dim of the second is {inner}",
            fix="transpose one of them, or check which is the weight",
        )
    leading = zip(reversed(a[:-2]), reversed(b[:-2]), strict=False)
    if any(x != y and 1 not in (x, y) for x, y in leading):
        raise OperandError(
            "matmul cannot broadcast the leading dims",
            got=f"{got}: leading dims {a[:-2]} and {b[:-2]}",
            fix="make them equal, or 1",
        )
