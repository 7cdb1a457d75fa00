# SPDX-License-Identifier: Apache-2.0
"""Finds why a collective is in a program: which declared layout implies it, if any.

A collective is *planned* for one of these reasons, which the ledger names:

written
    The program calls it: ``dist.all_reduce``, ``jax.lax.psum``, the collectives inside
    ``op.kernel``, of context and expert parallelism, and of pipelines.
sum
    It completes a sum, a maximum or a contraction over a dim that a layout splits: the
    gradient of a parameter over the axes that split the batch, a matmul whose
    contracted dim a layout splits, the loss of a batch. The axis splits an input of the
    computation, or appears in a layout declared inside or for a result. Over any other
    axis the partitioner has split the work by itself.
sharded storage
    It gathers an array that the program takes split over an axis, for a computation
    that another array splits over the same axis: the weights of ``fsdp``, gathered for
    a batch that ``fsdp`` splits too.
layout
    It moves a value from the layout in which it was computed to one that the program
    declares: a constraint, the argument of an SPMD region, or a result that is declared
    replicated while the arrays that it is computed from, element by element, are stored
    sharded (the parameters of ZeRO stage 1).

Every other collective is *unplanned*: the partitioner needed it because the declared
layouts do not fit each other, or because one is missing. A gather that replicates a
whole array only for each device to slice it again, which XLA calls an involuntary full
rematerialization, is unplanned whatever layouts asked for it.

The reasons are read from the compiled program, which no longer says what each layout
was for. They can err in one way: a gather at the line of a declared layout, or of an
operation beside it, of the same size and over the same axes, is taken for the declared
one.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tessera.analysis.asynchronous_fusions import AsynchronousFusions
from tessera.analysis.collective import Collective
from tessera.analysis.dataflow import RESULT, Dataflow, follow
from tessera.analysis.device_variance import Axes, DeviceVariance
from tessera.analysis.hlo import Shape
from tessera.analysis.hlo_walk import Node
from tessera.analysis.replica_groups import num_devices
from tessera.analysis.sharding_constraints import DeclaredLayout
from tessera.analysis.slice_programs import RUNTIME
from tessera.analysis.windowed_matmuls import windowed_kinds
from tessera.foundations.primitive_properties import SLICES

WRITTEN: Final = "written"
SUM: Final = "sum"
SHARDED_STORAGE: Final = "sharded storage"
LAYOUT: Final = "layout"

# JAX's names of collectives. The partitioner's have the name of what they serve.
_COLLECTIVES = re.compile(
    r"(psum|pmax|pmin|ppermute|pbroadcast|pvary|pcast|all_gather|all_to_all"
    r"|reduce_scatter|psum_scatter|ragged_all_to_all|unreduced_\w+)(_invariant|_reduced)?\d?"
)
# Operations that move data and sum nothing: an all-reduce of one stands for a copy.
_MOVES = SLICES | {"copy", "reshape", "rev"}

# fmt: off
SAME_ARRAY = (
    "copy", "bitcast", "convert", "reshape", "transpose", "reduce-precision",
    "copy-start", "copy-done", "all-gather-done", "collective-permute-done",
)
_SLICES = ("slice", "slice-start", "slice-done")
_PART_OF_ARRAY = (
    *SAME_ARRAY, *_SLICES, "dynamic-slice", "all-gather", "collective-permute",
    "collective-permute-start",
)
# A TPU copies an array to its fast memory in parts, and names them together again.
_JOINS = 'custom_call_target="ConcatBitcast"'
_CONTRACTIONS = ("dot", "convolution", "reduce", "reduce-window", "custom-call")
_STOPS = (*_CONTRACTIONS, "parameter")
_SAME_SUMS = (
    *SAME_ARRAY, *_SLICES, "concatenate", "add", "subtract", "multiply", "divide",
    "negate",
)
# fmt: on
_SUMS = ("all-reduce", "reduce-scatter")


@dataclass(frozen=True)
class BoundaryAxes:
    """The axes that each input of a program, and each of its results, is split over."""

    inputs: Sequence[Axes]
    outputs: Sequence[Axes]


class Reasons:
    """Finds the reason of each collective of one program.

    Args:
      flow: How values pass through the compiled program.
      mesh_shape: Size of each axis of the mesh that it was compiled for.
      boundary: The layouts of its inputs and results. Without them, as where there is
        only the text of a program, every sum is planned.
      declared: The layouts that the program declares inside.
    """

    def __init__(
        self,
        flow: Dataflow,
        mesh_shape: Mapping[str, int],
        boundary: BoundaryAxes | None,
        declared: Collection[DeclaredLayout],
    ) -> None:
        inputs = boundary.inputs if boundary else ()
        self._declared = declared
        self._shape = mesh_shape
        self._flow = flow
        self._variance = DeviceVariance(flow, mesh_shape, inputs)
        # Differences that come from split inputs, not from slices in the program.
        self._stored = DeviceVariance(flow, mesh_shape, inputs, by_rank=False)
        self._windowed = windowed_kinds(flow.module)
        self._fusions = AsynchronousFusions(flow.nodes)
        self._summed: Axes | None = None
        if boundary is not None and self._variance.has_input_layouts:
            axes = [*(each.axes for each in declared), *boundary.outputs]
            self._summed = frozenset[str]().union(*axes)

    def copies_whole(self, node: Node, row: Collective) -> bool:
        """Whether XLA replicates an array for devices that each slice it again."""
        if row.kind != "all-gather" or _is_written(row):
            return False
        return self.keeps_slice(node)

    def keeps_slice(self, node: Node) -> bool:
        """Whether each device keeps its own part of the result, and nothing else."""
        readers = list(self.users(node))
        return bool(readers) and all(self._slices_by_rank(reader) for reader in readers)

    def reason(self, node: Node, row: Collective) -> str:
        """Why a collective is there; ``""`` where no declared layout implies it.

        Args:
          node: The collective.
          row: Its row in the ledger.
        """
        axes = frozenset(row.axes)
        if _is_written(row):
            return WRITTEN
        kind = row.kind
        if kind == "collective-permute":
            metadata = node.instruction.attributes.get("metadata", "")
            kind = self._windowed.get(metadata, kind)
        if kind in _SUMS:
            is_sum = not _only_moves(row) or self._adds_partial_sums(node)
            return SUM if is_sum and self._is_split_sum(node, axes) else ""
        if kind == "all-gather" and self._gathers_storage(node, axes):
            return SHARDED_STORAGE
        if kind == "all-gather" and self._gathers_sum(node):
            return SUM
        if self.declaration(node, row) or self._is_new_state(node, axes):
            return LAYOUT
        return ""

    def declaration(self, node: Node, row: Collective) -> str | None:
        """The line that declares a layout for what is moved; None if there is none.

        It is that of the collective where several lines declare it.
        """
        declared = [each for each in self._declared if row.source in each.lines]
        lines_by_array = [
            {each.line for each in declared if self._leads_to(each, array, node, row)}
            for array in row.arrays
        ]
        if not all(lines_by_array):
            return None
        lines = set[str]().union(*lines_by_array)
        return lines.pop() if len(lines) == 1 else row.source

    def declared_axes(self, line: str, shape: tuple[int, ...]) -> set[Axes]:
        """The axes over which a line splits arrays of a global shape."""
        declared = [d for d in self._declared if line in d.lines and d.shape == shape]
        return {each.axes for each in declared}

    def _leads_to(
        self, declared: DeclaredLayout, array: Shape, node: Node, row: Collective
    ) -> bool:
        """Whether a collective may bring an array nearer to a declared layout."""
        over, axes = self.over(node), frozenset(row.axes)
        if not declared.axes <= over:
            return False
        # It may still be split over axes that the next step gathers.
        size = math.prod(declared.shape)
        sizes = {size // self._devices(declared.axes), size // self._devices(over)}
        if math.prod(array.dims) not in sizes:
            return False
        if row.kind == "all-gather":
            return not axes & declared.axes and self._is_about(declared, array, node)
        # What moves to other devices is split there as declared.
        return axes <= declared.axes and not _only_moves(row)

    def _is_about(self, declared: DeclaredLayout, array: Shape, node: Node) -> bool:
        """Whether the gathered dim can be one that the declaration is about."""
        gathered = int(node.instruction.attributes["dimensions"].strip("{}"))
        extent = array.dims[gathered]
        devices = self._devices(self.over(node))
        dims = {
            dim
            for dim, size in enumerate(declared.shape)
            if size >= extent > 0 == size % extent and devices % (size // extent) == 0
        }
        return not dims or bool(dims & declared.dims)

    def over(self, node: Node) -> Axes:
        """The mesh axes over which a value differs between devices."""
        return self._variance.over(replace(node, element=None))

    def _devices(self, axes: Axes) -> int:
        return num_devices(axes, self._shape)

    def _is_split_sum(self, node: Node, axes: Axes) -> bool:
        """Whether layouts split what is summed, and not the partitioner by itself."""
        if self._summed is None:
            return True
        return all(
            axes <= self._summed | self._stored.over(operand)
            for operand in node.operands()
        )

    def _adds_partial_sums(self, node: Node) -> bool:
        """Whether it adds what devices computed, whatever the name says of it.

        XLA may give a sum the name of what stores it.
        """

        def behind(value: Node) -> Iterator[Node] | None:
            if value.instruction.opcode not in _SAME_SUMS:
                return None
            return self._flow.definitions(*value.operands())

        operands = self._flow.definitions(*node.operands())
        sources = {each.instruction.opcode for each in follow(operands, behind)}
        return sources <= {*_CONTRACTIONS, "constant"} and bool(sources)

    def _gathers_storage(self, node: Node, axes: Axes) -> bool:
        """Whether inputs are gathered for what something else splits over the axis."""
        stored = all(
            any(axes <= self.over(array) for array in self._inputs(operand))
            for operand in node.operands()
        )
        users = self._combined(node)
        return stored and any(axes & self.over(u) for u in users)

    def _gathers_sum(self, node: Node) -> bool:
        """Whether it is the last part of a sum over several slices."""

        def behind(value: Node) -> Iterator[Node] | None:
            is_part = value.instruction.opcode in _PART_OF_ARRAY
            return self._flow.definitions(value.operands()[0]) if is_part else None

        sums = follow(self._flow.definitions(*node.operands()), behind)
        return all(RUNTIME in each.instruction.tail for each in sums)

    def _is_new_state(self, node: Node, axes: Axes) -> bool:
        """Whether results are gathered that come from arrays stored sharded."""
        if not any(user.element == RESULT for user in self.users(node)):
            return False
        return all(
            any(
                axes <= self.over(array) and _size(array) == _size(operand)
                for array in self._inputs(operand, combined=True)
            )
            for operand in node.operands()
        )

    def _inputs(self, node: Node, *, combined: bool = False) -> Iterator[Node]:
        """Inputs of the program that a value is computed from.

        Args:
          node: The value.
          combined: Whether to look behind what combines several arrays element by
            element, too; else there is one at most.
        """

        def behind(value: Node) -> Iterator[Node] | list[Node] | None:
            opcode, operands = value.instruction.opcode, value.operands()
            if opcode == "parameter":
                return None
            if opcode in _PART_OF_ARRAY or _JOINS in value.instruction.tail:
                return self._flow.definitions(operands[0])
            if opcode == "dynamic-update-slice":
                # What a loop stores for the backward pass, one layer after the other.
                return self._flow.definitions(operands[1])
            if opcode in _STOPS:
                return []
            every = self._flow.definitions(*operands)
            arrays = [each for each in every if not _is_number(each)]
            return arrays if combined or len(arrays) == 1 else []

        return follow(self._flow.definitions(node), behind)

    def users(self, node: Node) -> Iterator[Node]:
        """The operations that read an array, in whatever form."""

        def after(user: Node) -> Iterator[Node] | None:
            is_same = user.instruction.opcode in SAME_ARRAY and user.element != RESULT
            return self._flow.uses(user) if is_same else None

        return follow(self._flow.uses(self._fusions.end(node)), after)

    def _combined(self, node: Node) -> Iterator[Node]:
        """What is computed from an array, up to the first that mixes its elements."""
        waiting, seen = [node], set()
        while waiting:
            for user in self.users(waiting.pop()):
                is_end = user.element == RESULT or self._slices_by_rank(user)
                if user.key in seen or is_end:
                    continue
                seen.add(user.key)
                yield user
                if user.instruction.opcode not in _STOPS:
                    waiting.append(user)

    def _slices_by_rank(self, user: Node) -> bool:
        """Whether an operation takes the block of an array that is its own device's."""
        if user.instruction.opcode != "dynamic-slice" or user.element == RESULT:
            return False
        return any(self.over(index) for index in user.operands()[1:])


def _is_written(row: Collective) -> bool:
    """Whether the program calls it, and not only what it serves."""
    return all(map(_COLLECTIVES.fullmatch, _primitives(row.op_name)))


def _only_moves(row: Collective) -> bool:
    return all(name in _MOVES for name in _primitives(row.op_name))


def _primitives(op_name: str) -> list[str]:
    """The operations that a name stack ends in: one, or one for each that XLA combined.

    Example:
      >>> _primitives("jit(step)/(mlp/reduce_sum:shard_map/psum)")
      ['reduce_sum', 'psum']
    """
    return [part.rpartition("/")[2].strip("()") for part in op_name.split(":")]


def _is_number(node: Node) -> bool:
    """Whether it is a constant, or one number for all elements, such as a scale."""
    opcode = node.instruction.opcode
    if opcode == "broadcast":
        return _is_number(node.operands()[0])
    return opcode == "constant" or not node.instruction.shapes[0].dims


def _size(node: Node) -> int:
    return math.prod(node.instruction.shapes[0].dims)
