# SPDX-License-Identifier: Apache-2.0
"""``ts.nn.linear``: a matrix product and a bias."""

from typing import Any

import jax

from tessera.errors import OperandError
from tessera.ops.matmul import matmul
from tessera.ops.operand_layouts import as_array


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
      >>> import jax.numpy as jnp
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
