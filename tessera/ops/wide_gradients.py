# SPDX-License-Identifier: Apache-2.0
"""Functions of narrow parameters whose gradients are added up in f32.

The gradient of a cast parameter has the cast's dtype, so a sum over many tokens, or
over devices, would be one of bf16 numbers. Matmuls have sums inside of them and keep
them in f32; lookups and collectives do not.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def with_wide_gradient(
    function: Callable[..., Array],
    cast: Callable[[Array], Array],
    param: Array,
    *operands: Any,
) -> Array:
    """``function(cast(param), *operands)``, whose gradient never is in the narrow dtype.

    Args:
      function: Linear in its first argument; it closes over no traced value.
      cast: Narrows a parameter; likewise.
      param: The parameter.
      *operands: What else the function takes, without gradients.

    Returns:
      What the function returns. Its cotangent is cast to the dtype of ``param``, and
      then transposed.
    """
    return function(cast(param), *operands)


def _forward(
    function: Callable[..., Array],
    cast: Callable[[Array], Array],
    param: Array,
    *operands: Any,
) -> tuple[Array, Any]:
    shape = jax.ShapeDtypeStruct(param.shape, param.dtype)
    return function(cast(param), *operands), (_Static(shape), operands)


def _backward(
    function: Callable[..., Array],
    cast: Callable[[Array], Array],
    residuals: Any,
    cotangent: Array,
) -> tuple[Any, ...]:
    del cast
    (shape, operands) = residuals
    transposed = jax.linear_transpose(lambda p: function(p, *operands), shape.value)
    (gradient,) = transposed(cotangent.astype(shape.value.dtype))
    return (gradient, *(None for _ in operands))


with_wide_gradient.defvjp(_forward, _backward)


@jax.tree_util.register_static
class _Static:
    """A value of a residual that is known while tracing."""

    def __init__(self, value: jax.ShapeDtypeStruct) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self.value == other.value

    def __hash__(self) -> int:
        return hash((self.value.shape, self.value.dtype))
