# SPDX-License-Identifier: Apache-2.0
"""The places in a program where a layout is declared for a value in the middle of it.

These are the layouts of ``with_sharding_constraint``, which a ``ShardSpec`` or a rule
table of a model becomes, and those that a manual region takes its arguments in and
gives its results in.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from tessera import _jax

# What changes the form of an array and not its place: a layout on one side of it may be
# made on the other.
_FORMS = (
    "convert_element_type",
    "reshape",
    "transpose",
    "squeeze",
    "broadcast_in_dim",
    "copy",
    "optimization_barrier",
)


@dataclass(frozen=True, slots=True)
class DeclaredLayout:
    """A layout that a program asks for where it uses a value.

    Attributes:
      axes: The mesh axes that it splits the value over.
      size: Elements on one device.
      lines: ``file:line`` of the declaration, of the operation before it and of those
        after it: the partitioner moves the array at any of them.
    """

    axes: frozenset[str]
    size: int
    lines: frozenset[str]


def declared_layouts(
    program: _jax.Program, mesh_shape: Mapping[str, int]
) -> frozenset[DeclaredLayout]:
    """Every layout declared inside a program, nested programs included.

    Args:
      program: The jaxpr of a step, its backward pass included.
      mesh_shape: Size of each mesh axis.
    """
    return frozenset(_inside(program, mesh_shape))


def _inside(
    program: _jax.Program, mesh_shape: Mapping[str, int]
) -> Iterator[DeclaredLayout]:
    every = _jax.equations(program)
    writers = {out: eqn for eqn in every for out in eqn.outvars}
    readers: dict[Any, list[Any]] = {}
    for eqn in every:
        for value in eqn.invars:
            if not isinstance(value, _jax.Literal):
                readers.setdefault(value, []).append(eqn)
    for eqn in every:
        for value, spec in _declarations(eqn):
            own = {_jax.source_line(eqn)}
            lines = own | _before(value, writers) | _after(eqn.outvars, readers)
            axes = spec_axes(spec)
            held = math.prod(mesh_shape.get(axis, 1) for axis in axes)
            size = math.prod(value.aval.shape) // held
            yield DeclaredLayout(axes, size, frozenset(lines))
        for inner in _jax.inner_programs(eqn):
            yield from _inside(inner, mesh_shape)


def _declarations(eqn: _jax.Equation) -> Iterator[tuple[Any, PartitionSpec]]:
    if eqn.primitive.name == "sharding_constraint":
        spec = getattr(eqn.params["sharding"], "spec", None)
        if spec is not None:
            yield eqn.invars[0], spec
    elif _jax.is_manual_region(eqn):
        yield from zip(eqn.invars, eqn.params["in_specs"], strict=True)
        yield from zip(eqn.outvars, eqn.params["out_specs"], strict=True)


def spec_axes(spec: PartitionSpec) -> frozenset[str]:
    """The mesh axes that a spec splits an array over.

    Example:
      >>> sorted(spec_axes(PartitionSpec(("dp", "fsdp"), None, "tp")))
      ['dp', 'fsdp', 'tp']
    """
    entries = [entry for entry in spec if isinstance(entry, (str, tuple))]
    names = [(entry,) if isinstance(entry, str) else entry for entry in entries]
    return frozenset(axis for entry in names for axis in entry)


def _before(value: Any, writers: Mapping[Any, _jax.Equation]) -> set[str]:
    lines: set[str] = set()
    while not isinstance(value, _jax.Literal) and value in writers:
        eqn = writers[value]
        lines.add(_jax.source_line(eqn))
        if eqn.primitive.name not in _FORMS:
            break
        value = eqn.invars[0]
    return lines


def _after(values: list[Any], readers: Mapping[Any, list[_jax.Equation]]) -> set[str]:
    lines: set[str] = set()
    waiting = list(values)
    while waiting:
        for eqn in readers.get(waiting.pop(), ()):
            lines.add(_jax.source_line(eqn))
            if eqn.primitive.name in _FORMS:
                waiting.extend(eqn.outvars)
    return lines
