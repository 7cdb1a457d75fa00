# SPDX-License-Identifier: Apache-2.0
"""Checks of operands that several operations share."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tessera.errors import OperandError, nearest


def dim_of(name: str, x: Any, dim: int) -> int:
    """A dim of an array, counted from 0.

    Args:
      name: The name of the function, for the message.
      x: An array.
      dim: A dim; a negative one counts from the end.

    Raises:
      OperandError: [T401] the array has no such dim.

    Example:
      >>> dim_of("split", jnp.ones((2, 3, 4)), -1)
      2
    """
    if -x.ndim <= dim < x.ndim:
        return dim % x.ndim
    raise OperandError(
        f"the operand of {name} does not have this dim",
        got=f"dim={dim}, shape {tuple(x.shape)}",
        fix=f"use a dim from {-x.ndim} to {x.ndim - 1}"
        if x.ndim
        else "give it an array of one dim or more",
    )


def swap_dims(x: Any, first: int, second: int) -> jax.Array:
    """An array with the dims ``first`` and ``second`` swapped.

    Raises:
      OperandError: [T401] the array has no such dim.
    """
    dims = [dim_of("transpose", x, dim) for dim in (first, second)]
    return jnp.swapaxes(x, *dims)


def nearest_divisors(size: int, divisor: int) -> str:
    """The divisors of a size just below and above a number, for the fix of an error.

    Example:
      >>> nearest_divisors(10, 3)
      '2 or 5'
    """
    return nearest((n for n in range(1, size + 1) if size % n == 0), divisor)


def raise_problems(message: str, problems: Sequence[tuple[str, str]]) -> None:
    """Raise one [T401] for all problems of a call, each a ``got`` and a ``fix``."""
    if problems:
        raise OperandError(
            message,
            got="\n".join(got for got, _ in problems),
            fix="\n".join(fix for _, fix in problems),
        )


def check_positive(function: str, name: str, value: float) -> None:
    """Raise [T401] for an option that is not a positive, finite number."""
    if not 0 < value < math.inf:
        raise OperandError(
            f"{name} of {function} is not positive",
            got=f"{name}={value}",
            fix=f"use {name}=1 or more",
        )


def check_activations(function: str, x: jax.Array) -> None:
    """Raise [T401] for an operand that is not ``[B, S, D]`` and floating-point."""
    if x.ndim != 3 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise OperandError(
            f"{function} takes activations of shape [batch, sequence, features]",
            got=f"shape {x.shape}, dtype {x.dtype.name}",
            fix="embed token ids first, and add a batch dim to single sequences",
        )


def check_one_dtype(function: str, q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    """Raise [T401] for queries, keys and values without one floating-point dtype."""
    if not q.dtype == k.dtype == v.dtype or not jnp.issubdtype(q.dtype, jnp.floating):
        raise OperandError(
            f"{function} takes operands of one floating-point dtype",
            got=f"queries {q.dtype}, keys {k.dtype}, values {v.dtype}",
            fix="cast them to one dtype first",
        )
