# SPDX-License-Identifier: Apache-2.0
"""Checks a call of a function against its annotations: arguments, then the result."""

import collections.abc
import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax

from tessera.annotations.calls import bind_call
from tessera.annotations.hints import (
    annotation_of,
    evaluated_or_none,
    hints_of,
    namespace_of,
    union_members,
)
from tessera.annotations.signatures import own_signature, signature_of
from tessera.annotations.sizes import Constraint, solve
from tessera.annotations.tensor import Annotation, is_array
from tessera.errors import AnnotationError
from tessera.foundations.dtypes import short_name

# None is a value that a call may pass.
_NOTHING: Final = object()


@dataclass(frozen=True)
class AnnotatedValue:
    """A value among the arguments or in the result, with its annotation."""

    name: str
    value: Any
    annotation: Annotation


@dataclass(frozen=True)
class Binding:
    """A call whose arguments match the annotations of a function.

    Attributes:
      function: The function's name in messages.
      arguments: The arguments that have an annotation.
      result_hint: The annotation of the result, or None.
      is_checked: Whether to check the result, as the arguments were.
    """

    function: str
    arguments: tuple[AnnotatedValue, ...] = ()
    result_hint: Any = None
    is_checked: bool = True

    @functools.cached_property
    def dim_names(self) -> dict[str, tuple[str, ...]]:
        """The dim names of each annotated argument, for ``ShardSpec``, by its path."""
        return _names(self.arguments)

    def result_dim_names(self, result: Any) -> dict[str, tuple[str, ...]]:
        """The dim names of a result: a tree of arrays, or of their types."""
        return _names(_walk(self.result_hint, result, "result"))

    def check_result(self, result: Any) -> None:
        """Check the result, with the sizes of symbols that the arguments determine.

        Args:
          result: The tree that the function returned, of arrays or of their types.

        Raises:
          AnnotationError: [T315] it does not match its annotation.
        """
        values = tuple(_walk(self.result_hint, result, "result"))
        if values and self.is_checked:
            what = f"the result of {self.function!r} does not fit its annotation"
            _check(what, (*self.arguments, *values))


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
      name: The function's name in messages.
      check: False only collects the names of dims.

    Returns:
      What the result is checked against.

    Raises:
      ArgumentError: [T301] the function does not take these arguments.
      AnnotationError: [T315] an array does not have the rank or dtype of its
        annotation, a symbol has two sizes, or a value is not an array.
    """
    check_call(function, len(args), kwargs, name=name)
    hints = hints_of(function)
    if not hints:
        return Binding(name)
    try:
        bound = signature_of(function).bind(*args, **kwargs)
    except TypeError:  # a wrapper calls the annotated function in another way
        return Binding(name)
    values = tuple(
        annotated
        for path, hint, value in _hinted_arguments(bound, hints)
        for annotated in _walk(hint, value, path)
    )
    if check:
        _check(f"the arguments of {name!r} do not fit their annotations", values)
    return Binding(name, values, hints.get("return"), check)


def check_call(
    function: Callable[..., Any], count: int, keywords: Iterable[str], *, name: str
) -> None:
    """Raise [T301] where a function does not take such a call.

    Args:
      function: The function.
      count: How many positional arguments the call has.
      keywords: The names of its other arguments.
      name: The function's name in messages, if it has none of its own.
    """
    called = getattr(function, "__name__", name)
    named = dict.fromkeys(keywords)
    bind_call(own_signature(function), [None] * count, named, name=called)


def _hinted_arguments(
    bound: inspect.BoundArguments, hints: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Path, hint and value of each argument that has a hint."""
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


def _walk(hint: Any, value: Any, path: str) -> Iterator[AnnotatedValue]:
    """The annotated arrays in a value, found by following its hint."""
    annotation = annotation_of(hint)
    if annotation is not None:
        yield AnnotatedValue(path, value, annotation)
    elif len(members := union_members(hint)) > 1:
        yield from _walk(_union_member(members, value), value, path)
    else:
        for part, inner, item in _parts(hint, value):
            yield from _walk(inner, item, f"{path}/{part}")


def _union_member(members: Sequence[Any], value: Any) -> Any:
    """The member of a union to check a value against, or None."""
    if value is None and types.NoneType in members:
        return None
    annotated = [(hint, annotation_of(hint)) for hint in members]
    tensors = [hint for hint, annotation in annotated if annotation]
    if is_array(value) and tensors:
        matching = (hint for hint, a in annotated if a and a.fits(value))
        return next(matching, tensors[0])
    others = [m for m in members if m not in tensors and m is not types.NoneType]
    if not others:
        return tensors[0]
    return others[0] if len(others) == 1 else None


def _parts(hint: Any, value: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Key, hint and value of each item of a container or field of a record."""
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
                yield field, evaluated_or_none(inner, names), item


def _fields(hint: type) -> Mapping[str, Any]:
    """The annotated fields of a dataclass, a NamedTuple or a TypedDict."""
    is_record = dataclasses.is_dataclass(hint) or hasattr(hint, "_fields")
    if is_record or typing.is_typeddict(hint):
        return getattr(hint, "__annotations__", {})
    return {}


def _names(values: Iterable[AnnotatedValue]) -> dict[str, tuple[str, ...]]:
    return {
        value.name: dims
        for value in values
        if is_array(value.value) and not value.annotation.is_bare
        if (dims := value.annotation.names(len(value.value.shape))) is not None
    }


# --- checks and messages


def _check(what: str, values: Sequence[AnnotatedValue]) -> None:
    """Raise AnnotationError, [T315], with every problem of some values."""
    problems: list[str] = []
    constraints: list[Constraint] = []
    variadic: dict[str, dict[tuple[int, ...], str]] = {}
    for value in values:
        if problem := _form_problem(value):
            problems.append(problem)
            continue
        if value.annotation.is_bare:
            continue
        shape, annotation = tuple(value.value.shape), value.annotation
        if not annotation.allows_dtype(value.value.dtype):
            dtype = short_name(value.value.dtype)
            problems.append(f"{value.name} is {dtype}, not {annotation.dtype_text}")
        dims = annotation.dims_of(len(shape))
        if dims is None:
            problems.append(f"{value.name} {_rank_text(annotation, len(shape))}")
            continue
        for number, dim in dims:
            source = f"{value.name} (dim {number})"
            constraints.append(Constraint(dim, shape[number], source))
        for dim in annotation.dims:
            if dim.is_variadic and not dim.is_anonymous:
                numbers = dict(dims)
                rest = tuple(s for i, s in enumerate(shape) if i not in numbers)
                variadic.setdefault(dim.text, {}).setdefault(rest, value.name)
    for text, names in variadic.items():
        if len(names) > 1:
            sizes = [f"{sizes} by {name}" for sizes, name in names.items()]
            problems.append(f"{text} is {', '.join(sizes)}")
    problems += solve(constraints).problems
    if problems:
        raise _mismatch(what, values, problems)


def _rank_text(annotation: Annotation, rank: int) -> str:
    fixed = [dim for dim in annotation.dims if not dim.is_variadic]
    more = " or more" if len(fixed) < len(annotation.dims) else ""
    return f"has {rank} {'dim' if rank == 1 else 'dims'}, not {len(fixed)}{more}"


def _form_problem(value: AnnotatedValue) -> str:
    """A message if a value is not an array, or empty.

    A ``ts.Tensor`` without brackets allows any array or number, or a tree of them.
    """
    leaves = [value.value]
    if value.annotation.is_bare:
        numbers = (bool, int, float, complex)
        leaves = jax.tree.leaves(value.value)
        leaves = [leaf for leaf in leaves if not isinstance(leaf, numbers)]
    wrong = next((leaf for leaf in leaves if not is_array(leaf)), _NOTHING)
    if wrong is _NOTHING:
        return ""
    return f"{value.name} is not an array, but {_kind(wrong)}"


def _kind(value: Any) -> str:
    if isinstance(value, (bool, int, float, complex)):
        return f"the Python number {value!r}, which is part of the program"
    return "None" if value is None else f"of type {type(value).__name__}"


def _mismatch(
    what: str, values: Sequence[AnnotatedValue], problems: Sequence[str]
) -> AnnotationError:
    rows = [
        (value.name, _form(value.value), str(value.annotation))
        for value in values
        if not value.annotation.is_bare or "/" not in value.name
    ]
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    table = [
        f"{name:<{widths[0]}}  {form:<{widths[1]}}  {annotation}"
        for name, form, annotation in rows
    ]
    return AnnotationError(
        what,
        got="\n".join((*table, *problems)),
        fix="give each symbol one size and each array its dtype, or loosen the "
        'annotation: "_" is any size, ... any number of dims',
    )


def _form(value: Any) -> str:
    if is_array(value):
        sizes = ", ".join(map(str, value.shape))
        return f"{short_name(value.dtype)}[{sizes}]"
    arrays = [leaf for leaf in jax.tree.leaves(value) if is_array(leaf)]
    return f"{type(value).__name__} of {len(arrays)}" if arrays else repr(value)
