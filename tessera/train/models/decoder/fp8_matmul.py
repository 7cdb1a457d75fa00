# SPDX-License-Identifier: Apache-2.0
"""A matmul of 8-bit floating-point operands, each scaled by its own maximum.

Activations and weights are float8_e4m3fn, gradients of outputs float8_e5m2, which has
more range and less precision (Micikevicius et al., arXiv 2209.05433).
"""

from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

_Dims: TypeAlias = tuple[range, range]


class Quantized(NamedTuple):
    """An array as ``values * scale``.

    Attributes:
      values: In an 8-bit dtype.
      scale: f32, a scalar.
    """

    values: Array
    scale: Array


def quantize(x: Array, dtype: DTypeLike) -> Quantized:
    """``x`` in an 8-bit dtype, with a scale that makes its largest value the dtype's.

    Nothing is clipped, and an element that is NaN stays NaN. An infinite element is NaN
    too, and makes the scale infinite, so that all products of the array are NaN.

    Example:
      >>> quantize(jnp.array([0.0, -3.5]), jnp.float8_e4m3fn).values
      Array([0, -448], dtype=float8_e4m3fn)
    """
    largest = jnp.max(jnp.abs(x)).astype(jnp.float32)
    # Zeros, and numbers whose scale would be subnormal, which devices flush to zero.
    least = jnp.finfo(jnp.float32).tiny
    scale = jnp.maximum(largest / jnp.finfo(dtype).max.astype(jnp.float32), least)
    return Quantized((x.astype(jnp.float32) / scale).astype(dtype), scale)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def fp8_tensordot(x: Array, weight: Array, axes: int) -> Array:
    """``jnp.tensordot(x, weight, axes)`` with 8-bit operands, and so its gradients.

    A scale is of a whole array (current scaling): on a mesh the maximum is that over
    all devices, so the result does not depend on the layout. Sums are f32. Where the
    result is to be added up over devices, it is so in the dtype of ``x``; the gradient
    of the weight in f32.

    Args:
      x: ``[..., *contracted]``.
      weight: ``[*contracted, *outputs]``, in the dtype of ``x``.
      axes: The number of contracted dims.

    Returns:
      ``[..., *outputs]`` in the dtype of ``x``.

    Example:
      >>> fp8_tensordot(jnp.ones((2, 3)), 2 * jnp.ones((3, 4)), 1).shape
      (2, 4)
    """
    return _multiply(x, weight, axes)[0]


def _multiply(
    x: Array, weight: Array, axes: int
) -> tuple[Array, tuple[Quantized, Quantized]]:
    operands = quantize(x, jnp.float8_e4m3fn), quantize(weight, jnp.float8_e4m3fn)
    dims = range(x.ndim - axes, x.ndim), range(axes)
    return _product(*operands, dims, x.dtype).astype(x.dtype), operands


def _forward(
    x: Any, weight: Any, axes: int
) -> tuple[Array, tuple[Quantized | None, Quantized]]:
    result, operands = _multiply(x.value, weight.value, axes)
    # The input is for the gradient of the weight, which one that is frozen has not.
    return result, (operands[0] if weight.perturbed else None, operands[1])


def _backward(
    axes: int, operands: tuple[Quantized | None, Quantized], gradient: Array
) -> tuple[Array, Array | None]:
    (x, weight), dtype = operands, gradient.dtype
    outputs = weight.values.ndim - axes
    rows = range(gradient.ndim - outputs)
    narrow = quantize(gradient, jnp.float8_e5m2)
    last = range(len(rows), gradient.ndim)
    dims = last, range(axes, axes + outputs)
    of_x = _product(narrow, weight, dims, dtype, "highest").astype(dtype)
    if x is None:
        return of_x, None
    of_weight = _product(x, narrow, (rows, rows), jnp.float32, "highest")
    return of_x, of_weight.astype(dtype)


fp8_tensordot.defvjp(_forward, _backward, symbolic_zeros=True)


def _product(
    left: Quantized,
    right: Quantized,
    dims: _Dims,
    sums: DTypeLike,
    precision: str = "default",
) -> Array:
    """f32, of a matmul whose sums over devices are in the dtype ``sums``.

    On Hopper ``default`` accumulates with fewer bits than f32, ``highest`` does not;
    forward and backward passes differ in it as those of TransformerEngine and Flax do.
    """
    product = lax.dot_general(
        left.values,
        right.values,
        (dims, ((), ())),
        precision=precision,
        preferred_element_type=sums,
    )
    return product.astype(jnp.float32) * (left.scale * right.scale)
