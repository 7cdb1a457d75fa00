# SPDX-License-Identifier: Apache-2.0
"""Array functions at top level: ``ts.split``, ``ts.tensor``, ``ts.minimum``, ….

They are those that training steps written for PyTorch use. All others are in
``jax.numpy``, whose functions work in every step.

This module is a facade: nothing in the package imports it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tessera.errors import OperandError
from tessera.ops.matmul import matmul as matmul
from tessera.ops.operand_checks import dim_of, nearest_divisors
from tessera.shard import as_dtype

isfinite, minimum = jnp.isfinite, jnp.minimum


def split(x: Any, sections: int | Sequence[int], dim: int = 0) -> list[jax.Array]:
    """Split an array into parts along one dim, as ``jax.numpy.split``.

    PyTorch's ``split`` takes the size of the parts, this one their number.

    Args:
      x: ``[...]``.
      sections: The number of equal parts, or the indices at which to split.
      dim: The dim to split.

    Raises:
      OperandError: [T401] the parts would not be equal, or there is no such dim.

    Example:
      >>> [part.shape for part in split(jnp.ones((2, 6)), sections=3, dim=-1)]
      [(2, 2), (2, 2), (2, 2)]
    """
    x = jnp.asarray(x)
    along = dim_of("split", x, dim)
    size = x.shape[along]
    if isinstance(sections, int) and (sections < 1 or size % sections):
        raise OperandError(
            f"split cannot divide {size} into {sections} equal parts",
            got=f"shape {x.shape}, dim {along}, sections {sections}"
            + (f", remainder {size % sections}" if sections > 0 else ""),
            fix=f"use {nearest_divisors(size, sections)} sections, or a list of the "
            "indices at which to split",
        )
    return jnp.split(x, sections, axis=along)


def tensor(data: Any, dtype: Any = None) -> jax.Array:
    """An array of the given values, copied.

    ``dist.tensor`` declares an array by its shape, this function creates one from its
    values. Python floats become f32 and integers i32 (64 bits with ``jax_enable_x64``),
    and the result has a strong dtype: it is not promoted to that of the other operand.

    Args:
      data: Numbers, nested lists of them, or an array.
      dtype: ``f32``, ``bf16``, …, or a dtype; by default that of the data.

    Raises:
      TensorFormError: [T207] there is no such dtype.

    Example:
      >>> tensor(65536.0)
      Array(65536., dtype=float32)
    """
    array = jnp.array(data, dtype=as_dtype(dtype) if isinstance(dtype, str) else dtype)
    return jax.lax.convert_element_type(array, array.dtype)


__all__ = ["isfinite", "matmul", "minimum", "split", "tensor"]
