# SPDX-License-Identifier: Apache-2.0
"""Finds arrays that a step reads, is not given, and that are replaced by others.

``model.w = model.w - slope`` in a step that closes over ``model`` runs once, while it
is traced. Outside it runs each time, but the program of the step keeps the first ``w``.
Either way nothing would be trained.
"""

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Final, NamedTuple, Self

import numpy as np

from tessera.errors import TesseraWarning, WriteBackError
from tessera.graph.tracer.control_flow.own_objects import (
    CONTAINERS,
    content,
    is_compared,
    parts,
)
from tessera.graph.tracer.control_flow.user_code import is_user_function
from tessera.graph.tracer.static_values import global_names, static_key
from tessera.jax_compat import jaxprs
from tessera.shard import ARRAYS
from tessera.tracing.object_arguments import is_object

# Longer containers are data: what is in them is not looked at.
_LONGEST: Final = 1000
_CONSTANTS: Final = (bool, int, float, complex, str)


class _Entry(NamedTuple):
    """What a variable, an attribute or an item was, and how to read and assign it."""

    name: str
    key: Any
    value: Any
    read: Callable[[Any], Any]
    assign: Callable[[Any, Any], None]
    is_variable: bool = False

    @classmethod
    def of(
        cls, name: str, holder: Any, key: Any, value: Any, *is_variable: bool
    ) -> Self:
        if isinstance(holder, (dict, list)):
            both = holder.__getitem__, holder.__setitem__
        else:
            both = partial(getattr, holder), partial(object.__setattr__, holder)
        return cls(name, key, value, *both, *is_variable)

    @property
    def is_constant(self) -> bool:
        """Whether it is a variable that the step itself names, a number or text."""
        return self.is_variable and type(self.value) in _CONSTANTS

    def is_as_it_was(self) -> bool:
        """Whether it has the same array, or an equal constant."""
        now = self.now()
        is_equal = self.is_constant and static_key(now) == static_key(self.value)
        return now is self.value or is_equal

    def now(self) -> Any:
        with suppress(LookupError, AttributeError, ValueError):  # it may be deleted
            return self.read(self.key)


class Closure:
    """What functions and static values refer to before they are traced."""

    def __init__(self, step: Any = None, *statics: Any) -> None:
        self._entries: Sequence[_Entry] = [*_entries([step, *statics], _code_of(step))]

    def keep(self, captured: Iterable[Any]) -> None:
        """Look at the arrays that the program keeps, and no more at others.

        Raises:
          WriteBackError: [T320] one of them was replaced in the trace.
        """
        kept = {id(array): array for array in captured}
        copies = [array for array in kept.values() if isinstance(array, np.ndarray)]

        def is_kept(leaf: Any) -> bool:
            if isinstance(leaf, np.ndarray):  # of these a program has copies
                return any(np.array_equal(leaf, copy) for copy in copies)
            return id(leaf) in kept

        before = self._entries
        self._entries = [e for e in before if any(map(is_kept, _arrays(e.value)))]
        self.check()
        # Numbers and texts are a part of the program, as the trace leaves them.
        constants = [e._replace(value=e.now()) for e in before if e.is_constant]
        self._entries = [*self._entries, *constants]

    def check(self) -> None:
        """Refuse what the trace has replaced by traced arrays, and put it back.

        Raises:
          WriteBackError: [T320] there is such an array.
        """
        replaced = [
            e for e in self._replaced() if any(map(_is_traced, _arrays(e.now())))
        ]
        for each in replaced:
            each.assign(each.key, each.value)
        if replaced:
            raise WriteBackError(
                "the step replaces arrays that it is not given, and later calls would "
                "read the first ones again",
                got=_names(replaced),
                fix="pass them as an argument, and return the new ones or assign into "
                "it: state['w'] = state['w'] - 0.1 * slopes['w']",
            )

    def warn(self, function: str) -> None:
        """Warn once if the arrays of a program were replaced since its trace.

        Warns:
          TesseraWarning: A call reads the first ones.
        """
        try:  # once for each call: as fast as can be
            if all(read(key) is value for _, key, value, read, *_ in self._entries):
                return
        except (LookupError, AttributeError, ValueError):
            pass
        if replaced := self._replaced():
            self._entries = ()
            text = f"{function!r} reads {_names(replaced)} as of its first call, and "
            text += "another value is there now: pass what changes as an argument, "
            text += "arrays in a dict or a registered dataclass"
            warnings.warn(text, TesseraWarning, stacklevel=7)

    def _replaced(self) -> list[_Entry]:
        return [each for each in self._entries if not each.is_as_it_was()]


def _names(entries: Iterable[_Entry]) -> str:
    return ", ".join(dict.fromkeys(each.name for each in entries))


def _is_traced(array: Any) -> bool:
    return isinstance(array, jaxprs.Tracer)


def _arrays(value: Any) -> Iterator[Any]:
    """The arrays in a tree of whatever there may be in a program of Python."""
    seen, waiting = dict[int, Any](), [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, ARRAYS):
            yield each
        elif id(each) not in seen:
            seen[id(each)] = each
            waiting += parts(each)


def _code_of(function: Any) -> Any:
    """The code of a function, whatever wraps it."""
    for name in ("__wrapped__", "__func__", "func"):
        if (inner := getattr(function, name, None)) is not None:
            return _code_of(inner)
    return getattr(function, "__code__", None)


def _entries(waiting: list[Any], code: Any) -> Iterator[_Entry]:
    """Variables, attributes and items within reach.

    Functions are followed to what they close over and name in their module, objects of
    the user's classes to their attributes.
    """
    seen = dict[int, Any]()
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, ARRAYS):
            continue
        seen[id(value)] = value
        found = list[_Entry]()
        if isinstance(value, MethodType):
            waiting += value.__self__, value.__func__
        elif isinstance(value, partial):
            waiting += value.func, value.args, value.keywords
        elif isinstance(value, FunctionType):
            names, own = value.__code__.co_freevars, value.__globals__
            is_step = value.__code__ is code
            for name, cell in zip(names, value.__closure__ or (), strict=False):
                for each in content(cell).values():
                    found.append(_Entry.of(name, cell, "cell_contents", each, is_step))
            names = global_names(value.__code__) if is_user_function(value) else ()
            found += [_Entry.of(n, own, n, own[n], is_step) for n in names if n in own]
            waiting.append(value.__dict__.get("__wrapped__"))
        elif isinstance(value, (tuple, *CONTAINERS)) and len(value) > _LONGEST:
            continue
        elif isinstance(value, (tuple, set, deque)):
            waiting += value
        elif is_compared(value) or is_object(value):
            of = "" if isinstance(value, (dict, list)) else f"{type(value).__name__}."
            entries = content(value).items()
            found = [_Entry.of(f"{of}{key}", value, key, each) for key, each in entries]
        elif isinstance(own := getattr(value, "__dict__", None), dict):
            waiting.append(own.get("__wrapped__"))  # as a jitted function has
        waiting += [each.value for each in found]
        yield from found
