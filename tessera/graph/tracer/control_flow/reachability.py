# SPDX-License-Identifier: Apache-2.0
"""Reachability: the objects that some code can change.

The walk begins at the variables that functions close over and at the globals that they
name, and goes on through containers, objects, classes, modules and the functions that
are found there. Of an object only attributes that some of the code names are followed,
so a data loader that a step never mentions is left alone.
"""

import argparse
import collections
import functools
import inspect
from collections.abc import Collection, Iterable, Sequence
from types import (
    BuiltinMethodType,
    CellType,
    FunctionType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import jax
import numpy as np

from tessera.graph.tracer.control_flow.lower_jumps import PREFIX, display_name
from tessera.graph.tracer.control_flow.mutable_objects import (
    Attributes,
    GlobalVariables,
    MutableObject,
    is_iterator,
    mutable_object,
)
from tessera.graph.tracer.control_flow.user_code import (
    free_variables,
    is_user_function,
    is_user_module,
    names_in,
)
from tessera.shard import DistTensor

_ATOMS = (
    *(str, bytes, int, float, complex, type(None)),
    *(np.generic, jax.Array, DistTensor),
)
_CONTAINERS = (dict, list, collections.deque, set, bytearray, CellType)
_NAMESPACES = (
    *(SimpleNamespace, argparse.Namespace),
    *(collections.ChainMap, collections.UserDict, collections.UserList),
)

# Modules of classes that a user's class may extend and change no attributes.
_PLAIN = ("abc", "builtins", "typing")

# Code that names one of these can name any attribute.
_REFLECTION = frozenset({"vars", "setattr", "getattr", "delattr", "__dict__"})


class Reach:
    """The mutable objects that some code can reach, each once.

    Attributes:
      mutable_objects: Those with content that can be read and restored.
      arrays: NumPy arrays.
      iterators: Iterators, with their names in messages.

    Args:
      code: The functions that are the code.
      values: Values to start from, with their names in messages.
      outside: Ids of objects that outlive the trace; None if all do.
    """

    def __init__(
        self,
        code: Sequence[Any],
        values: Iterable[tuple[str, Any]],
        outside: Collection[int] | None,
    ) -> None:
        self._outside = outside or ()
        start = [*(("", function) for function in code), *values]
        self._names: frozenset[str] = frozenset()
        while True:  # what is found names more attributes
            self._by_id: dict[tuple[int, type], MutableObject] = {}
            self._globals: dict[int, tuple[dict[str, Any], set[str]]] = {}
            self._seen: dict[int, tuple[Any, bool]] = {}
            self._classes: dict[type, bool] = {}
            self.arrays: list[np.ndarray[Any, Any]] = []
            self.iterators: list[tuple[str, Any]] = []
            names = self._names
            for path, value in start:
                self._visit(path, value, outside is None)
            if names == self._names:
                break
        known = [
            GlobalVariables(variables, "", True, frozenset(names))
            for variables, names in self._globals.values()
        ]
        self.mutable_objects: list[MutableObject] = [*self._by_id.values(), *known]

    def _visit(self, path: str, value: Any, outside: bool) -> None:
        if isinstance(value, _ATOMS):
            return
        if isinstance(value, type):
            self._class(value, is_called=bool(path))
            return
        outside = outside or id(value) in self._outside
        if self._seen.get(id(value), (None, -1))[1] >= outside:
            return
        self._seen[id(value)] = value, outside
        match value:
            case FunctionType():
                self._function(path, value, outside)
            case MethodType():
                self._visit_all(path, (value.__self__, value.__func__), outside)
            case BuiltinMethodType() | MethodWrapperType():
                self._visit(path, value.__self__, outside)
            case functools.partial():
                parts = (value.func, *value.args, *value.keywords.values())
                self._visit_all(path, parts, outside)
            case ModuleType():
                self._module(value)
            case np.ndarray():
                self.arrays.append(value)
            case _:
                self._object(path, value, outside)
        if is_user_module(type(value).__module__):
            self._visit("", type(value), True)

    def _visit_all(self, path: str, values: Iterable[Any], outside: bool) -> None:
        for value in values:
            self._visit(path, value, outside)

    def _add(self, owner: MutableObject) -> None:
        """Add a mutable object, and visit its content."""
        self._by_id[id(owner.target), type(owner)] = owner
        for entry, item in owner.content().items():
            self._visit(owner.entry_name(entry), item, owner.outside)

    def _attributes(self, path: str, value: Any, outside: bool) -> None:
        # What a library's methods change need not be named in the user's code.
        is_own = all(
            base.__module__ in _PLAIN or is_user_module(base.__module__)
            for base in type(value).__mro__
        )
        names = self._names if is_own and not self._names & _REFLECTION else None
        self._add(Attributes(value, path, outside, names))

    def _object(self, path: str, value: Any, outside: bool) -> None:
        if isinstance(value, (tuple, frozenset)):
            for place, item in enumerate(value):
                self._visit(f"{path}[{place}]", item, outside)
        is_container = isinstance(value, _CONTAINERS)
        if is_container:
            self._add(mutable_object(value, path, outside))
        elif is_iterator(value):
            self.iterators.append((path, value))
        if has_attributes(value):
            self._attributes(path, value, outside)
        elif not is_container:  # of a library: perhaps a function that it wraps
            for name in ("__wrapped__", "body"):
                inner = inspect.getattr_static(value, name, None)
                if isinstance(inner, (FunctionType, MethodType, functools.partial)):
                    self._visit(path, inner, outside)

    def _function(self, path: str, function: FunctionType, outside: bool) -> None:
        self._visit(path, getattr(function, "__wrapped__", None), outside)
        if not is_user_function(function):  # such as what a decorator of a library made
            for _, cell in free_variables(function):
                values = mutable_object(cell, "", outside).content().values()
                self._visit_all(path, filter(callable, values), outside)
            return
        names = names_in(function.__code__)
        self._names |= names
        for name, cell in free_variables(function):
            if name != PREFIX:
                self._visit(display_name(name), cell, outside)
        defaults = function.__defaults__ or (), function.__kwdefaults__ or {}
        self._visit_all(path, (*defaults[0], *defaults[1].values()), outside)
        self._attributes(function.__name__, function, True)
        self._global_variables(function.__globals__, names)

    def _global_variables(
        self, variables: dict[str, Any], names: frozenset[str]
    ) -> None:
        self._globals.setdefault(id(variables), (variables, set()))[1].update(names)
        for name in names & variables.keys():
            self._visit(name, variables[name], True)

    def _module(self, module: ModuleType) -> None:
        """Follow variables of a user's module; of a library's, containers."""
        variables = vars(module)
        if is_user_module(module.__name__):
            self._global_variables(variables, self._names)
            return
        for name in self._names & variables.keys():
            if isinstance(variables[name], _CONTAINERS):
                self._visit(f"{module.__name__}.{name}", variables[name], True)

    def _class(self, kind: type, *, is_called: bool) -> None:
        """Follow a class; what makes its objects only where code names the class."""
        if self._classes.get(kind, -1) >= is_called:
            return
        self._classes[kind] = is_called
        for base in kind.__mro__:
            if is_user_module(base.__module__):
                self._attributes(base.__name__, base, True)
                for name, value in vars(base).items():
                    makes = name in ("__init__", "__new__")
                    is_implied = name.startswith("__") and (is_called or not makes)
                    if name in self._names or is_implied:
                        inner = [getattr(value, each, None) for each in _ACCESSORS]
                        for function in (value, *inner):
                            if isinstance(function, FunctionType):
                                self._visit(base.__name__, function, True)


def has_attributes(value: Any) -> bool:
    """Whether a value is an object whose attributes are followed and compared."""
    is_users_class = is_user_module(type(value).__module__)
    return isinstance(value, _NAMESPACES) or (
        is_users_class and not isinstance(value, tuple)
    )


def is_tracked(value: Any) -> bool:
    """Whether changes of a value's entries or attributes are tracked."""
    kinds = (*_CONTAINERS, np.ndarray, FunctionType, type, ModuleType)
    return isinstance(value, kinds) or has_attributes(value)


# Where a property, a class method and a static method keep their functions.
_ACCESSORS = ("fget", "fset", "__func__")
