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
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from jax.sharding import NamedSharding, PartitionSpec

from tessera.foundations.primitive_properties import BROADCASTS, CASTS, COPIES, RESHAPES
from tessera.jax_compat import jaxprs, primitives
from tessera.shard_spec import axes_of_dims

# Operations that change the shape or dtype of an array and not its device: a layout on
# one side of one may be satisfied on the other.
_FORMS = COPIES | CASTS | RESHAPES | BROADCASTS

# Dims of an array -> the dims of a declared value that they are.
_Dims: TypeAlias = Mapping[int, int]
# Equations by their numbers, each with the number of a program in it; all contain the
# next, and the last one a program. A variable may be in several: JAX traces once what
# is called twice.
_Scope: TypeAlias = tuple[tuple[int, int], ...]
_Value: TypeAlias = tuple[_Scope, Any]


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


def declared_layouts(program: jaxprs.Program) -> frozenset[DeclaredLayout]:
    """Every layout declared inside a program, nested programs included.

    Args:
      program: The jaxpr of a step, its backward pass included.
    """
    values = _Values(program)
    return frozenset(
        layout
        for scope, eqn in values.equations
        for value, spec in _declarations(eqn)
        for layout in _movable(values, scope, eqn, value, spec)
    )


def spec_axes(spec: PartitionSpec) -> frozenset[str]:
    """The mesh axes that a spec splits an array over.

    Example:
      >>> sorted(spec_axes(PartitionSpec(("dp", "fsdp"), None, "tp")))
      ['dp', 'fsdp', 'tp']
    """
    entries = [entry for entry in spec if isinstance(entry, (str, tuple))]
    names = [(entry,) if isinstance(entry, str) else entry for entry in entries]
    return frozenset(axis for entry in names for axis in entry)


def _declarations(eqn: jaxprs.Equation) -> Iterator[tuple[Any, PartitionSpec]]:
    if (sharding := primitives.constraint(eqn)) is not None:
        # JAX inserts reshard by itself, too, where it moves nothing.
        is_jaxs = eqn.primitive.name == "reshard" and not sharding.mesh.explicit_axes
        if isinstance(sharding, NamedSharding) and not is_jaxs:
            yield eqn.invars[0], sharding.spec
    elif jaxprs.is_shard_map(eqn):
        region = primitives.region(eqn)
        yield from zip(eqn.invars, region.in_specs, strict=True)
        yield from zip(eqn.outvars, region.out_specs, strict=True)


def _movable(
    values: "_Values",
    scope: _Scope,
    eqn: jaxprs.Equation,
    value: Any,
    spec: PartitionSpec,
) -> Iterator[DeclaredLayout]:
    """The arrays that one declaration may move."""
    own, shape = jaxprs.source_line(eqn), tuple(value.aval.shape)
    lines = {own} | values.lines_after([(scope, out) for out in eqn.outvars])
    identity = {dim: dim for dim in range(len(shape))}
    arrays: list[tuple[tuple[int, ...], _Dims, set[str]]] = [(shape, identity, set())]
    for inside, writer, dims in values.before((scope, value), identity):
        lines.add(jaxprs.source_line(writer))
        for index, operand in enumerate(writer.invars):
            if own_dims := _composed(_dims_in_result(writer, index), dims):
                before = values.before((inside, operand), {})
                own_lines = {jaxprs.source_line(each) for _, each, _ in before}
                arrays.append((tuple(operand.aval.shape), own_dims, own_lines))
    split = axes_of_dims(spec, len(shape))
    for moved, dims, more_lines in arrays:
        axes = frozenset(axis for dim in dims.values() for axis in split[dim])
        every_line = frozenset(lines | more_lines)
        yield DeclaredLayout(own, every_line, moved, axes, frozenset(dims))


class _Values:
    """The values of a program and of its nested programs, and which are the same.

    Attributes:
      equations: Every equation, with its scope.
    """

    def __init__(self, program: jaxprs.Program) -> None:
        self.equations: list[tuple[_Scope, jaxprs.Equation]] = []
        self._writers: dict[_Value, jaxprs.Equation] = {}
        self._readers = defaultdict[_Value, list[jaxprs.Equation]](list)
        # The same value elsewhere: in an enclosing program, in a nested one, or in
        # another iteration of a loop; where it comes from, and where it goes.
        self._earlier = defaultdict[_Value, list[_Value]](list)
        self._later = defaultdict[_Value, list[_Value]](list)
        self._add(program, ())

    def before(
        self, value: _Value, dims: _Dims
    ) -> Iterator[tuple[_Scope, jaxprs.Equation, _Dims]]:
        """The operation that computes a value, and those that change its form.

        Each comes with the dims of its result that are dims of the value. Calls of a
        program are included without any dims, and so are the operations inside.
        """
        waiting, seen = [(value, dims)], set[_Value]()
        while waiting:
            value, dims = waiting.pop()
            if isinstance(value[1], jaxprs.Literal) or value in seen:
                continue
            seen.add(value)
            scope, eqn, same = value[0], self._writers.get(value), self._earlier[value]
            waiting += [(each, dims) for each in same]
            if eqn is not None:
                yield scope, eqn, {} if same else dims
                if not same and eqn.primitive.name in _FORMS:
                    own_dims = _composed(_dims_in_result(eqn, 0), dims)
                    waiting.append(((scope, eqn.invars[0]), own_dims))

    def lines_after(self, values: Iterable[_Value]) -> set[str]:
        """The lines of the operations that read some values, in any shape or dtype."""
        lines, seen, waiting = set[str](), set[_Value](), list(values)
        while waiting:
            value = waiting.pop()
            if value in seen:
                continue
            seen.add(value)
            waiting += self._later[value]
            for eqn in self._readers[value]:
                lines.add(jaxprs.source_line(eqn))
                if eqn.primitive.name in _FORMS:
                    waiting += [(value[0], out) for out in eqn.outvars]
        return lines

    def _add(self, program: jaxprs.Program, scope: _Scope) -> None:
        for number, eqn in enumerate(jaxprs.equations(program)):
            self.equations.append((scope, eqn))
            self._writers.update({(scope, out): eqn for out in eqn.outvars})
            for value in eqn.invars:
                if not isinstance(value, jaxprs.Literal):
                    self._readers[scope, value].append(eqn)
            for index, inner in enumerate(jaxprs.inner_programs(eqn)):
                inside = (*scope, (number, index))
                self._add(inner, inside)
                self._connect(eqn, scope, inner, inside)

    def _connect(
        self,
        eqn: jaxprs.Equation,
        outer: _Scope,
        program: jaxprs.Program,
        inner: _Scope,
    ) -> None:
        """Note which values of a nested program are which of the equation that runs it.

        An SPMD region has blocks inside, not what it takes and returns: a search may
        leave a region, and does not enter it.
        """
        inputs, outputs = jaxprs.inputs(program), jaxprs.outputs(program)
        returns = len(outputs) == len(eqn.outvars)
        enters = returns and not jaxprs.is_shard_map(eqn)
        # Of a loop or a branch, the last operands are the inputs.
        pairs = zip(reversed(eqn.invars), reversed(inputs), strict=False)
        for operand, value in pairs:
            self._earlier[inner, value].append((outer, operand))
            if enters and not isinstance(operand, jaxprs.Literal):
                self._later[outer, operand].append((inner, value))
        for result, value in zip(eqn.outvars, outputs, strict=False) if returns else ():
            if enters:
                self._earlier[outer, result].append((inner, value))
            if not isinstance(value, jaxprs.Literal):
                self._later[inner, value].append((outer, result))
        for before, after in _carried(eqn, program):
            self._earlier[inner, before].append((inner, after))
            if not isinstance(after, jaxprs.Literal):
                self._later[inner, after].append((inner, before))


def _carried(eqn: jaxprs.Equation, body: jaxprs.Program) -> Iterator[tuple[Any, Any]]:
    """The inputs of a loop's body that its previous iteration outputs, and those."""
    inputs, outputs = jaxprs.inputs(body), jaxprs.outputs(body)
    if eqn.primitive.name == "scan":
        consts, count = jaxprs.scan_sizes(eqn)
        yield from zip(inputs[consts:][:count], outputs, strict=False)
    elif eqn.primitive.name == "while" and body is primitives.while_loop(eqn).body:
        first = len(inputs) - len(outputs)
        yield from zip(inputs[first:], outputs, strict=True)


# --- dims


def _composed(first: _Dims, second: _Dims) -> _Dims:
    return {dim: second[to] for dim, to in first.items() if to in second}


def _dims_in_result(eqn: jaxprs.Equation, index: int) -> _Dims:
    """The dims of an operand that are dims of the result, such as a matmul's rows.

    Dims that the operation sums over, or splits, are not among them.
    """
    shape = tuple(getattr(eqn.invars[index].aval, "shape", ()))
    result = tuple(getattr(eqn.outvars[0].aval, "shape", ()))
    match eqn.primitive.name:
        case "dot_general":
            return _dims_in_product(eqn, index)
        case "transpose":
            return {dim: to for to, dim in enumerate(primitives.permutation(eqn))}
        case "broadcast_in_dim":
            dims = enumerate(primitives.broadcast_dims(eqn))
            return {dim: to for dim, to in dims if shape[dim] == result[to]}
        case "reshape":
            return _dims_in_reshape(shape, result)
        case "concatenate":
            along = primitives.dim_along(eqn)
            return {dim: dim for dim in range(len(shape)) if dim != along}
    if (removed := primitives.removed_dims(eqn)) is not None:
        return _without(len(shape), removed)
    return {dim: dim for dim in range(len(shape))} if shape == result else {}


def _without(rank: int, removed: Collection[int]) -> _Dims:
    """The dims of an array of which an operation removes some."""
    return {dim: i for i, dim in enumerate(d for d in range(rank) if d not in removed)}


def _dims_in_product(eqn: jaxprs.Equation, index: int) -> _Dims:
    """The result of a matmul has its batch dims first, then those of either operand."""
    contracted, batch = primitives.dot_dims(eqn)
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
