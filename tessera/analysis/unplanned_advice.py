# SPDX-License-Identifier: Apache-2.0
"""Finds the layout to declare so that an unplanned all-gather is not in a program.

It is known in three cases. In any other there is no advice: which of several layouts is
meant, the program does not say.

result
    Only results of the program are gathered, so that they are whole as declared. Split
    over the gathered axis, they are what was computed.
argument
    An argument is gathered before anything reads it. Whole, it needs no gather.
value
    Each device takes another block of the gathered array: one axis splits the array
    before, and another axis another dim after. In between, both can split it: the
    devices then take their blocks first and gather only these.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from jax.sharding import PartitionSpec

from tessera.analysis.collective import Advice, Collective
from tessera.analysis.collective_reasons import SAME_ARRAY, Reasons
from tessera.analysis.dataflow import RESULT, Dataflow
from tessera.analysis.hlo_walk import Names, Node
from tessera.shard_spec import axes_of_dims, spec_of_axes

# Not a bitcast: that of a square array may transpose it.
_SAME_SHAPE = ("copy", "convert", "copy-start", "copy-done", "all-gather-done")


class NamedArray(NamedTuple):
    """An input of a program, or a result; its name is ``""`` where it is unknown."""

    name: str
    spec: PartitionSpec


class Advisor:
    """Finds advice for the unplanned collectives of one program.

    Args:
      flow: How values pass through the compiled program.
      reasons: Why its collectives are there.
      mesh_shape: Size of each axis of its mesh.
      inputs: What it takes, without what it does not read.
      results: What it returns.
    """

    def __init__(
        self,
        flow: Dataflow,
        reasons: Reasons,
        mesh_shape: Mapping[str, int],
        inputs: Sequence[NamedArray],
        results: Sequence[NamedArray],
    ) -> None:
        self._flow, self._reasons, self._shape = flow, reasons, mesh_shape
        entry = flow.module.computations[flow.module.entry]
        self._root = Node(((entry, entry.root),))
        self._inputs = inputs if len(inputs) == len(entry.parameters) else ()
        self._results = results if len(results) == len(entry.root.elements) else ()

    def advice(self, node: Node, row: Collective) -> Advice | None:
        """What avoids an unplanned collective; None where that is not known."""
        is_whole_axis = (
            len(row.axes) == 1 and self._shape.get(row.axes[0]) == row.group_size
        )
        gathered = node.instruction.attributes.get("dimensions", "").strip("{}")
        is_gather = row.kind == "all-gather" and gathered.isdecimal()
        if not is_gather or not is_whole_axis:
            return None
        dim = int(gathered)
        if len(row.arrays) > 1:  # combined: only of results the layouts are known
            return self._of_result(node, row, dim)
        if row.copies_whole:
            return self._of_value(node, row, dim)
        return self._of_result(node, row, dim) or self._of_argument(node, row, dim)

    def _of_result(self, node: Node, row: Collective, dim: int) -> Advice | None:
        if any(user.element != RESULT for user in self._reasons.users(node)):
            return None
        names, found = list[str](), set[PartitionSpec]()
        for (name, spec), rank in self._results_of[node.names]:
            if not name or not rank:
                return None
            axes = list(axes_of_dims(spec, rank))
            axes[dim] = (*axes[dim], *row.axes)
            names.append(name)
            found.add(spec_of_axes(axes))
        if len(found) != 1:
            return None
        return Advice("result", tuple(names), found.pop(), row.total_bytes)

    def _of_argument(self, node: Node, row: Collective, dim: int) -> Advice | None:
        array = self._origin(node.operands()[0])
        if not self._inputs or array is None or len(array.path) > 1:
            return None
        users = self._reasons.users(array)
        is_argument = array.instruction.opcode == "parameter"
        if not is_argument or any(user.names != node.names for user in users):
            return None
        name, spec = self._inputs[int(array.instruction.operands[0])]
        axes = list(axes_of_dims(spec, len(row.arrays[0].dims)))
        if axes[dim][-1:] != row.axes or not name:
            return None
        axes[dim] = axes[dim][:-1]
        return Advice("argument", (name,), spec_of_axes(axes), row.total_bytes)

    def _of_value(self, node: Node, row: Collective, dim: int) -> Advice | None:
        """The layout between two, of which one splits another dim over another axis."""
        before, slices = row.arrays[0].dims, list(self._reasons.users(node))
        after = {user.instruction.shapes[0].dims for user in slices}
        declared = self._reasons.declared_axes(row.source, before)
        axes = {axis for each in declared for axis in each}
        is_split_by_it_alone = self._reasons.over(node.operands()[0]) == {*row.axes}
        if len(after) != 1 or len(axes) != 1 or not is_split_by_it_alone:
            return None
        (own,), (axis,) = after, axes
        dims = [i for i, size in enumerate(before) if own[i] != size]
        size = self._shape[axis]
        if dims == [dim] or axis in row.axes or len(dims) != 1:
            return None
        if before[dims[0]] != own[dims[0]] * size:
            return None
        split = [tuple[str, ...]() for _ in before]
        split[dim], split[dims[0]] = row.axes, (axis,)
        saved = row.total_bytes - row.total_bytes // size
        return Advice("value", (), spec_of_axes(split), saved)

    @cached_property
    def _results_of(self) -> Mapping[Names, list[tuple[NamedArray, int]]]:
        """The results that each value is, and their ranks; 0 for one reshaped."""
        found = defaultdict[Names, list[tuple[NamedArray, int]]](list)
        for index, result in enumerate(self._results):
            element = index if self._root.instruction.is_tuple else None
            value = replace(self._root, element=element)
            origin, same = self._origin(value, SAME_ARRAY), self._origin(value)
            if origin is not None:
                is_same = same is not None and same.names == origin.names
                shapes = self._root.instruction.elements[index] if is_same else ()
                rank = len(shapes[0].dims) if len(shapes) == 1 else 0
                found[origin.names].append((result, rank))
        return found

    def _origin(
        self, node: Node, through: Collection[str] = _SAME_SHAPE
    ) -> Node | None:
        """What computes a value, behind some operations; None for several values."""
        while True:
            found = list(self._flow.definitions(node))
            if len(found) != 1:
                return None
            (node,) = found
            if node.instruction.opcode not in through:
                return node
            node = node.operands()[0]
