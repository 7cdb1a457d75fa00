# SPDX-License-Identifier: Apache-2.0
"""The places in a program where a layout is declared for a value in the middle of it.

These are the layouts of ``with_sharding_constraint`` and ``reshard``, which a
``ShardSpec`` or a rule table of a model becomes, and those that a manual region takes
its arguments in and gives its results in.

The partitioner does not move an array at the constraint itself. The operation that
computes a value has its results in the declared layout, so either the results of that
operation are moved or its operands are, and what reads the value may be where it is
moved too. So a declaration has several lines and arrays.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from jax.sharding import NamedSharding, PartitionSpec

from tessera import _jax
from tessera.primitive_properties import BROADCASTS, CASTS, COPIES, RESHAPES
from tessera.spec import axes_of_dims

# What changes the form of an array and not its place: a layout on one side of it may be
# made on the other.
_FORMS = COPIES | CASTS | RESHAPES | BROADCASTS

# What lays a value out, over Auto axes and over Explicit ones, and how it names it.
_CONSTRAINTS = {"sharding_constraint": "sharding", "reshard": "dst_sharding"}

# The dims of an array that are dims of a declared value, and which ones.
_Dims: TypeAlias = Mapping[int, int]


@dataclass(frozen=True, slots=True)
class DeclaredLayout:
    """A layout that a program asks for where it uses a value.

    Attributes:
      line: ``file:line`` of the declaration.
      lines: That line, those of the operations before it and those of the ones after
        it, and of an operand the line that computes it: the partitioner moves an array
        at any of them.
      shape: Global shape of the array that may be moved: the value, or an operand of
        the operation that computes it.
      axes: The mesh axes that the declaration splits it over.
      dims: The dims that the declaration is about: all of the value's own; of an
        operand those that are dims of the value too.
    """

    line: str
    lines: frozenset[str]
    shape: tuple[int, ...]
    axes: frozenset[str]
    dims: frozenset[int]


def declared_layouts(program: _jax.Program) -> frozenset[DeclaredLayout]:
    """Every layout declared inside a program, nested programs included.

    Args:
      program: The jaxpr of a step, its backward pass included.
    """
    return frozenset(_inside(_Level(program)))


def spec_axes(spec: PartitionSpec) -> frozenset[str]:
    """The mesh axes that a spec splits an array over.

    Example:
      >>> sorted(spec_axes(PartitionSpec(("dp", "fsdp"), None, "tp")))
      ['dp', 'fsdp', 'tp']
    """
    entries = [entry for entry in spec if isinstance(entry, (str, tuple))]
    names = [(entry,) if isinstance(entry, str) else entry for entry in entries]
    return frozenset(axis for entry in names for axis in entry)


def _inside(level: "_Level") -> Iterator[DeclaredLayout]:
    for eqn in _jax.equations(level.program):
        for value, spec in _declarations(eqn):
            yield from _places(level, eqn, value, spec)
        for inner in level.below(eqn):
            yield from _inside(inner)


def _declarations(eqn: _jax.Equation) -> Iterator[tuple[Any, PartitionSpec]]:
    if (named := _CONSTRAINTS.get(eqn.primitive.name)) is not None:
        sharding = eqn.params[named]
        # JAX writes reshard by itself, too, where it moves nothing.
        is_own = eqn.primitive.name == "reshard" and not sharding.mesh.explicit_axes
        if isinstance(sharding, NamedSharding) and not is_own:
            yield eqn.invars[0], sharding.spec
    elif _jax.is_manual_region(eqn):
        yield from zip(eqn.invars, eqn.params["in_specs"], strict=True)
        yield from zip(eqn.outvars, eqn.params["out_specs"], strict=True)


def _places(
    level: "_Level", eqn: _jax.Equation, value: Any, spec: PartitionSpec
) -> Iterator[DeclaredLayout]:
    """The arrays that one declaration may move."""
    own, shape = _jax.source_line(eqn), tuple(value.aval.shape)
    lines = {own} | _after(level, eqn.outvars)
    everything = {dim: dim for dim in range(len(shape))}
    arrays: list[tuple[tuple[int, ...], _Dims, set[str]]] = [(shape, everything, set())]
    for inside, writer, dims in _before(level, value, everything):
        lines.add(_jax.source_line(writer))
        for place, operand in enumerate(writer.invars):
            if own_dims := _composed(_dims_in_result(writer, place), dims):
                before = _before(inside, operand, {})
                its_lines = {_jax.source_line(each) for _, each, _ in before}
                arrays.append((tuple(operand.aval.shape), own_dims, its_lines))
    split = axes_of_dims(spec, len(shape))
    for moved, dims, its_lines in arrays:
        axes = frozenset(axis for dim in dims.values() for axis in split[dim])
        every_line = frozenset(lines | its_lines)
        yield DeclaredLayout(own, every_line, moved, axes, frozenset(dims))


# --- through nested programs


@dataclass
class _Level:
    """A program, and the equation that runs it, at the level around it.

    Attributes:
      program: The jaxpr.
      outer: The level around it and the equation there; None for the whole program.
    """

    program: _jax.Program
    outer: "tuple[_Level, _jax.Equation] | None" = None
    _below: dict[int, "list[_Level]"] = field(default_factory=dict)

    @cached_property
    def writers(self) -> dict[Any, _jax.Equation]:
        """The equation that computes each value."""
        every = _jax.equations(self.program)
        return {out: eqn for eqn in every for out in eqn.outvars}

    @cached_property
    def readers(self) -> dict[Any, list[tuple[_jax.Equation, int]]]:
        """The equations that read each value, and as which operand."""
        found = defaultdict[Any, list[tuple[_jax.Equation, int]]](list)
        for eqn in _jax.equations(self.program):
            for place, value in enumerate(eqn.invars):
                if not isinstance(value, _jax.Literal):
                    found[value].append((eqn, place))
        return found

    def below(self, eqn: _jax.Equation) -> "list[_Level]":
        """The programs in an equation."""
        if id(eqn) not in self._below:
            found = [_Level(inner, (self, eqn)) for inner in _jax.inner_programs(eqn)]
            self._below[id(eqn)] = found
        return self._below[id(eqn)]

    def runs(self, eqn: _jax.Equation) -> "list[_Level]":
        """Those whose results are the equation's, as in jit, scan and cond."""
        if _jax.is_manual_region(eqn):
            return []
        count = len(eqn.outvars)
        return [x for x in self.below(eqn) if len(_jax.outputs(x.program)) == count]


def _before(
    level: _Level, value: Any, dims: _Dims
) -> Iterator[tuple[_Level, _jax.Equation, _Dims]]:
    """The operation that computes a value, and those that give it another form.

    Each comes with the dims of its result that are dims of the value. What only runs a
    program is among them without any, and so is what is inside.
    """
    waiting, seen = [(level, value, dims)], set[tuple[int, Any]]()
    while waiting:
        level, value, dims = waiting.pop()
        if isinstance(value, _jax.Literal) or (id(level.program), value) in seen:
            continue
        seen.add((id(level.program), value))
        eqn = level.writers.get(value)
        if eqn is None:
            waiting += [(*found, dims) for found in _passed_in(level, value)]
        elif inner := level.runs(eqn):
            yield level, eqn, {}
            place = eqn.outvars.index(value)
            waiting += [(i, _jax.outputs(i.program)[place], dims) for i in inner]
        else:
            yield level, eqn, dims
            if eqn.primitive.name in _FORMS:
                own_dims = _composed(_dims_in_result(eqn, 0), dims)
                waiting.append((level, eqn.invars[0], own_dims))


def _passed_in(level: _Level, value: Any) -> Iterator[tuple[_Level, Any]]:
    """What an input of a nested program is: outside, and of a loop after each turn."""
    inputs = _jax.inputs(level.program)
    if level.outer is None or value not in inputs:
        return
    outer, eqn = level.outer
    from_end = inputs.index(value) - len(inputs)
    if -from_end <= len(eqn.invars):
        yield outer, eqn.invars[from_end]
    if (carried := _carried(eqn, level.program).get(inputs.index(value))) is not None:
        yield level, _jax.outputs(level.program)[carried]


def _carried(eqn: _jax.Equation, body: _jax.Program) -> dict[int, int]:
    """The inputs of a loop's body that are outputs of its last turn, by position."""
    if eqn.primitive.name == "scan":
        consts, count = _jax.scan_sizes(eqn)
    elif eqn.primitive.name == "while":
        count = len(_jax.outputs(body))
        consts = len(_jax.inputs(body)) - count
    else:
        return {}
    return {consts + place: place for place in range(count)}


def _after(level: _Level, values: list[Any]) -> set[str]:
    """The lines of what reads some values, in whatever form."""
    lines, seen = set[str](), set[tuple[int, Any]]()
    waiting = [(level, value) for value in values]
    while waiting:
        level, value = waiting.pop()
        if (id(level.program), value) in seen:
            continue
        seen.add((id(level.program), value))
        for eqn, place in level.readers[value]:
            lines.add(_jax.source_line(eqn))
            for inner in level.runs(eqn):
                inputs = _jax.inputs(inner.program)
                own_place = place - len(eqn.invars) + len(inputs)
                waiting += [(inner, inputs[own_place])] if own_place >= 0 else []
            if eqn.primitive.name in _FORMS:
                waiting += [(level, out) for out in eqn.outvars]
        waiting += _passed_out(level, value)
    return lines


def _passed_out(level: _Level, value: Any) -> Iterator[tuple[_Level, Any]]:
    """What an output of a nested program is: outside, and in a loop's next turn."""
    outputs = _jax.outputs(level.program)
    places = [place for place, output in enumerate(outputs) if output is value]
    if level.outer is None:
        return
    outer, eqn = level.outer
    again = {turn: first for first, turn in _carried(eqn, level.program).items()}
    for place in places:
        if len(outputs) == len(eqn.outvars):
            yield outer, eqn.outvars[place]
        if place in again:
            yield level, _jax.inputs(level.program)[again[place]]


# --- dims


def _composed(first: _Dims, then: _Dims) -> _Dims:
    return {dim: then[to] for dim, to in first.items() if to in then}


def _dims_in_result(eqn: _jax.Equation, place: int) -> _Dims:
    """The dims of an operand that are dims of the result: an operation's rows, say.

    Those that it sums over, or takes apart, are not among them.
    """
    shape = tuple(getattr(eqn.invars[place].aval, "shape", ()))
    result = tuple(getattr(eqn.outvars[0].aval, "shape", ()))
    params = eqn.params
    match eqn.primitive.name:
        case "dot_general":
            return _dims_in_product(eqn, place, len(shape))
        case "transpose":
            return {dim: to for to, dim in enumerate(params["permutation"])}
        case "broadcast_in_dim":
            dims = enumerate(params["broadcast_dimensions"] if shape else ())
            return {dim: to for dim, to in dims if shape[dim] == result[to]}
        case "squeeze":
            left = [d for d in range(len(shape)) if d not in params["dimensions"]]
            return {dim: to for to, dim in enumerate(left)}
        case "reshape":
            return _dims_in_reshape(shape, result)
        case "concatenate":
            return {d: d for d in range(len(shape)) if d != params["dimension"]}
        case name if name.startswith(("reduce_", "arg")) and "axes" in params:
            left = [d for d in range(len(shape)) if d not in params["axes"]]
            return {dim: to for to, dim in enumerate(left)}
    return {dim: dim for dim in range(len(shape))} if shape == result else {}


def _dims_in_product(eqn: _jax.Equation, place: int, rank: int) -> _Dims:
    contracted, batch = eqn.params["dimension_numbers"]
    free = [
        [d for d in range(len(v.aval.shape)) if d not in (*contracted[i], *batch[i])]
        for i, v in enumerate(eqn.invars)
    ]
    first = len(batch[0]) + (len(free[0]) if place else 0)
    dims = {dim: to for to, dim in enumerate(batch[place])}
    return dims | {dim: first + to for to, dim in enumerate(free[place])}


def _dims_in_reshape(shape: tuple[int, ...], result: tuple[int, ...]) -> _Dims:
    """The dims that a reshape leaves alone: as large, and after as many elements."""

    def starts(sizes: tuple[int, ...]) -> dict[tuple[int, int], int]:
        return {
            (math.prod(sizes[:dim]), size): dim
            for dim, size in enumerate(sizes)
            if size > 1
        }

    to = starts(result)
    return {dim: to[key] for key, dim in starts(shape).items() if key in to}
