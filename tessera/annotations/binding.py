# SPDX-License-Identifier: Apache-2.0
"""One call of a function against its annotations: arguments first, then the result."""

import collections.abc
import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from tessera.annotations.calls import bind_call
from tessera.annotations.hints import (
    annotation_of,
    evaluated,
    hints_of,
    namespace_of,
    union_members,
)
from tessera.annotations.sizes import Fact, solve
from tessera.annotations.tensor import Annotation, is_array
from tessera.dtypes import short_name
from tessera.errors import AnnotationError


@dataclass(frozen=True)
class Found:
    """A value among the arguments or in the result, and its annotation."""

    name: str
    value: Any
    annotation: Annotation


@dataclass(frozen=True)
class Binding:
    """A call whose arguments fit the annotations of a function.

    Attributes:
      function: What messages call the function.
      arguments: What of the arguments has an annotation.
      result_hint: The annotation of the result, or None.
      is_checked: Whether the result is to be checked, as the arguments were.
    """

    function: str
    arguments: tuple[Found, ...] = ()
    result_hint: Any = None
    is_checked: bool = True

    @functools.cached_property
    def dim_names(self) -> dict[str, tuple[str, ...]]:
        """What ``ShardSpec`` s call the dims of each annotated array, by its path."""
        return _names(self.arguments)

    def result_dim_names(self, result: Any) -> dict[str, tuple[str, ...]]:
        """The same of a result: a tree of arrays, or of their types."""
        return _names(_walk(self.result_hint, result, "result"))

    def check_result(self, result: Any) -> None:
        """See that a result fits, with the sizes that the arguments gave to symbols.

        Args:
          result: The tree that the function returned, of arrays or of their types.

        Raises:
          AnnotationError: [T315] it does not.
        """
        found = tuple(_walk(self.result_hint, result, "result"))
        if not found or not self.is_checked:
            return
        problems = _problems((*self.arguments, *found))
        if problems:
            raise _misfit(
                f"the result of {self.function!r} does not fit its annotation",
                (*self.arguments, *found),
                problems,
            )


def bind(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    name: str,
    check: bool = True,
) -> Binding:
    """Check the arguments of one call against the annotations of a function.

    Args:
      function: The function, annotated or not.
      args: Positional arguments: arrays, tracers, or their types.
      kwargs: Keyword arguments.
      name: What messages call the function.
      check: Whether to check anything, and not just to find the names of dims.

    Returns:
      What the result is checked against.

    Raises:
      ArgumentError: [T301] the function does not take these arguments.
      AnnotationError: [T315] an array has not the rank or the dtype of its annotation,
        a symbol has two sizes, or what has to be an array is none.
    """
    hints = hints_of(function)
    if not hints:
        return Binding(name)
    found: list[Found] = []
    bound = bind_call(inspect.signature(function), args, kwargs, name=name)
    for path, hint, value in _given(bound, hints):
        found += _walk(hint, value, path)
    if check and (problems := _problems(found)):
        raise _misfit(
            f"the arguments of {name!r} do not fit their annotations", found, problems
        )
    return Binding(name, tuple(found), hints.get("return"), check)


def checked(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    name: str,
    check: bool = True,
) -> Any:
    """Call a function, its arguments and its result checked.

    Raises:
      AnnotationError: [T315] they do not fit its annotations.
    """
    if not check:
        return function(*args, **kwargs)
    binding = bind(function, args, kwargs, name=name)
    result = function(*args, **kwargs)
    binding.check_result(result)
    return result


def _given(
    bound: inspect.BoundArguments, hints: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """The path, the hint and the value of each argument that has a hint."""
    for name, value in bound.arguments.items():
        parameter = bound.signature.parameters[name]
        hint = hints.get(name)
        if hint is None:
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            first = len(bound.args) - len(value)
            for number, item in enumerate(value, start=first):
                yield f"args[{number}]", hint, item
        elif parameter.kind is parameter.VAR_KEYWORD:
            for keyword, item in value.items():
                yield keyword, hint, item
        elif value is not None or parameter.default is not None:
            yield name, hint, value


# --- from hints to arrays


def _walk(hint: Any, value: Any, path: str) -> Iterator[Found]:
    """The annotated arrays in a value, along its hint."""
    annotation = annotation_of(hint)
    if annotation is not None:
        yield Found(path, value, annotation)
    elif len(members := union_members(hint)) > 1:
        yield from _walk(_chosen(members, value), value, path)
    else:
        for part, inner, item in _parts(hint, value):
            yield from _walk(inner, item, f"{path}/{part}")


def _chosen(members: Sequence[Any], value: Any) -> Any:
    """The member of a union that a value is checked against; None where none is."""
    if value is None and types.NoneType in members:
        return None
    found = [(hint, annotation_of(hint)) for hint in members]
    tensors = [hint for hint, annotation in found if annotation]
    if is_array(value) and tensors:
        fitting = (hint for hint, one in found if one and one.fits(value))
        return next(fitting, tensors[0])
    others = [m for m in members if m not in tensors and m is not types.NoneType]
    if not others:
        return tensors[0]
    return others[0] if len(others) == 1 else None


def _parts(hint: Any, value: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Key, hint and value of each part of a container; nothing of what is none."""
    origin, hints = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        yield from _parts(hints[0], value)
    elif isinstance(origin, type) and issubclass(origin, collections.abc.Mapping):
        if isinstance(value, Mapping) and len(hints) == 2:
            for key in value:
                yield key, hints[1], value[key]
    elif isinstance(origin, type) and issubclass(origin, collections.abc.Sequence):
        if isinstance(value, Sequence) and not isinstance(value, str):
            if origin is not tuple or hints[-1] is ...:
                hints = (hints[0],) * len(value)
            yield from zip(range(len(value)), hints, value, strict=False)
    elif isinstance(hint, type) and (fields := _fields(hint)):
        names = namespace_of(hint)
        for field, inner in fields.items():
            item = value.get(field) if isinstance(value, Mapping) else None
            item = getattr(value, field, item)
            if item is not None:
                yield field, evaluated(inner, names), item


def _fields(hint: type) -> Mapping[str, Any]:
    """The annotated fields of a dataclass, a NamedTuple or a TypedDict."""
    is_record = dataclasses.is_dataclass(hint) or hasattr(hint, "_fields")
    if is_record or typing.is_typeddict(hint):
        return getattr(hint, "__annotations__", {})
    return {}


def _names(found: Iterator[Found] | Sequence[Found]) -> dict[str, tuple[str, ...]]:
    names: dict[str, tuple[str, ...]] = {}
    for one in found:
        if is_array(one.value) and not one.annotation.is_bare:
            dims = one.annotation.names(len(one.value.shape))
            if dims is not None:
                names[one.name] = dims
    return names


# --- what does not fit


def _problems(found: Sequence[Found]) -> list[str]:
    """A sentence for each thing that does not fit."""
    problems: list[str] = []
    facts: list[Fact] = []
    variadic: dict[str, dict[tuple[int, ...], str]] = {}
    for one in found:
        if one.annotation.is_bare:
            problems += _no_tree_of_arrays(one)
            continue
        if not is_array(one.value):
            problems.append(f"{one.name} is no array, but {_kind(one.value)}")
            continue
        shape = tuple(one.value.shape)
        if not one.annotation.allows_dtype(one.value.dtype):
            wanted = one.annotation.dtype_text
            problems.append(
                f"{one.name} is {short_name(one.value.dtype)}, not {wanted}"
            )
        dims = one.annotation.dims_of(len(shape))
        if dims is None:
            problems.append(f"{one.name} {_rank_text(one.annotation, len(shape))}")
            continue
        for number, dim in dims:
            facts.append(Fact(dim, shape[number], f"{one.name} (dim {number})"))
        for dim in one.annotation.dims:
            if dim.is_variadic and not dim.is_anonymous:
                named = {number for number, _ in dims}
                rest = tuple(s for i, s in enumerate(shape) if i not in named)
                variadic.setdefault(dim.text, {}).setdefault(rest, one.name)
    for text, by_sizes in variadic.items():
        if len(by_sizes) > 1:
            said = [f"{sizes} by {name}" for sizes, name in by_sizes.items()]
            problems.append(f"{text} is {', '.join(said)}")
    return problems + solve(facts).problems


def _rank_text(annotation: Annotation, rank: int) -> str:
    fixed = [dim for dim in annotation.dims if not dim.is_variadic]
    more = " or more" if len(fixed) < len(annotation.dims) else ""
    return f"has {rank} {'dim' if rank == 1 else 'dims'}, not {len(fixed)}{more}"


def _no_tree_of_arrays(one: Found) -> list[str]:
    """A ``ts.Tensor`` without brackets takes any array, or a tree of them."""
    numbers = (bool, int, float, complex)
    wrong = [
        leaf
        for leaf in jax.tree.leaves(one.value)
        if not is_array(leaf) and not isinstance(leaf, numbers)
    ]
    return [f"{one.name} is no array, but {_kind(wrong[0])}"] if wrong else []


def _kind(value: Any) -> str:
    if isinstance(value, (bool, int, float, complex)):
        return f"the Python number {value!r}, which is part of the program"
    return "None" if value is None else f"of type {type(value).__name__}"


def _misfit(
    what: str, found: Sequence[Found], problems: Sequence[str]
) -> AnnotationError:
    rows = [
        (one.name, _form(one.value), str(one.annotation))
        for one in found
        if not one.annotation.is_bare or "/" not in one.name
    ]
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    table = [
        f"{name:<{widths[0]}}  {form:<{widths[1]}}  {annotation}"
        for name, form, annotation in rows
    ]
    return AnnotationError(
        what,
        got="\n".join((*table, *problems)),
        fix="give each symbol one size and each array its dtype, or annotate what "
        'varies less: "_" is any size, ... any number of dims',
    )


def _form(value: Any) -> str:
    if is_array(value):
        sizes = ", ".join(map(str, value.shape))
        return f"{short_name(value.dtype)}[{sizes}]"
    arrays = [leaf for leaf in jax.tree.leaves(value) if is_array(leaf)]
    return f"{type(value).__name__} of {len(arrays)}" if arrays else repr(value)
