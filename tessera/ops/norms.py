# SPDX-License-Identifier: Apache-2.0
"""``ts.nn.layer_norm`` and ``rms_norm``: normalizations with f32 statistics."""

from typing import Any

import jax
import jax.numpy as jnp

from tessera.errors import OperandError
from tessera.ops.operand_checks import Dims, at_least_f32, floating_along


def layer_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    dim: Dims = -1,
    eps: float = 1e-5,
) -> jax.Array:
    """``x`` minus its mean, divided by the root of its variance plus ``eps``.

    Args:
      x: ``[...]`` floating-point.
      weight: Multiplies the result; has the sizes of the normalized dims.
      bias: Added to the result; has the same sizes.
      dim: The dims that are normalized together, for each index of the other dims.
      eps: Added to the variance.

    Returns:
      ``[...]`` in the dtype of ``x``; computed in f32.

    Raises:
      OperandError: [T401] a dim, a shape or a dtype is not valid.

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
    """``x`` divided by the root of its mean square plus ``eps``.

    Args:
      x: ``[...]`` floating-point.
      weight: Multiplies the result; has the sizes of the normalized dims.
      dim: The dims that are normalized together, for each index of the other dims.
      eps: Added to the mean square.

    Returns:
      ``[...]`` in the dtype of ``x``; computed in f32.

    Raises:
      OperandError: [T401] a dim, a shape or a dtype is not valid.

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


def _along(
    dims: tuple[int, ...], x: jax.Array, name: str, what: str, value: Any
) -> jax.Array:
    """A weight or bias, shaped to broadcast against ``x``."""
    value = jnp.asarray(value)
    sizes = tuple(x.shape[d] for d in dims)
    if value.shape != sizes:
        raise OperandError(
            f"the {what} of {name} does not have the sizes of the normalized dims",
            got=f"{what} {value.shape}, x {x.shape}, dims {dims} of sizes {sizes}",
            fix=f"pass a {what} of shape {sizes}, or other dims as dim=",
        )
    shape = [x.shape[d] if d in dims else 1 for d in range(x.ndim)]
    return value.reshape(shape)
