# SPDX-License-Identifier: Apache-2.0
"""Finds the annotations of a function behind wrappers, and evaluates strings."""

import contextlib
import functools
import inspect
import sys
import types
import typing
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from tessera.annotations.dims import dim_of
from tessera.annotations.signatures import passes_calls_on
from tessera.annotations.tensor import Annotation, TensorType
from tessera.errors import AnnotationError, TesseraWarning

# Their wrappers call a function with other arrays than they receive.
_TRANSFORMING = ("jax.", "flax.")


def annotations_of(function: Callable[..., Any]) -> dict[str, Annotation]:
    """The array annotation of each argument that has one, and of ``return``.

    Arguments without an array annotation, and containers of arrays, are left out.
    Methods, partials and functions behind ``functools.wraps`` have the annotations of
    the function that they call.

    Example:
      >>> from tessera.annotations import Tensor
      >>> def attention(x: Tensor["B", "D"], w: Tensor["D", "3*D_head*H"]): ...
      >>> annotations = annotations_of(attention)
      >>> outer = set(annotations["x"].symbols)
      >>> inner = [dim for dim in annotations["w"].dims if not outer & set(dim.symbols)]
      >>> [(dim.text, dim.symbols) for dim in inner]
      [('3*D_head*H', ('D_head', 'H'))]
    """
    annotations: dict[str, Annotation] = {}
    for name, hint in hints_of(function).items():
        tensors = [a for a in map(annotation_of, union_members(hint)) if a is not None]
        if len(tensors) == 1:
            annotations[name] = tensors[0]
    return annotations


def annotation_of(hint: Any) -> Annotation | None:
    """The annotation of one array, if the hint is ``ts.Tensor``'s or jaxtyping's."""
    if isinstance(hint, TensorType):
        return hint.annotation
    if getattr(hint, "__module__", None) != "jaxtyping" or not hasattr(hint, "dim_str"):
        return None
    try:
        dims = tuple(map(dim_of, hint.dim_str.split()))
    except AnnotationError:
        return None  # jaxtyping has forms, such as "#B", with other meanings
    dtypes = getattr(hint, "dtypes", ())
    return Annotation(dims, dtypes=dtypes if isinstance(dtypes, tuple) else ())


def union_members(hint: Any) -> tuple[Any, ...]:
    """The members of ``X | Y``, ``Union`` or ``Optional``; else the hint itself."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a function, with strings evaluated.

    A string that cannot be evaluated, such as a name imported for type checkers only,
    is left out; if it mentions tensors, with a warning.
    """
    annotated = _unwrapped(function)
    if annotated is None:
        return {}
    raw: Mapping[str, Any] = getattr(annotated, "__annotations__", {})
    names = namespace_of(annotated)
    hints: dict[str, Any] = {}
    for name, hint in raw.items():
        hints[name] = evaluated_or_none(hint, names, f"the annotation of {name!r}")
    return {name: hint for name, hint in hints.items() if hint is not None}


def evaluated_or_none(
    hint: Any, names: Mapping[str, Any], what: str = "an annotation"
) -> Any:
    """A hint with its strings, nested ones too, evaluated in a namespace.

    None for one that cannot be evaluated there, such as a name that is imported for
    type checkers only, or the alias of another library.

    Warns:
      TesseraWarning: Such a hint mentions tensors.
    """
    holder: Any = types.SimpleNamespace(__annotations__={"hint": hint})
    try:
        return typing.get_type_hints(holder, dict(names), include_extras=True)["hint"]
    except AnnotationError:
        raise
    except Exception as error:  # whatever the code of an annotation raises
        if "Tensor" in str(hint):
            warnings.warn(
                f"{what} is not checked: {error}", TesseraWarning, stacklevel=2
            )
        return None


def namespace_of(function: Any) -> dict[str, Any]:
    """The names in scope of a function or class: its module and its closure."""
    module = sys.modules.get(getattr(function, "__module__", ""), None)
    names = dict(getattr(function, "__globals__", vars(module) if module else {}))
    cells = getattr(function, "__closure__", None) or ()
    code = getattr(function, "__code__", None)
    for name, cell in zip(code.co_freevars if code else (), cells, strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            names[name] = cell.cell_contents
    return names


def _unwrapped(function: Any) -> Any:
    """The function that has the annotations, or None if a wrapper changes the call.

    ``jax.vmap`` copies the annotations of a function, but calls it with other shapes.
    """
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, types.MethodType):
            function = function.__func__
        elif isinstance(function, types.FunctionType):
            if function.__globals__.get("__name__", "").startswith(_TRANSFORMING):
                return None
            if not hasattr(function, "__wrapped__"):
                return function
            if not passes_calls_on(function):
                return None
            function = function.__wrapped__
        elif _is_tessera_object(function) and hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:  # a callable object
            called = inspect.getattr_static(type(function), "__call__", None)
            return called if isinstance(called, types.FunctionType) else None


def _is_tessera_object(function: Any) -> bool:
    return type(function).__module__.startswith("tessera.")
