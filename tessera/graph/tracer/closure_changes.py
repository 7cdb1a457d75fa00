# SPDX-License-Identifier: Apache-2.0
"""Refuses a step that replaces arrays which it reads and is not given.

``model.w = model.w - 0.1 * slope`` of a ``model`` that the step closes over runs once,
while the step is traced. Its program keeps the first ``w``, and never trains.
"""

import functools
from collections.abc import Iterable, Iterator
from types import CellType, FunctionType, MethodType
from typing import Any, Final

import jax
import numpy as np

from tessera.errors import WriteBackError
from tessera.graph.tracer.control_flow.own_objects import content, is_compared
from tessera.graph.tracer.control_flow.user_code import is_user_function
from tessera.graph.tracer.static_values import global_names
from tessera.jax_compat import jaxprs
from tessera.shard import ARRAYS

# Longer containers are data: what is in them is not looked at.
_LONGEST: Final = 1000


class Closure:
    """What functions and static values refer to before they are traced."""

    def __init__(self, *roots: Any) -> None:
        self._entries = [*_entries([*roots])]

    def check(self, captured: Iterable[Any] | None) -> None:
        """Refuse what the trace has replaced, and put it back.

        Args:
          captured: The arrays that the program keeps; None where the trace has failed.

        Raises:
          WriteBackError: [T320] one of them was replaced by a traced array.
        """
        kept = None if captured is None else {id(array) for array in captured}
        holders = {id(holder): holder for _, holder, *_ in self._entries}
        held = {number: content(holder) for number, holder in holders.items()}
        replaced = [
            (name, holder, key, value)
            for name, holder, key, value in self._entries
            if (now := held[id(holder)].get(key)) is not value
            and any(isinstance(leaf, jaxprs.Tracer) for leaf in jax.tree.leaves(now))
            and any(_is_in(kept, leaf) for leaf in jax.tree.leaves(value))
        ]
        for _, holder, key, value in replaced:
            if isinstance(holder, (dict, list)):
                holder[key] = value
            else:
                is_cell = isinstance(holder, CellType)
                object.__setattr__(holder, "cell_contents" if is_cell else key, value)
        if replaced:
            raise WriteBackError(
                "the step replaces arrays that it is not given, and later calls would "
                "read the first ones again",
                got=", ".join(dict.fromkeys(name for name, *_ in replaced)),
                fix="pass them as an argument, and return the new ones or assign into "
                "it: state['w'] = state['w'] - 0.1 * slopes['w']",
            )


def _is_in(kept: set[int] | None, leaf: Any) -> bool:
    # A program keeps copies of NumPy's arrays.
    is_kept = kept is None or id(leaf) in kept or isinstance(leaf, np.ndarray)
    return isinstance(leaf, ARRAYS) and is_kept


def _entries(waiting: list[Any]) -> Iterator[tuple[str, Any, Any, Any]]:
    """Variables, attributes and items within reach: name, holder, key and value.

    Functions are followed to what they close over and name in their module, objects of
    the user's classes to their attributes.
    """
    seen = dict[int, Any]()
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, ARRAYS):
            continue
        seen[id(value)] = value
        found = list[tuple[str, Any, Any, Any]]()
        if isinstance(value, MethodType):
            waiting += value.__self__, value.__func__
        elif isinstance(value, functools.partial):
            waiting += value.func, value.args, value.keywords
        elif isinstance(value, FunctionType):
            for name, cell in zip(
                value.__code__.co_freevars, value.__closure__ or (), strict=False
            ):
                found += [(name, cell, *each) for each in content(cell).items()]
            names = global_names(value.__code__) if is_user_function(value) else ()
            own = value.__globals__
            found += [(name, own, name, own[name]) for name in names if name in own]
            waiting.append(value.__dict__.get("__wrapped__"))
        elif isinstance(value, (tuple, dict, list)) and len(value) > _LONGEST:
            continue
        elif isinstance(value, tuple):
            waiting += value
        elif is_compared(value):
            of = "" if isinstance(value, (dict, list)) else f"{type(value).__name__}."
            found = [(f"{of}{k}", value, k, each) for k, each in content(value).items()]
        elif isinstance(own := getattr(value, "__dict__", None), dict):
            waiting.append(own.get("__wrapped__"))  # as a jitted function has
        waiting += [each for *_, each in found]
        yield from found
