# SPDX-License-Identifier: Apache-2.0
"""Says why a call compiles again: what no earlier program was compiled for.

It looks only where a program is about to be compiled, so a call that has one costs
nothing. Each reason is logged once for each function, and whatever it is at the 4th,
8th and 16th program and so on, by the logger ``tessera.recompiles`` at level
``WARNING``, which Python shows unless told otherwise:

    logging.getLogger("tessera.recompiles").setLevel(logging.ERROR)
"""

import logging
import re
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from jax.sharding import PartitionSpec

from tessera.analysis.source_lines import short
from tessera.errors import printable
from tessera.graph.call_kinds import Program
from tessera.graph.tracer.argument_leaves import LeafKey
from tessera.graph.tracer.arguments import Argument, Call
from tessera.graph.tracer.control_flow.user_code import user_line
from tessera.graph.tracer.static_values import StaticValue
from tessera.jax_compat import jaxprs
from tessera.tracing.object_arguments import STRUCTURE

_logger: Final = logging.getLogger("tessera.recompiles")

# Programs that a call is compared with; differences and names that a message shows.
_MAX_PROGRAMS: Final = 32
_MAX_LINES: Final = 5
_MAX_NAMES: Final = 3
_MAX_TEXT: Final = 60
# From this number of programs on, reasons are repeated as often as it doubles.
_REPEATED_FROM: Final = 4

# A user's repr may fail, or be of any length.
_REPR: Final = reprlib.Repr()
_REPR.maxother = _REPR.maxstring = _MAX_TEXT


@dataclass(frozen=True, slots=True)
class _Difference:
    """What a program depends on and a call has otherwise: before, now, what helps."""

    name: str
    part: str
    before: str
    now: str
    fix: str = ""


class Recompilations:
    """Logs why one function compiles again, each reason once at first.

    Args:
      function: Its name.
    """

    def __init__(self, function: str) -> None:
        self._function = function
        self._logged: dict[tuple[str, str], object] = {}

    def log(
        self, call: Call, key: Any, placed: Any, programs: Iterable[Program]
    ) -> None:
        """Log in what a call differs from the closest program, unless it was logged.

        Args:
          call: The call.
          key: What its program depends on.
          placed: The same with uncommitted arrays in the layouts of the step.
          programs: The programs so far, the last one last.
        """
        unique = [*{id(program): program for program in programs}.values()]
        recent = unique[: -_MAX_PROGRAMS - 1 : -1]
        alike = [each for each in recent if each.key[1][:2] == key[1][:2]]
        found = [[*_differences(each, call, key, placed)] for each in alike or recent]
        closest = min(found, key=len) if found else list[_Difference]()
        # Two threads may be here with one reason: the first to put it in logs it.
        mine = object()
        new = [
            self._logged.setdefault((each.name, each.part), mine) is mine
            for each in closest
        ]
        number = len({id(program.compiled) for program in unique}) + 1
        is_doubled = number >= _REPEATED_FROM and number.bit_count() == 1
        if any(new) or (closest and is_doubled):
            title = f"{self._function!r} compiles again, program {number}, for the call"
            lines = [f"{title} at {short(user_line())}", *_lines(closest)]
            _logger.warning("%s", "\n  ".join(lines))


def _lines(differences: Sequence[_Difference]) -> Iterator[str]:
    """One for each thing that differs, of however many arrays, and what helps."""
    alike: dict[tuple[str, str, str], dict[str, None]] = {}
    for each in differences:
        alike.setdefault((each.part, each.now, each.before), {})[each.name] = None
    for (part, now, before), names in [*alike.items()][:_MAX_LINES]:
        of = ", ".join([repr(name) for name in names if name][:_MAX_NAMES])
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        yield f"{part}{of and f' of {of}{more}'}: {now}, before {before}"
    if len(alike) > _MAX_LINES:
        yield f"and {len(alike) - _MAX_LINES} more differences"
    fixes = dict.fromkeys(line for d in differences for line in d.fix.split("\n"))
    yield from [f"fix: {line}" for line in fixes if line][:_MAX_LINES]


# --- what differs


def _differences(
    program: Program, call: Call, key: Any, placed: Any
) -> Iterator[_Difference]:
    """In what a call differs from the one that a program was compiled for.

    An array differs where it does both as it was passed and as it was placed: one
    without a layout of its own is like one that has the layout of the step.
    """
    (context, before), (context_now, now) = program.key, key
    yield from _of_context(context, context_now)
    if before[:2] != now[:2]:
        yield _Difference("", "way of passing", _passed(before), _passed(now))
        return
    parts = (before[2], now[2], program.placed[1][2], placed[1][2])
    pairs = zip(program.call.arguments, call.arguments, *parts, strict=True)
    for was, argument, *keys in pairs:
        passed, passed_now, in_place, in_place_now = keys
        if passed == passed_now or in_place == in_place_now:
            continue
        if passed[0] != passed_now[0]:
            yield _of_structure(was, argument)
            continue
        names = argument.leaf_names
        for name, *forms in zip(names, *(map(_by_position, keys)), strict=True):
            yield from _of_leaf(name, *forms)


def _of_context(before: Sequence[Any], now: Sequence[Any]) -> Iterator[_Difference]:
    # JAX's own mesh is the one that is open, or adds nothing to it.
    parts = ("mesh", "mesh", "autocast", "schedule")
    *own, settings = zip(before, now, strict=True)
    changed = {
        part: pair
        for part, pair in reversed([*zip(parts, own, strict=True)])
        if pair[0] != pair[1]
    }
    for part, (was, here) in changed.items():
        yield _Difference("", part, _text(was), _text(here))
    for name, was, here in jaxprs.changed_trace_settings(*settings):
        if name.startswith("jax_"):  # the others are meshes, or states of a trace
            yield _Difference("", name, _text(was), _text(here))


def _of_structure(before: Argument, now: Argument) -> _Difference:
    """Of one argument whose containers or keys are others."""
    added = ", ".join(name for name in now.paths if name not in before.paths)
    missing = ", ".join(name for name in before.paths if name not in now.paths)
    if added or missing:
        old = f"with {missing}" if missing else "without"
        new = f"with {added}" if added else "without"
    else:
        old, new = str(before.tree), str(now.tree)
    return _Difference(now.name, "structure", _text(old), _text(new))


def _by_position(key: Any) -> list[Any]:
    """What a program depends on in each leaf of an argument."""
    tree, statics, leaves = key
    static, arrays = dict(statics), iter(leaves)
    return [static[i] if i in static else next(arrays) for i in range(tree.num_leaves)]


def _of_leaf(
    name: str, before: Any, now: Any, placed: Any, placed_now: Any
) -> Iterator[_Difference]:
    if isinstance(before, LeafKey) and isinstance(now, LeafKey):
        for part, *forms in zip(
            LeafKey._fields, before, now, placed, placed_now, strict=True
        ):
            if forms[0] != forms[1] and forms[2] != forms[3]:
                yield _of_part(name, part, *forms)
    elif before != now and name.endswith(f"/{STRUCTURE}"):
        yield from _of_object(name.removesuffix(f"/{STRUCTURE}"), before, now)
    elif before != now:
        was, here = _text(before), _text(now)
        fix = ""
        if was == here:
            was, fix = "another one", f"create {name!r} once, before the calls"
        elif _is_number(before) and (_is_number(now) or getattr(now, "shape", 0) == ()):
            fix = f"pass {name!r} as an array, jnp.asarray(x), from the first call on: "
            fix += "a number of Python is a part of the program, and each compiles one"
        yield _Difference(name, "static value", was, here, fix)


def _of_part(
    name: str, part: str, before: Any, now: Any, placed: Any, placed_now: Any
) -> _Difference:
    """Of one part of the type or layout of an array."""
    argument, fix = name.partition("/")[0], ""
    if part == "weak_type":
        fix = f"give {name!r} a dtype from the first call on: jnp.asarray(x, dtype)"
    if part == "layout":
        is_on_one = placed and placed_now and placed[0] == placed_now[0]
        before, now = (
            _layout(own, step, is_on_one)
            for own, step in ((before, placed), (now, placed_now))
        )
        spec = placed_now[1] if placed_now else PartitionSpec()
        fix = (
            f"declare the layout of {argument!r} in in_specs, and in out_specs where "
            "it comes back\nor place it before the first call: "
            f"jax.device_put(x, NamedSharding(mesh.jax, {spec}))"
        )
    return _Difference(name, part.replace("_", " "), _text(before), _text(now), fix)


def _layout(own: Any, placed: Any, is_on_one: bool) -> str:
    """A layout, with its mesh where two differ in that."""
    if placed is None:
        return "uncommitted"
    mesh, spec = placed
    text = str(spec) if is_on_one else f"{spec} on {mesh}"
    return text if own else f"{text} (uncommitted)"


def _of_object(name: str, before: Any, now: Any) -> Iterator[_Difference]:
    """The static attributes of an NNX object that have other values."""
    graphs = [getattr(form.value, "graphdef", None) for form in (before, now)]
    old, new = (getattr(graph, "attributes", ()) for graph in graphs)
    changed = [(a, b) for a, b in zip(old, new, strict=False) if a != b]
    if len(old) != len(new) or not changed:
        yield _Difference(name, "structure", "another", "its own")
        return
    for (attribute, was), (_, here) in changed:
        both = (_text(getattr(value, "value", value)) for value in (was, here))
        yield _Difference(name, f"attribute {attribute!r}", *both)


def _is_number(form: Any) -> bool:
    is_static = isinstance(form, StaticValue) and not form.is_argument
    return is_static and type(form.value) in (int, float, complex)


def _passed(key: Sequence[Any]) -> str:
    """How arguments were passed."""
    positional, keywords, _ = key
    named = f", {', '.join(keywords)} by name" if keywords else ""
    return f"{positional} by position{named}"


def _text(value: Any) -> str:
    if isinstance(value, LeafKey):
        value = f"an array, {value.dtype}{list(value.shape)}"
    elif isinstance(value, StaticValue):
        value = re.sub(r" at 0x[0-9a-f]+", "", _REPR.repr(value.value))
    return printable(str(value), longest=_MAX_TEXT)
