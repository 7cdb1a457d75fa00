# SPDX-License-Identifier: Apache-2.0
"""Normalizations, with their statistics in f32 whatever the dtype of the operand."""

from typing import Any

import jax
import jax.numpy as jnp

from tessera.errors import OperandError
from tessera.ops.dim_arguments import Dims, dims_of


def layer_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    dim: Dims = -1,
    eps: float = 1e-5,
) -> jax.Array:
    """``x`` less its mean, over the root of its variance plus ``eps``.

    Args:
      x: ``[...]`` floating-point.
      weight: Of the sizes of the normalized dims; multiplies the result.
      bias: The same; is added to it.
      dim: The dims that are normalized together, each place along the others by itself.
      eps: Added to the variance.

    Returns:
      ``[...]`` in the dtype of ``x``; everything before is computed in f32.

    Raises:
      OperandError: [T401] a dim, a shape or a dtype does not fit.

    Example:
      >>> print(layer_norm(jnp.array([1.0, 3.0])).round(3))
      [-1.  1.]

    Source: Ba et al., Layer Normalization, arXiv 1607.06450.
    """
    x, dims = floating_along("layer_norm", x, dim)
    wide = at_least_f32(x)
    centered = wide - wide.mean(axis=dims, keepdims=True)
    variance = jnp.square(centered).mean(axis=dims, keepdims=True)
    unit = centered * jax.lax.rsqrt(variance + eps)
    if weight is not None:
        unit *= _along(dims, x, "layer_norm", "weight", weight).astype(wide.dtype)
    if bias is not None:
        unit += _along(dims, x, "layer_norm", "bias", bias).astype(wide.dtype)
    return unit.astype(x.dtype)


def rms_norm(
    x: Any, weight: Any = None, *, dim: Dims = -1, eps: float = 1e-6
) -> jax.Array:
    """``x`` over the root of its mean square plus ``eps``.

    Args:
      x: ``[...]`` floating-point.
      weight: Of the sizes of the normalized dims; multiplies the result.
      dim: The dims that are normalized together, each place along the others by itself.
      eps: Added to the mean square.

    Returns:
      ``[...]`` in the dtype of ``x``; everything before is computed in f32.

    Raises:
      OperandError: [T401] a dim, a shape or a dtype does not fit.

    Example:
      >>> print(rms_norm(jnp.array([3.0, 3.0]), eps=0.0))
      [1. 1.]

    Source: Zhang and Sennrich, arXiv 1910.07467.
    """
    x, dims = floating_along("rms_norm", x, dim)
    wide = at_least_f32(x)
    mean_square = jnp.mean(jnp.square(wide), axis=dims, keepdims=True)
    unit = wide * jax.lax.rsqrt(mean_square + eps)
    if weight is not None:
        unit *= _along(dims, x, "rms_norm", "weight", weight).astype(wide.dtype)
    return unit.astype(x.dtype)


def at_least_f32(x: jax.Array) -> jax.Array:
    """``x`` in f32, or as it is where that is wider."""
    return x if jnp.finfo(x.dtype).bits >= 32 else x.astype(jnp.float32)


def floating_along(name: str, x: Any, dim: Dims) -> tuple[jax.Array, tuple[int, ...]]:
    """An operand of floating-point numbers, and its dims that ``dim`` means.

    Raises:
      OperandError: [T401] it has other numbers, or no such dims.
    """
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise OperandError(
            f"{name} takes floating-point numbers",
            got=f"dtype {x.dtype.name}, shape {x.shape}",
            fix="cast them first, e.g. with .astype(jnp.float32)",
        )
    return x, tuple(sorted(dims_of(name, x, dim)))


def _along(
    dims: tuple[int, ...], x: jax.Array, name: str, what: str, value: Any
) -> jax.Array:
    """A weight or bias, shaped to broadcast against ``x``."""
    value = jnp.asarray(value)
    sizes = tuple(x.shape[d] for d in dims)
    if value.shape != sizes:
        raise OperandError(
            f"the {what} of {name} has not the sizes of the normalized dims",
            got=f"{what} {value.shape}, x {x.shape}, dims {dims} of sizes {sizes}",
            fix=f"pass a {what} of shape {sizes}, or other dims as dim=",
        )
    shape = [x.shape[d] if d in dims else 1 for d in range(x.ndim)]
    return value.reshape(shape)
