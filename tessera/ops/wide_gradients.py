# SPDX-License-Identifier: Apache-2.0
"""Functions of parameters that are cast, whose gradients are added up uncast.

The gradient of a cast parameter has the dtype of the cast, so a sum over tokens or over
devices would be one of bf16 numbers. A matmul has its sum inside and keeps it in f32;
lookups and collectives do not.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from tessera.casts import cast_parameter

_Function: TypeAlias = Callable[..., Array]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def with_wide_gradient(
    function: _Function, linear: _Function, param: Array, *operands: Any
) -> Array:
    """``function(param, *operands)``, with the gradient of another function.

    Args:
      function: Casts the parameter; closes over no traced value.
      linear: The same without the cast; linear in its first argument.
      param: The parameter.
      *operands: What else both take, without gradients.

    Returns:
      What ``function`` returns. Its cotangent is cast to f32, ``linear`` is transposed,
      and the gradient is cast to the dtype of ``param``.
    """
    return function(param, *operands)


def _forward(
    function: _Function, linear: _Function, param: Array, *operands: Any
) -> tuple[Array, Any]:
    struct = jax.ShapeDtypeStruct(param.shape, param.dtype)
    return function(param, *operands), (_Static(struct), operands)


def _backward(
    function: _Function, linear: _Function, residuals: Any, cotangent: Array
) -> tuple[Any, ...]:
    del function
    param, operands = residuals[0].struct, residuals[1]
    is_narrow = param.dtype.itemsize < jnp.dtype(jnp.float32).itemsize
    wide = param.update(dtype=jnp.float32) if is_narrow else param

    def of_param(param: Array) -> Array:
        return linear(param, *operands)

    transposed = jax.linear_transpose(of_param, wide)
    (gradient,) = transposed(cast_parameter(cotangent, wide.dtype))
    return (gradient.astype(param.dtype), *(None for _ in operands))


with_wide_gradient.defvjp(_forward, _backward)


@jax.tree_util.register_static
class _Static:
    """A shape among residuals, which are arrays otherwise."""

    def __init__(self, struct: jax.ShapeDtypeStruct) -> None:
        self.struct = struct

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self.struct == other.struct

    def __hash__(self) -> int:
        return hash((self.struct.shape, self.struct.dtype))
