# SPDX-License-Identifier: Apache-2.0
"""``op.matmul`` and ``ts.nn.linear``: matrix products whose errors show the shapes."""

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


def linear(x: Any, weight: Any, bias: Any = None) -> jax.Array:
    """``x @ weight + bias``.

    The weight is ``[D_in, D_out]``, as everywhere in JAX; that of PyTorch's ``linear``
    is the transpose.

    Args:
      x: ``[..., D_in]``.
      weight: ``[D_in, D_out]``.
      bias: ``[D_out]``, or None.

    Returns:
      ``[..., D_out]`` in the operands' promoted dtype.

    Raises:
      OperandError: [T401] the shapes do not fit.

    Example:
      >>> linear(jnp.ones((4, 8, 2)), jnp.ones((2, 3)), jnp.zeros(3)).shape
      (4, 8, 3)
    """
    x, weight = as_array(x), as_array(weight)
    bias = None if bias is None else as_array(bias)
    if weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[1:]):
        raise OperandError(
            "linear takes a weight [D_in, D_out] and a bias [D_out]",
            got=f"weight {weight.shape}"
            + ("" if bias is None else f", bias {bias.shape}"),
            fix="transpose a weight that comes from PyTorch",
        )
    product = matmul(x, weight)
    return product if bias is None else product + bias


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
