# SPDX-License-Identifier: Apache-2.0
"""Which dims of an array a call means."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from tessera.errors import OperandError

Dims: TypeAlias = int | Sequence[int]


def dims_of(name: str, x: Any, dim: Dims) -> tuple[int, ...]:
    """The dims that ``dim`` means, counted from 0, in its order.

    Args:
      name: What the message calls the function.
      x: An array.
      dim: One dim or several; negative ones count from the end.

    Raises:
      OperandError: [T401] the array has no such dim, or one is named twice.

    Example:
      >>> dims_of("sum", jnp.ones((2, 3, 4)), (-1, 0))
      (2, 0)
    """
    dims = tuple(dim) if isinstance(dim, Sequence) else (dim,)
    found = [d % x.ndim for d in dims if -x.ndim <= d < x.ndim]
    if dims and len(set(found)) == len(dims):
        return tuple(found)
    raise OperandError(
        f"{name} is to act along dims that its operand does not have",
        got=f"dim={dim}, shape {tuple(x.shape)}",
        fix=f"use dims from {-x.ndim} to {x.ndim - 1}, each once"
        if x.ndim
        else "give it an array of one dim or more",
    )


def swap_dims(x: Any, first: int, second: int) -> jax.Array:
    """An array whose dims ``first`` and ``second`` have changed places.

    Raises:
      OperandError: [T401] the array has no such dim.
    """
    places = [dims_of("transpose", x, dim)[0] for dim in (first, second)]
    return jnp.swapaxes(x, *places)
