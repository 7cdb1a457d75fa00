# SPDX-License-Identifier: Apache-2.0
"""Array functions at top level: ``ts.sum``, ``ts.split``, ``ts.zeros``, ….

They are those of ``jax.numpy``, with its argument order and defaults, and also accept
PyTorch's names: ``dim=`` for ``axis=``, ``keepdim=`` for ``keepdims=``, ``sections=``
of ``split``, a shape as several integers. Where the two libraries disagree,
``jax.numpy`` wins: ``max`` along a dim returns no indices, ``split(x, 3)`` returns
three parts, ``sort`` returns the values only.

This module is a facade: nothing in the package imports it.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from tessera.errors import OperandError
from tessera.ops.matmul import matmul as matmul
from tessera.ops.operand_checks import dims_of, nearest_divisors, swap_dims
from tessera.shard import as_dtype

Result = TypeVar("Result")


def _adapted(
    function: Callable[..., Result], *, variadic_shape: bool = False, **aliases: str
) -> Callable[..., Result]:
    """A function of JAX that also accepts PyTorch's keywords and short dtype names.

    ``aliases`` maps the keywords of PyTorch to those of JAX. With ``variadic_shape``
    the shape may be several integers: ``zeros(2, 3)``.
    """
    name = getattr(function, "__name__", "function")

    @functools.wraps(function)
    def adapted(*args: Any, **kwargs: Any) -> Result:
        for alias, keyword in aliases.items():
            if alias in kwargs:
                value = kwargs.pop(alias)
                if keyword in kwargs or keyword in _positional(function, args):
                    _refuse_both(name, {keyword: None, alias: value})
                kwargs[keyword] = tuple(value) if isinstance(value, list) else value
        if variadic_shape:
            has_dtype = len(args) == 2 and not isinstance(args[0], int | np.integer)
            shape, rest = (args[:1], args[1:]) if has_dtype else (args, ())
            args = _shape(shape), *rest
        if "dtype" in kwargs:
            kwargs["dtype"] = _dtype(kwargs["dtype"])
        return function(*map(_dtype, args), **kwargs)

    pairs = ", ".join(f"``{alias}=`` for ``{k}=``" for alias, k in aliases.items())
    pairs = pairs or "a dtype by its short name"
    adapted.__doc__ = f"{_summary(function)}\n\nAs in JAX, and takes {pairs}."
    return adapted


def _positional(function: Callable[..., Any], args: Sequence[Any]) -> Collection[str]:
    """The names of the arguments that are passed by position."""
    if len(args) < 2:  # the operand alone: the usual call, and a quick answer
        return ()
    return inspect.signature(function).bind_partial(*args).arguments


def _summary(function: Callable[..., Any]) -> str:
    return (function.__doc__ or "").strip().partition("\n")[0]


def _dtype(value: Any) -> Any:
    return as_dtype(value) if isinstance(value, str) else value


def _shape(sizes: Sequence[Any]) -> tuple[Any, ...]:
    """One sequence, or several integers, as a tuple."""
    if len(sizes) == 1 and not isinstance(sizes[0], int | np.integer):
        return tuple(sizes[0])
    return tuple(sizes)


def _either(function: str, **arguments: Any) -> Any:
    """The value of an argument that has two names; raises [T401] for both at once."""
    values = {name: value for name, value in arguments.items() if value is not None}
    if len(values) > 1:
        _refuse_both(function, values)
    return next(iter(values.values()), None)


def _refuse_both(function: str, arguments: Mapping[str, Any]) -> None:
    alias, value = list(arguments.items())[-1]
    raise OperandError(
        f"{function} is given {' and '.join(arguments)}, which are one argument",
        got=f"{alias}={value!r}",
        fix=f"leave {alias}= out",
    )


# --- the table of functions
# fmt: off

# Reductions.
sum, mean, prod, max, min, any, all, argmax, argmin, logsumexp = (  # noqa: A001
    _adapted(function, dim="axis", keepdim="keepdims") for function in (
        jnp.sum, jnp.mean, jnp.prod, jnp.max, jnp.min, jnp.any, jnp.all,
        jnp.argmax, jnp.argmin, jax.nn.logsumexp,
    )
)
# Along one dim, or with a new one.
cumsum, sort, argsort, concatenate, stack, squeeze, expand_dims = (
    _adapted(function, dim="axis") for function in (
        jnp.cumsum, jnp.sort, jnp.argsort, jnp.concatenate, jnp.stack, jnp.squeeze,
        jnp.expand_dims,
    )
)
cat, unsqueeze = concatenate, expand_dims
# Element by element.
abs, exp, log, sqrt, rsqrt = jnp.abs, jnp.exp, jnp.log, jnp.sqrt, jax.lax.rsqrt  # noqa: A001
square, sin, cos, tanh, sigmoid = jnp.square, jnp.sin, jnp.cos, jnp.tanh, jax.nn.sigmoid
isfinite, isnan, isinf, where = jnp.isfinite, jnp.isnan, jnp.isinf, jnp.where
minimum, maximum, clip, clamp = jnp.minimum, jnp.maximum, jnp.clip, jnp.clip
logical_and, logical_or, logical_not = jnp.logical_and, jnp.logical_or, jnp.logical_not
# Of whole arrays.
einsum, broadcast_to, tril, triu = jnp.einsum, jnp.broadcast_to, jnp.tril, jnp.triu
# Creation.
zeros, ones = (_adapted(fill, variadic_shape=True) for fill in (jnp.zeros, jnp.ones))
full, zeros_like, ones_like, full_like, arange = (
    _adapted(function) for function in (
        jnp.full, jnp.zeros_like, jnp.ones_like, jnp.full_like, jnp.arange,
    )
)
eye = _adapted(jnp.eye, n="N", m="M")
# fmt: on


def reshape(x: Any, *shape: Any) -> jax.Array:
    """The same elements in another shape, of which one size may be -1.

    Example:
      >>> reshape(jnp.ones((2, 3, 4)), (6, -1)).shape
      (6, 4)
    """
    return jnp.asarray(x).reshape(_shape(shape))


def split(
    x: Any,
    sections: int | Sequence[int] | None = None,
    dim: int | None = None,
    *,
    axis: int | None = None,
    indices_or_sections: int | Sequence[int] | None = None,
) -> list[jax.Array]:
    """Split an array into parts along one dim, as ``jax.numpy.split``.

    PyTorch's ``split`` takes the size of the parts, this one their number.

    Args:
      x: ``[...]``.
      sections: The number of equal parts, or the indices at which to split.
      dim: The dim to split; 0 by default.
      axis: Another name of ``dim``.
      indices_or_sections: Another name of ``sections``.

    Raises:
      OperandError: [T401] the parts would not be equal, there is no such dim, or an
        argument is given by both of its names.

    Example:
      >>> [part.shape for part in split(jnp.ones((2, 6)), sections=3, dim=-1)]
      [(2, 2), (2, 2), (2, 2)]
    """
    parts = _either("split", sections=sections, indices_or_sections=indices_or_sections)
    along = _either("split", dim=dim, axis=axis)
    x = jnp.asarray(x)
    (along,) = dims_of("split", x, 0 if along is None else along)
    if parts is None:
        raise OperandError(
            "split needs the number of parts, or the indices at which to split",
            got=f"shape {x.shape}",
            fix="write split(x, sections=3, dim=-1)",
        )
    size = x.shape[along]
    if isinstance(parts, int) and (parts < 1 or size % parts):
        raise OperandError(
            f"split cannot divide {size} into {parts} equal parts",
            got=f"shape {x.shape}, dim {along}, sections {parts}"
            + (f", remainder {size % parts}" if parts > 0 else ""),
            fix=f"use {nearest_divisors(size, parts)} sections, or a list of the "
            "indices at which to split",
        )
    return jnp.split(x, parts, axis=along)


def transpose(x: Any, *dims: Any, axes: Sequence[int] | None = None) -> jax.Array:
    """An array with its dims in another order.

    Args:
      x: ``[...]``.
      dims: Nothing, to reverse the dims; two integers, the dims to swap; or one
        sequence, a permutation of all dims.
      axes: A permutation of all dims, by keyword.

    Raises:
      OperandError: [T401] the dims are given in another way, or twice.

    Example:
      >>> x = jnp.ones((2, 3, 4))
      >>> transpose(x).shape, transpose(x, 1, 2).shape, transpose(x, (2, 0, 1)).shape
      ((4, 3, 2), (2, 4, 3), (4, 2, 3))
    """
    if len(dims) == 2 and axes is None:
        return swap_dims(jnp.asarray(x), *dims)
    if len(dims) > 1 or (dims and axes is not None):
        raise OperandError(
            "transpose takes two dims to swap, or one permutation of all dims",
            got=f"dims {dims}" + (f", axes={axes}" if axes is not None else ""),
            fix=f"write transpose(x, {dims}), or permute",
        )
    return jnp.transpose(x, dims[0] if dims else axes)


def permute(x: Any, *dims: Any) -> jax.Array:
    """An array with its dims permuted, given as integers or as one sequence.

    Example:
      >>> permute(jnp.ones((2, 3, 4)), 2, 0, 1).shape
      (4, 2, 3)
    """
    return jnp.transpose(x, _shape(dims))


def topk(
    x: Any,
    k: int,
    dim: int | None = None,
    *,
    largest: bool = True,
    axis: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The ``k`` largest or smallest values along a dim, sorted, and their indices.

    Args:
      x: ``[...]``.
      k: The number of values.
      dim: The dim; the last one by default.
      largest: False returns the smallest values, in ascending order.
      axis: Another name of ``dim``.

    Returns:
      Values in the dtype of ``x`` and int32 indices, of size ``k`` along the dim.

    Raises:
      OperandError: [T401] the dim is smaller than ``k``, or given by both names.

    Example:
      >>> values, indices = topk(jnp.array([3.0, 1.0, 2.0]), 2)
      >>> values.tolist(), indices.tolist()
      ([3.0, 2.0], [0, 2])
    """
    along = _either("topk", dim=dim, axis=axis)
    x = jnp.asarray(x)
    (along,) = dims_of("topk", x, -1 if along is None else along)
    if not 0 <= k <= x.shape[along]:
        raise OperandError(
            f"topk cannot take {k} of {x.shape[along]}",
            got=f"shape {x.shape}, dim {along}",
            fix=f"use k from 0 to {x.shape[along]}",
        )
    if largest:
        return jax.lax.top_k(x, k, axis=along)
    order = jax.lax.slice_in_dim(jnp.argsort(x, axis=along), 0, k, axis=along)
    return jnp.take_along_axis(x, order, axis=along), order


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
    array = jnp.array(data, dtype=_dtype(dtype))
    return jax.lax.convert_element_type(array, array.dtype)


# fmt: off
__all__ = [
    "abs", "all", "any", "arange", "argmax", "argmin", "argsort", "broadcast_to",
    "cat", "clamp", "clip", "concatenate", "cos", "cumsum", "einsum", "exp",
    "expand_dims", "eye", "full", "full_like", "isfinite", "isinf", "isnan", "log",
    "logical_and", "logical_not", "logical_or", "logsumexp", "matmul", "max",
    "maximum", "mean", "min", "minimum", "ones", "ones_like", "permute", "prod",
    "reshape", "rsqrt", "sigmoid", "sin", "sort", "split", "sqrt", "square",
    "squeeze", "stack", "sum", "tanh", "tensor", "topk", "transpose", "tril",
    "triu", "unsqueeze", "where", "zeros", "zeros_like",
]
# fmt: on
