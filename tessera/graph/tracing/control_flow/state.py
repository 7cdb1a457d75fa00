# SPDX-License-Identifier: Apache-2.0
"""What a block of code can change: variables, and what dicts, lists and objects hold.

A branch or a loop's body is traced by running it. What it changed is found by
comparing this state before and after, and is then undone: what the traced program
computes takes its place.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import jax
import numpy as np

from tessera import _jax
from tessera.graph.tracing.control_flow.steering import free_variables
from tessera.shard import DistTensor

_PLAIN = frozenset(
    {*sys.stdlib_module_names, "jax", "jaxlib", "numpy", "flax", "optax", "tessera"}
)
_ARRAYS = (jax.Array, np.ndarray, np.generic, DistTensor)


class Undefined:
    """A variable without a value; reading it is Python's own error."""

    def __init__(self, name: str) -> None:
        self.name = name

    def read(self) -> Any:
        """Raise, as Python would."""
        raise UnboundLocalError(
            f"cannot access local variable {self.name!r} where it is not associated "
            "with a value"
        )


class NotReturned:
    """What a function returns that has not returned yet."""


@dataclass(frozen=True)
class Key:
    """One place that has a value: a variable, or an entry of a container."""

    holder: int  # 0 for variables, else the container's number
    entry: Any
    name: str

    def __hash__(self) -> int:
        return hash((self.holder, self.entry))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and (self.holder, self.entry) == (
            other.holder,
            other.entry,
        )


class State:
    """The variables of a block, and the containers that its code can reach.

    Args:
      names: Its variables.
      get: Reads them all.
      put: Writes them all.
      functions: The functions that are its code.
    """

    def __init__(
        self,
        names: Sequence[str],
        get: Callable[[], tuple[Any, ...]],
        put: Callable[[tuple[Any, ...]], None],
        functions: Sequence[Callable[..., Any] | None],
    ) -> None:
        self.names, self._get, self._put = tuple(names), get, put
        reached = _Reached()
        for name, value in zip(names, get(), strict=True):
            reached.visit(spoken(name), value)
        for function in functions:
            reached.visit_closure(function)
        self._containers = reached.containers

    def read(self) -> dict[Key, Any]:
        """Every place and its value."""
        values = {
            Key(0, name, spoken(name)): value
            for name, value in zip(self.names, self._get(), strict=True)
        }
        for number, (path, holder) in enumerate(self._containers, start=1):
            for entry, value in _content(holder):
                values[Key(number, entry, _entry_name(path, holder, entry))] = value
        return values

    def write(self, values: dict[Key, Any]) -> None:
        """Give every place its value; entries that are not among them go."""
        self._put(tuple(values[Key(0, name, name)] for name in self.names))
        contents: list[dict[Any, Any]] = [{} for _ in self._containers]
        for key, value in values.items():
            if key.holder:
                contents[key.holder - 1][key.entry] = value
        for (_, holder), content in zip(self._containers, contents, strict=True):
            _fill(holder, content)


def spoken(name: str) -> str:
    """What a variable is called in messages."""
    if name.startswith("retval_"):
        return "the value returned"
    if name.startswith(("do_return", "break_", "continue_")):
        return "whether to go on"
    return name


def _content(holder: Any) -> list[tuple[Any, Any]]:
    if isinstance(holder, dict):
        return list(holder.items())
    if isinstance(holder, list):
        return list(enumerate(holder))
    return list(vars(holder).items())


def _fill(holder: Any, content: dict[Any, Any]) -> None:
    """Make a container hold just this; one that does already is left alone."""
    now = _content(holder)
    if len(now) == len(content) and all(
        entry in content and content[entry] is value for entry, value in now
    ):
        return
    if isinstance(holder, list):
        holder[:] = [content[place] for place in sorted(content)]
        return
    target = holder if isinstance(holder, dict) else vars(holder)
    for entry, _ in now:
        if entry not in content:
            del target[entry]
    target.update(content)


def _entry_name(path: str, holder: Any, entry: Any) -> str:
    return (
        f"{path}[{entry!r}]" if isinstance(holder, (dict, list)) else f"{path}.{entry}"
    )


class _Reached:
    """The containers that can be reached from some values, each once."""

    def __init__(self) -> None:
        self.containers: list[tuple[str, Any]] = []
        self._seen: dict[int, Any] = {}

    def visit(self, path: str, value: Any) -> None:
        """Add what is reached from a value that is found under a name."""
        if isinstance(value, (*_ARRAYS, str, int, float, type(None), type)):
            return
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, tuple):
            for place, item in enumerate(value):
                self.visit(f"{path}[{place}]", item)
        elif isinstance(value, (FunctionType, MethodType)):
            self.visit_closure(value)
        elif isinstance(value, (dict, list)) or _is_plain_object(value):
            self.containers.append((path, value))
            for entry, item in _content(value):
                self.visit(_entry_name(path, value, entry), item)

    def visit_closure(self, function: Any) -> None:
        """Add what a function closes over, and the object that a method is of."""
        if isinstance(function, MethodType):
            self.visit("self", function.__self__)
            function = function.__func__
        if isinstance(function, FunctionType):
            for name, value in free_variables(function):
                self.visit(name, value)


def _is_plain_object(value: Any) -> bool:
    """Whether a value is an instance of a user's class, whose attributes may change."""
    if isinstance(value, _jax.Tracer) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.partition(".")[0] not in _PLAIN
