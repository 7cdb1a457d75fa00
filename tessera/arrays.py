# SPDX-License-Identifier: Apache-2.0
"""``ts.sum``, ``ts.split``, ``ts.zeros``, …: functions of ``jax.numpy`` at top level.

They are those of ``jax.numpy``, in their order of arguments and with their defaults.
What PyTorch calls otherwise is accepted as well: ``dim=`` for ``axis=``, ``keepdim=``
for ``keepdims=``, ``sections=`` of ``split``, a shape as several numbers. Where a call
has two meanings it is that of ``jax.numpy``: ``max`` along a dim gives no indices,
``split(x, 3)`` gives three parts, ``sort`` gives the values alone.

A facade: nothing in the package imports it.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from tessera.errors import OperandError
from tessera.ops.dim_arguments import dims_of, swap_dims
from tessera.ops.matmul import matmul as matmul
from tessera.shard import as_dtype

Result = TypeVar("Result")

_DIM: Final = {"dim": "axis"}
_DIM_KEPT: Final = {"dim": "axis", "keepdim": "keepdims"}


def _spelled(
    function: Callable[..., Result], spellings: Mapping[str, str]
) -> Callable[..., Result]:
    """A function of ``jax.numpy`` that takes some keywords by another name too."""
    name = getattr(function, "__name__", "function")

    @functools.wraps(function)
    def spelled(*args: Any, **kwargs: Any) -> Result:
        for other, known in spellings.items():
            if other in kwargs:
                value = kwargs.pop(other)
                if known in kwargs or known in _positional(function, args):
                    raise OperandError(
                        f"{name} is given {known} and {other}, which are one argument",
                        got=f"{other}={value!r}",
                        fix=f"leave {other}= out",
                    )
                kwargs[known] = tuple(value) if isinstance(value, list) else value
        return function(*args, **kwargs)

    also = ", ".join(f"``{other}=`` for ``{k}=``" for other, k in spellings.items())
    spelled.__doc__ = f"{_summary(function)}\n\nAs in JAX, and takes {also}."
    return spelled


def _positional(function: Callable[..., Any], args: Sequence[Any]) -> Collection[str]:
    """The names of the arguments that are given by their places."""
    if len(args) < 2:  # the operand alone: the usual call, and a quick answer
        return ()
    return inspect.signature(function).bind_partial(*args).arguments


def _summary(function: Callable[..., Any]) -> str:
    return (function.__doc__ or "").strip().partition("\n")[0]


# --- sums and other reductions: dim=, keepdim=

sum = _spelled(jnp.sum, _DIM_KEPT)  # noqa: A001
mean = _spelled(jnp.mean, _DIM_KEPT)
prod = _spelled(jnp.prod, _DIM_KEPT)
max = _spelled(jnp.max, _DIM_KEPT)  # noqa: A001
min = _spelled(jnp.min, _DIM_KEPT)  # noqa: A001
any = _spelled(jnp.any, _DIM_KEPT)  # noqa: A001
all = _spelled(jnp.all, _DIM_KEPT)  # noqa: A001
argmax = _spelled(jnp.argmax, _DIM_KEPT)
argmin = _spelled(jnp.argmin, _DIM_KEPT)
logsumexp = _spelled(jax.nn.logsumexp, _DIM_KEPT)
cumsum = _spelled(jnp.cumsum, _DIM)

# --- element by element

abs = jnp.abs  # noqa: A001
exp = jnp.exp
log = jnp.log
sqrt = jnp.sqrt
rsqrt = jax.lax.rsqrt
square = jnp.square
sin = jnp.sin
cos = jnp.cos
tanh = jnp.tanh
sigmoid = jax.nn.sigmoid
isfinite = jnp.isfinite
isnan = jnp.isnan
isinf = jnp.isinf
minimum = jnp.minimum
maximum = jnp.maximum
clip = jnp.clip
clamp = jnp.clip
where = jnp.where
logical_and = jnp.logical_and
logical_or = jnp.logical_or
logical_not = jnp.logical_not

# --- products

einsum = jnp.einsum

# --- the same numbers in another order or shape

broadcast_to = jnp.broadcast_to
tril = jnp.tril
triu = jnp.triu
concatenate = _spelled(jnp.concatenate, _DIM)
cat = concatenate
stack = _spelled(jnp.stack, _DIM)
squeeze = _spelled(jnp.squeeze, _DIM)
expand_dims = _spelled(jnp.expand_dims, _DIM)
unsqueeze = expand_dims
sort = _spelled(jnp.sort, _DIM)
argsort = _spelled(jnp.argsort, _DIM)


def reshape(x: Any, *shape: Any) -> jax.Array:
    """The same numbers in another shape, of which one size may be -1.

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
    """Cut an array into parts along one dim, as ``jax.numpy.split``.

    PyTorch's ``split`` takes the size of the parts, this one their number.

    Args:
      x: ``[...]``.
      sections: The number of equal parts, or the places where to cut.
      dim: The dim that is cut; 0 when not given.
      axis: The same by another name.
      indices_or_sections: ``sections`` by another name.

    Raises:
      OperandError: [T401] the parts would not be equal, there is no such dim, or an
        argument is given by both of its names.

    Example:
      >>> [part.shape for part in split(jnp.ones((2, 6)), sections=3, dim=-1)]
      [(2, 2), (2, 2), (2, 2)]
    """
    cuts = _one_of("split", sections=sections, indices_or_sections=indices_or_sections)
    place = _one_of("split", dim=dim, axis=axis)
    x = jnp.asarray(x)
    (place,) = dims_of("split", x, 0 if place is None else place)
    if cuts is None:
        raise OperandError(
            "split is not told into how many parts to cut",
            got=f"shape {x.shape}",
            fix="write split(x, sections=3, dim=-1)",
        )
    size = x.shape[place]
    if isinstance(cuts, int) and (cuts < 1 or size % cuts):
        legal = [n for n in range(1, size + 1) if size % n == 0]
        near = [n for n in legal if n < cuts][-1:] + [n for n in legal if n > cuts][:1]
        raise OperandError(
            f"split cannot cut {size} into {cuts} equal parts",
            got=f"shape {x.shape}, dim {place}, sections {cuts}"
            + (f", remainder {size % cuts}" if cuts > 0 else ""),
            fix=f"use {' or '.join(map(str, near))} sections, or a list of the places "
            "where to cut",
        )
    return jnp.split(x, cuts, axis=place)


def transpose(x: Any, *dims: Any, axes: Sequence[int] | None = None) -> jax.Array:
    """An array with its dims in another order.

    Args:
      x: ``[...]``.
      dims: Nothing, to reverse them; two numbers, dims that change places; or the
        order of all of them, as one sequence.
      axes: The order of all of them, by name.

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
            "transpose takes two dims that change places, or one order of all dims",
            got=f"dims {dims}" + (f", axes={axes}" if axes is not None else ""),
            fix=f"write transpose(x, {dims}), or permute",
        )
    return jnp.transpose(x, dims[0] if dims else axes)


def permute(x: Any, *dims: Any) -> jax.Array:
    """An array with its dims in the order given, as numbers or as one sequence.

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
    """The largest, or smallest, values along a dim in order, and their places.

    Args:
      x: ``[...]``.
      k: How many.
      dim: Along which dim; the last one when not given.
      largest: False gives the smallest, in ascending order.
      axis: ``dim`` by another name.

    Returns:
      Values in the dtype of ``x`` and int32 places, with ``k`` for the size of the dim.

    Raises:
      OperandError: [T401] the dim has fewer, or is given by both of its names.

    Example:
      >>> values, places = topk(jnp.array([3.0, 1.0, 2.0]), 2)
      >>> values.tolist(), places.tolist()
      ([3.0, 2.0], [0, 2])
    """
    place = _one_of("topk", dim=dim, axis=axis)
    x = jnp.asarray(x)
    (place,) = dims_of("topk", x, -1 if place is None else place)
    if not 0 <= k <= x.shape[place]:
        raise OperandError(
            f"topk cannot take {k} of {x.shape[place]}",
            got=f"shape {x.shape}, dim {place}",
            fix=f"use k from 0 to {x.shape[place]}",
        )
    if largest:
        return jax.lax.top_k(x, k, axis=place)
    order = jax.lax.slice_in_dim(jnp.argsort(x, axis=place), 0, k, axis=place)
    return jnp.take_along_axis(x, order, axis=place), order


# --- arrays from nothing


def tensor(data: Any, dtype: Any = None) -> jax.Array:
    """An array of some numbers, copied.

    What ``dist.tensor`` declares by its shape, this makes from its values. Python's
    floats become f32 and integers i32 (64 bits with ``jax_enable_x64``), and unlike a
    bare number the array does not take the dtype of what it meets.

    Args:
      data: Numbers, nested lists of them, or an array.
      dtype: ``f32``, ``bf16``, …, or a dtype; that of the data when not given.

    Raises:
      TensorFormError: [T207] there is no such dtype.

    Example:
      >>> tensor(65536.0)
      Array(65536., dtype=float32)
    """
    made = jnp.array(data, dtype=_dtype(dtype))
    return jax.lax.convert_element_type(made, made.dtype)


def _made(fill: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A function of a shape, which takes it as several numbers too."""

    @functools.wraps(fill)
    def made(*shape: Any, dtype: Any = None) -> jax.Array:
        if shape and not isinstance(shape[0], int | np.integer) and len(shape) == 2:
            shape, dtype = shape[:1], shape[1]  # as jax.numpy has it
        return fill(_shape(shape), dtype=_dtype(dtype))

    made.__doc__ = (
        f"{_summary(fill)}\n\nAs in JAX, and takes the shape as several numbers, and a "
        "dtype by its short name."
    )
    return made


zeros = _made(jnp.zeros)
ones = _made(jnp.ones)


def full(shape: int | Sequence[int], fill_value: Any, dtype: Any = None) -> jax.Array:
    """An array of one value, as ``jax.numpy.full``; the dtype may be a short name."""
    return jnp.full(shape, fill_value, dtype=_dtype(dtype))


def zeros_like(x: Any, dtype: Any = None) -> jax.Array:
    """Zeros of the shape of ``x``, and of its dtype when none is given."""
    return jnp.zeros_like(x, dtype=_dtype(dtype))


def ones_like(x: Any, dtype: Any = None) -> jax.Array:
    """Ones of the shape of ``x``, and of its dtype when none is given."""
    return jnp.ones_like(x, dtype=_dtype(dtype))


def full_like(x: Any, fill_value: Any, dtype: Any = None) -> jax.Array:
    """One value in the shape of ``x``, and in its dtype when none is given."""
    return jnp.full_like(x, fill_value, dtype=_dtype(dtype))


def arange(
    start: Any, stop: Any = None, step: Any = None, dtype: Any = None
) -> jax.Array:
    """Numbers from ``start`` (0 when it stands alone) to before ``stop``."""
    return jnp.arange(start, stop, step, dtype=_dtype(dtype))


def eye(n: int, m: int | None = None, dtype: Any = None) -> jax.Array:
    """The ``[n, m]`` matrix, m being n when not given, with ones on its diagonal."""
    return jnp.eye(n, m, dtype=_dtype(dtype))


def _dtype(dtype: Any) -> Any:
    return as_dtype(dtype) if isinstance(dtype, str) else dtype


def _shape(sizes: Sequence[Any]) -> tuple[Any, ...]:
    """One sequence, or several numbers, as a tuple."""
    if len(sizes) == 1 and not isinstance(sizes[0], int | np.integer):
        return tuple(sizes[0])
    return tuple(sizes)


def _one_of(function: str, **given: Any) -> Any:
    """The value of an argument that has two names; raises [T401] for both at once."""
    used = {name: value for name, value in given.items() if value is not None}
    if len(used) > 1:
        raise OperandError(
            f"{function} is given {' and '.join(used)}, which are one argument",
            got=", ".join(f"{name}={value!r}" for name, value in used.items()),
            fix=f"leave {list(used)[-1]}= out",
        )
    return next(iter(used.values()), None)


__all__ = [
    "abs",
    "all",
    "any",
    "arange",
    "argmax",
    "argmin",
    "argsort",
    "broadcast_to",
    "cat",
    "clamp",
    "clip",
    "concatenate",
    "cos",
    "cumsum",
    "einsum",
    "exp",
    "expand_dims",
    "eye",
    "full",
    "full_like",
    "isfinite",
    "isinf",
    "isnan",
    "log",
    "logical_and",
    "logical_not",
    "logical_or",
    "logsumexp",
    "matmul",
    "max",
    "maximum",
    "mean",
    "min",
    "minimum",
    "ones",
    "ones_like",
    "permute",
    "prod",
    "reshape",
    "rsqrt",
    "sigmoid",
    "sin",
    "sort",
    "split",
    "sqrt",
    "square",
    "squeeze",
    "stack",
    "sum",
    "tanh",
    "tensor",
    "topk",
    "transpose",
    "tril",
    "triu",
    "unsqueeze",
    "where",
    "zeros",
    "zeros_like",
]
