# SPDX-License-Identifier: Apache-2.0
"""Functions of parameters that are cast, whose gradients are added up uncast.

The gradient of a cast parameter has the dtype of the cast, so a sum over tokens or over
devices would be one of bf16 numbers. A matmul has its sum inside and keeps it in f32;
lookups and collectives do not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from tessera.foundations.tree import Tree
from tessera.tracing.casts import cast_parameter

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
@dataclass(frozen=True)
class _Static:
    """A shape among residuals, which are arrays otherwise."""

    struct: jax.ShapeDtypeStruct


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ParameterCopy:
    """A parameter and a narrow copy of it, as one leaf of a tree of parameters.

    A gradient by the copy would be narrow, and so would its sums. ``read_copies`` gives
    the copy where it is used, and the parameter has the gradient, as in a cast there.

    Attributes:
      parameter: An array with the gradient's shape and dtype; its values are not read.
      copy: The copy.
    """

    parameter: Array
    copy: Array

    @classmethod
    def of(cls, parameter: Array, copy: Array) -> "ParameterCopy | Array":
        """The pair; the parameter alone where the copy is no narrower."""
        return parameter if parameter.dtype == copy.dtype else cls(parameter, copy)


def is_copy(node: Any) -> bool:
    """Whether a node of a tree is a ``ParameterCopy``."""
    return isinstance(node, ParameterCopy)


def read_copies(tree: Tree) -> Tree:
    """The arrays to compute with: the copy of each parameter that has one."""

    def read(leaf: Any) -> Any:
        return _copy_of(leaf.parameter, leaf.copy) if is_copy(leaf) else leaf

    return jax.tree.map(read, tree, is_leaf=is_copy)


@jax.custom_vjp
def _copy_of(parameter: Array, copy: Array) -> Array:
    del parameter
    return copy


def _copy_forward(parameter: Array, copy: Array) -> tuple[Array, Any]:
    return copy, _Static(jax.ShapeDtypeStruct(parameter.shape, parameter.dtype))


def _copy_backward(residual: Any, cotangent: Array) -> tuple[Array, None]:
    return cast_parameter(cotangent, residual.struct.dtype), None


_copy_of.defvjp(_copy_forward, _copy_backward)
