# SPDX-License-Identifier: Apache-2.0
"""Writes mutations of dict and list arguments back to the caller.

A traced function works on copies of its arguments. The entries that it assigns are
outputs of the program after those of its result, and after the call they are assigned
in the caller's own dicts and lists. A container from which the function only removes
entries stays as it is, and so does an entry that is assigned inside of a transformation
(a loss under ``jax.grad``, the body of a ``scan``): its value ends with that. A call
that fails changes nothing.
"""

import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from tessera.errors import TesseraWarning, WriteBackError
from tessera.foundations.tree import Skeleton, partition, path_name
from tessera.graph.ir import Value
from tessera.graph.tracer.declared_layouts import is_numeric_array
from tessera.jax_compat import traces
from tessera.tracing.object_arguments import split_result

Path = tuple[Any, ...]


@dataclass(frozen=True)
class Write:
    """One dict or list among the arguments that a function has changed.

    Attributes:
      argument: Which of the call's arguments.
      path: The keys and indices from the argument to it.
      name: What messages and programs call it.
      entries: The keys that were assigned.
      keys: All keys after the call.
      skeleton: The values, a tuple, without their arrays.
      restore: Puts objects that the function created in the place of their arrays.
    """

    argument: int
    path: Path
    name: str
    entries: tuple[Any, ...]
    keys: tuple[Any, ...]
    skeleton: Skeleton
    restore: Callable[[Any], Any]

    def values(self, arrays: Sequence[Any]) -> dict[Any, Any]:
        """The values of the entries, from its outputs."""
        values = self.restore(self.skeleton.combine(arrays))
        return dict(zip(self.entries, values, strict=True))

    def names(self) -> list[str]:
        """What each of its outputs is called: ``optimizer_state/loss_scale``."""
        entries, statics = self.entries, self.skeleton.statics
        return [
            path_name(path[1:], f"{self.name}/{entries[path[0].idx]}")
            for index, path in enumerate(self.skeleton.paths)
            if index not in statics
        ]


class MutationTracker:
    """Tracks which dicts and lists among some arguments a function changes.

    Args:
      values: Copies of the arguments, which the function may change.
      names: What the arguments are called.
      donated: Names of the donated ones: if any entry is written back, all are, because
        the caller's arrays are deleted by the call.
    """

    def __init__(
        self,
        values: Sequence[Any],
        names: Sequence[str],
        donated: frozenset[str] = frozenset(),
    ) -> None:
        self._seen: list[tuple[int, Path, str, Any, dict[Any, Any]]] = []
        self._opaque: list[tuple[str, Any, list[Any]]] = []
        self._donated = donated
        named = zip(values, names, strict=True)
        for argument, (value, name) in enumerate(named):
            self._visit(argument, (), name, value)

    def _visit(self, argument: int, path: Path, name: str, value: Any) -> None:
        if isinstance(value, (dict, list, tuple)):
            content = dict(_content(value))
            if not isinstance(value, tuple):
                self._seen.append((argument, path, name, value, content))
            for entry, item in content.items():
                self._visit(argument, (*path, entry), f"{name}/{entry}", item)
        elif isinstance(value, traces.VJP):
            return  # a function fills in its residuals for itself
        elif not jax.tree_util.all_leaves([value]):
            self._opaque.append((name, value, jax.tree.leaves(value)))

    def changes(self) -> tuple[list[Write], list[Any]]:
        """The changes so far, and the arrays that were assigned.

        A Python number remains one.

        Raises:
          WriteBackError: [T320] something else than a dict or a list was changed.
        """
        for name, value, before in self._opaque:
            now = jax.tree.leaves(value)
            if len(now) != len(before) or any(map(operator.is_not, now, before)):
                raise WriteBackError(
                    f"{name!r} was changed, and cannot be given back",
                    got=f"a {type(value).__name__}, of which the function has a copy",
                    fix="return it, or assign into a dict or list argument",
                )
        stored = [
            _stored(name, holder, before) for *_, name, holder, before in self._seen
        ]
        pairs = list(zip(self._seen, stored, strict=True))
        changed = {argument for (argument, *_), entries in pairs if entries}
        writes, arrays = list[Write](), list[Any]()
        for (argument, path, name, holder, before), entries in pairs:
            now = dict(_content(holder))
            if argument in changed and name.partition("/")[0] in self._donated:
                entries = [k for k, v in now.items() if _is_given_back(v)]
            if not entries:
                continue
            kept = [key for key in now if key in before or not _is_scratch(now[key])]
            assigned, restore = split_result(tuple(now[key] for key in entries))
            found, skeleton = partition(assigned, is_numeric_array)
            arrays += found
            keys = tuple(entries), tuple(kept)
            writes.append(Write(argument, path, name, *keys, skeleton, restore))
        return writes, arrays


def _content(holder: Any) -> Iterator[tuple[Any, Any]]:
    return iter(holder.items() if isinstance(holder, dict) else enumerate(holder))


def _is_scratch(value: Any) -> bool:
    """Whether a value belongs to a transformation that has ended."""
    return any(map(traces.is_of_ended_trace, jax.tree.leaves(value)))


def _is_given_back(value: Any) -> bool:
    """Whether an entry is no container, which is tracked by itself, and has a value."""
    return not (isinstance(value, (dict, list)) or _is_scratch(value))


def _stored(name: str, holder: Any, before: Mapping[Any, Any]) -> list[Any]:
    """The entries that a function assigned; none where it only removed some."""
    absent, now = object(), list(_content(holder))
    if isinstance(holder, list):
        rest = iter(before.values())
        if all(any(item is other for other in rest) for _, item in now):
            return []
    changed = [(key, item) for key, item in now if item is not before.get(key, absent)]
    for key, item in changed:
        if key in before and _is_scratch(item):
            warnings.warn(
                f"{f'{name}/{key}'!r} keeps its value: what was assigned to it inside "
                "of a transformation, such as a loss under jax.grad, ends with that. "
                "Return it from there (has_aux=True), and assign it outside",
                TesseraWarning,
                stacklevel=2,
            )
    return [key for key, item in changed if not _is_scratch(item)]


def write_values(
    writes: Sequence[Write], avals: Sequence[Any], inputs: Sequence[Value]
) -> list[Value]:
    """The outputs for what is written back; an entry keeps its layout."""
    known = {value.name: value for value in inputs}
    names = [name for write in writes for name in write.names()]
    values = list[Value]()
    for name, aval in zip(names, avals, strict=True):
        before = known.get(name)
        alike = before is not None and before.aval.shape == aval.shape
        values.append(Value(name, aval, before.spec if alike and before else None))
    return values


def write_back(
    writes: Sequence[Write],
    arrays: Sequence[Any],
    values: Sequence[Any],
) -> None:
    """Assign what a program computed in the caller's dicts and lists.

    Args:
      writes: What the function changed.
      arrays: The program's outputs for it.
      values: The call's arguments.
    """
    rest, found = list(arrays), list[Any]()
    for write in writes:
        own, rest = rest[: write.skeleton.num_arrays], rest[write.skeleton.num_arrays :]
        holder = _at(values, write.argument, write.path)
        found.append((holder, write.values(own), write.keys))
    for holder, values, keys in found:
        _put(holder, values, keys)


def check_no_alias(writes: Sequence[Write], values: Sequence[Any]) -> None:
    """Raise [T320] where a container that is written to is in the arguments twice."""
    names = {
        id(_at(values, write.argument, write.path)): write.name for write in writes
    }
    met = set[int]()

    def visit(value: Any) -> None:
        if not isinstance(value, (dict, list, tuple)):
            return
        if id(value) in names:
            if id(value) in met:
                raise WriteBackError(
                    f"{names[id(value)]!r} is assigned into, and is given to the call "
                    "a second time",
                    got=f"one {type(value).__name__} in two places of the arguments",
                    fix="pass it once, or pass a copy of it",
                )
            met.add(id(value))
        for _, item in _content(value):
            visit(item)

    visit(tuple(values))


def _at(values: Sequence[Any], argument: int, path: Path) -> Any:
    holder = values[argument]
    for key in path:
        holder = holder[key]
    return holder


def _put(holder: Any, values: Mapping[Any, Any], keys: Sequence[Any]) -> None:
    """Assign entries, and delete those that are not among the keys."""
    if isinstance(holder, list):
        before = list(holder)
        holder[:] = [values[i] if i in values else before[i] for i in keys]
        return
    for key in set(holder).difference(keys):
        del holder[key]
    holder.update(values)
