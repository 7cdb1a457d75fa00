# SPDX-License-Identifier: Apache-2.0
"""Finds the layouts that a program declares for its intermediate values.

These are the layouts of ``with_sharding_constraint`` and ``reshard``, which a
``ShardSpec`` or a rule table of a model becomes, and those of the arguments and results
of SPMD regions.

The partitioner does not move an array at the constraint itself. The operation that
computes a value has its result in the declared layout, so the partitioner may move that
result, or the operands of the operation, or it moves the value where it is read. So a
declaration has several lines and arrays.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from jax.sharding import NamedSharding, PartitionSpec

from tessera import _jax
from tessera.primitive_properties import BROADCASTS, CASTS, COPIES, RESHAPES
from tessera.shard_spec import axes_of_dims

# Operations that change the shape or dtype of an array and not its device: a layout on
# one side of one may be satisfied on the other.
_FORMS = COPIES | CASTS | RESHAPES | BROADCASTS

# The primitives that constrain a layout over Auto and over Explicit axes, and the name
# of the parameter with the layout.
_CONSTRAINTS = {"sharding_constraint": "sharding", "reshard": "dst_sharding"}

# Dims of an array -> the dims of a declared value that they are.
_Dims: TypeAlias = Mapping[int, int]


@dataclass(frozen=True, slots=True)
class DeclaredLayout:
    """A layout that a program declares for an intermediate value.

    Attributes:
      line: ``file:line`` of the declaration.
      lines: The lines at which the partitioner may move the array: that line, those of
        the operations before and after it, and, for an operand, the line that computes
        the operand.
      shape: Global shape of the array that may be moved: the value, or an operand of
        the operation that computes it.
      axes: The mesh axes that the declaration splits it over.
      dims: The dims that the declaration is about: all dims of the value; the dims of
        an operand that are dims of the value too.
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
            yield from _movable(level, eqn, value, spec)
        for inner in level.below(eqn):
            yield from _inside(inner)


def _declarations(eqn: _jax.Equation) -> Iterator[tuple[Any, PartitionSpec]]:
    if (parameter := _CONSTRAINTS.get(eqn.primitive.name)) is not None:
        sharding = eqn.params[parameter]
        # JAX inserts reshard by itself, too, where it moves nothing.
        is_jaxs = eqn.primitive.name == "reshard" and not sharding.mesh.explicit_axes
        if isinstance(sharding, NamedSharding) and not is_jaxs:
            yield eqn.invars[0], sharding.spec
    elif _jax.is_shard_map(eqn):
        yield from zip(eqn.invars, eqn.params["in_specs"], strict=True)
        yield from zip(eqn.outvars, eqn.params["out_specs"], strict=True)


def _movable(
    level: "_Level", eqn: _jax.Equation, value: Any, spec: PartitionSpec
) -> Iterator[DeclaredLayout]:
    """The arrays that one declaration may move."""
    own, shape = _jax.source_line(eqn), tuple(value.aval.shape)
    lines = {own} | _after(level, eqn.outvars)
    identity = {dim: dim for dim in range(len(shape))}
    arrays: list[tuple[tuple[int, ...], _Dims, set[str]]] = [(shape, identity, set())]
    for inside, writer, dims in _before(level, value, identity):
        lines.add(_jax.source_line(writer))
        for index, operand in enumerate(writer.invars):
            if own_dims := _composed(_dims_in_result(writer, index), dims):
                before = _before(inside, operand, {})
                own_lines = {_jax.source_line(each) for _, each, _ in before}
                arrays.append((tuple(operand.aval.shape), own_dims, own_lines))
    split = axes_of_dims(spec, len(shape))
    for moved, dims, more_lines in arrays:
        axes = frozenset(axis for dim in dims.values() for axis in split[dim])
        every_line = frozenset(lines | more_lines)
        yield DeclaredLayout(own, every_line, moved, axes, frozenset(dims))


# --- through nested programs


@dataclass
class _Level:
    """A program, and the equation of the enclosing level that runs it.

    Attributes:
      program: The jaxpr.
      outer: The enclosing level and the equation there; None for the whole program.
    """

    program: _jax.Program
    outer: "tuple[_Level, _jax.Equation] | None" = None
    _below: dict[int, "list[_Level]"] = field(default_factory=dict)

    @cached_property
    def writers(self) -> dict[Any, _jax.Equation]:
        """The equation that computes each value."""
        equations = _jax.equations(self.program)
        return {out: eqn for eqn in equations for out in eqn.outvars}

    @cached_property
    def readers(self) -> dict[Any, list[tuple[_jax.Equation, int]]]:
        """The equations that read each value, and as which operand."""
        readers = defaultdict[Any, list[tuple[_jax.Equation, int]]](list)
        for eqn in _jax.equations(self.program):
            for index, value in enumerate(eqn.invars):
                if not isinstance(value, _jax.Literal):
                    readers[value].append((eqn, index))
        return readers

    def below(self, eqn: _jax.Equation) -> "list[_Level]":
        """The programs in an equation."""
        if id(eqn) not in self._below:
            inner = _jax.inner_programs(eqn)
            self._below[id(eqn)] = [_Level(each, (self, eqn)) for each in inner]
        return self._below[id(eqn)]

    def runs(self, eqn: _jax.Equation) -> "list[_Level]":
        """The programs whose results are the equation's, as in jit, scan and cond."""
        if _jax.is_shard_map(eqn):
            return []
        count = len(eqn.outvars)
        return [x for x in self.below(eqn) if len(_jax.outputs(x.program)) == count]


def _before(
    level: _Level, value: Any, dims: _Dims
) -> Iterator[tuple[_Level, _jax.Equation, _Dims]]:
    """The operation that computes a value, and those that change its shape or dtype.

    Each comes with the dims of its result that are dims of the value. Calls of a
    program are included without any dims, and so are the operations inside.
    """
    waiting, seen = [(level, value, dims)], set[tuple[int, Any]]()
    while waiting:
        level, value, dims = waiting.pop()
        if isinstance(value, _jax.Literal) or (id(level.program), value) in seen:
            continue
        seen.add((id(level.program), value))
        eqn = level.writers.get(value)
        if eqn is None:
            waiting += [(*each, dims) for each in _arguments(level, value)]
        elif inner := level.runs(eqn):
            yield level, eqn, {}
            index = eqn.outvars.index(value)
            waiting += [(i, _jax.outputs(i.program)[index], dims) for i in inner]
        else:
            yield level, eqn, dims
            if eqn.primitive.name in _FORMS:
                own_dims = _composed(_dims_in_result(eqn, 0), dims)
                waiting.append((level, eqn.invars[0], own_dims))


def _arguments(level: _Level, value: Any) -> Iterator[tuple[_Level, Any]]:
    """What an input of a nested program is: outside, and after a loop's iteration."""
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
    """The inputs of a loop's body that its previous iteration outputs, by position."""
    if eqn.primitive.name == "scan":
        consts, count = _jax.scan_sizes(eqn)
    elif eqn.primitive.name == "while":
        count = len(_jax.outputs(body))
        consts = len(_jax.inputs(body)) - count
    else:
        return {}
    return {consts + index: index for index in range(count)}


def _after(level: _Level, values: list[Any]) -> set[str]:
    """The lines of the operations that read some values, in any shape or dtype."""
    lines, seen = set[str](), set[tuple[int, Any]]()
    waiting = [(level, value) for value in values]
    while waiting:
        level, value = waiting.pop()
        if (id(level.program), value) in seen:
            continue
        seen.add((id(level.program), value))
        for eqn, index in level.readers[value]:
            lines.add(_jax.source_line(eqn))
            for inner in level.runs(eqn):
                inputs = _jax.inputs(inner.program)
                inner_index = index - len(eqn.invars) + len(inputs)
                waiting += [(inner, inputs[inner_index])] if inner_index >= 0 else []
            if eqn.primitive.name in _FORMS:
                waiting += [(level, out) for out in eqn.outvars]
        waiting += _results(level, value)
    return lines


def _results(level: _Level, value: Any) -> Iterator[tuple[_Level, Any]]:
    """What an output of a nested program is: outside, and in the next iteration."""
    if level.outer is None:
        return
    outer, eqn = level.outer
    outputs = _jax.outputs(level.program)
    carried = {after: before for before, after in _carried(eqn, level.program).items()}
    for index in (i for i, output in enumerate(outputs) if output is value):
        if len(outputs) == len(eqn.outvars):
            yield outer, eqn.outvars[index]
        if index in carried:
            yield level, _jax.inputs(level.program)[carried[index]]


# --- dims


def _composed(first: _Dims, second: _Dims) -> _Dims:
    return {dim: second[to] for dim, to in first.items() if to in second}


def _dims_in_result(eqn: _jax.Equation, index: int) -> _Dims:
    """The dims of an operand that are dims of the result, such as a matmul's rows.

    Dims that the operation sums over, or splits, are not among them.
    """
    shape = tuple(getattr(eqn.invars[index].aval, "shape", ()))
    result = tuple(getattr(eqn.outvars[0].aval, "shape", ()))
    params = eqn.params
    match eqn.primitive.name:
        case "dot_general":
            return _dims_in_product(eqn, index)
        case "transpose":
            return {dim: to for to, dim in enumerate(params["permutation"])}
        case "broadcast_in_dim":
            dims = enumerate(params["broadcast_dimensions"] if shape else ())
            return {dim: to for dim, to in dims if shape[dim] == result[to]}
        case "squeeze":
            return _without(len(shape), params["dimensions"])
        case "reshape":
            return _dims_in_reshape(shape, result)
        case "concatenate":
            return {d: d for d in range(len(shape)) if d != params["dimension"]}
        case name if name.startswith(("reduce_", "arg")) and "axes" in params:
            return _without(len(shape), params["axes"])
    return {dim: dim for dim in range(len(shape))} if shape == result else {}


def _without(rank: int, removed: Collection[int]) -> _Dims:
    """The dims of an array of which an operation removes some."""
    return {dim: i for i, dim in enumerate(d for d in range(rank) if d not in removed)}


def _dims_in_product(eqn: _jax.Equation, index: int) -> _Dims:
    """The result of a matmul has its batch dims first, then those of either operand."""
    contracted, batch = eqn.params["dimension_numbers"]
    free = [
        _without(len(value.aval.shape), (*contracted[i], *batch[i]))
        for i, value in enumerate(eqn.invars)
    ]
    first = len(batch[0]) + (len(free[0]) if index else 0)
    dims = {dim: to for to, dim in enumerate(batch[index])}
    return dims | {dim: first + to for dim, to in free[index].items()}


def _dims_in_reshape(shape: tuple[int, ...], result: tuple[int, ...]) -> _Dims:
    """The dims that a reshape keeps: as large, and after as many elements."""

    def starts(sizes: tuple[int, ...]) -> dict[tuple[int, int], int]:
        return {
            (math.prod(sizes[:dim]), size): dim
            for dim, size in enumerate(sizes)
            if size > 1
        }

    to = starts(result)
    return {dim: to[key] for key, dim in starts(shape).items() if key in to}
