# SPDX-License-Identifier: Apache-2.0
"""Why a collective is in a program: which declared layout implies it, if any does.

A collective is *planned* for one of these reasons, which the ledger names:

written
    The program says it: ``dist.all_reduce``, ``jax.lax.psum``, the collectives inside
    ``op.kernel``, of context and expert parallelism, and of pipelines.
sum
    It completes a sum, a maximum or a contraction over a dim that a layout splits: the
    gradient of a parameter over the axes that split the batch, the matmul whose
    contracted dim a layout splits, the loss of a batch. The axis is one that splits an
    input it is computed from, or one that a layout inside or of a result names. Over
    any other axis the partitioner has split the work by itself.
stored split
    It brings together an array that the program takes split over an axis, for a
    computation that another array splits over the same axis: the weights of ``fsdp``,
    gathered for a batch that ``fsdp`` splits too.
layout
    It takes a value from the layout in which it was computed to one that the program
    declares: a constraint, the argument of a manual region, or a result that is
    declared whole while the arrays that it is computed from, element by element, are
    stored split (the parameters of ZeRO stage 1).

Everything else is *unplanned*: the partitioner needed it because the declared layouts
do not fit each other, or because one is missing. So is a gather that copies a whole
array to every device only to cut it again, which XLA calls an involuntary full
rematerialization, whatever layouts asked for it.

The reasons are read from the compiled program, which no longer says what each layout
was for. They can err in one way: a gather at the line of a declared layout, or of an
operation beside it, of the same size and the same axes, is taken to be the one that was
declared.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tessera.analysis.collective import Collective
from tessera.analysis.dataflow import RESULT, Dataflow, Node
from tessera.analysis.device_variance import Axes, Varying
from tessera.analysis.hlo import Module, Shape
from tessera.analysis.sharding_constraints import DeclaredLayout
from tessera.primitive_properties import SLICES

WRITTEN = "written"
SUM = "sum"
STORED_SPLIT = "stored split"
LAYOUT = "layout"

# JAX's names of collectives. The partitioner's carry the name of what they serve.
_COLLECTIVES = re.compile(
    r"(psum|pmax|pmin|ppermute|pbroadcast|pvary|pcast|all_gather|all_to_all"
    r"|reduce_scatter|psum_scatter|ragged_all_to_all|unreduced_\w+)(_invariant|_reduced)?\d?"
)
# Operations that move data and sum nothing: an all-reduce of one stands for a copy.
_MOVES = SLICES | {"copy", "reshape", "rev"}

_SAME_ARRAY = (
    *("copy", "bitcast", "convert", "reshape", "transpose", "reduce-precision"),
    *("copy-start", "copy-done", "all-gather-done", "collective-permute-done"),
)
_PART_OF_ARRAY = (*_SAME_ARRAY, "slice", "dynamic-slice")
_STOPS = ("dot", "convolution", "reduce", "reduce-window", "custom-call", "parameter")


@dataclass(frozen=True)
class Ends:
    """The axes that each input of a program, and each of its results, is split over."""

    inputs: Sequence[Axes]
    outputs: Sequence[Axes]


class Reasons:
    """Finds the reason of each collective of one program.

    Args:
      module: The compiled program.
      mesh_shape: Size of each axis of the mesh that it was compiled for.
      ends: The layouts of its inputs and results. Without them, as where there is only
        the text of a program, every sum is planned.
      declared: The layouts that the program declares inside.
    """

    def __init__(
        self,
        module: Module,
        mesh_shape: Mapping[str, int],
        ends: Ends | None,
        declared: Collection[DeclaredLayout],
    ) -> None:
        inputs = ends.inputs if ends else ()
        self._declared = declared
        self._shape = mesh_shape
        self._flow = Dataflow(module)
        self._varying = Varying(module, mesh_shape, inputs)
        # What differs because an input is split, and not because the program cuts it.
        self._stored = Varying(module, mesh_shape, inputs, by_rank=False)
        self._summed: Axes | None = None
        if ends is not None and self._varying.knows_inputs:
            axes = [*(each.axes for each in declared), *ends.outputs]
            self._summed = frozenset[str]().union(*axes)

    def copies_whole(self, node: Node, row: Collective) -> bool:
        """Whether XLA gives an array whole to devices that each cut it again."""
        if row.kind != "all-gather" or _is_written(row):
            return False
        readers = list(self._users(node))
        return bool(readers) and all(self._cuts(reader) for reader in readers)

    def reason(self, node: Node, row: Collective) -> str:
        """Why a collective is there; ``""`` where no declared layout implies it.

        Args:
          node: The collective.
          row: What else is known of it.
        """
        axes = frozenset(row.axes)
        if _is_written(row):
            return WRITTEN
        if row.kind in ("all-reduce", "reduce-scatter"):
            moves = all(name in _MOVES for name in _primitives(row.op_name))
            return "" if moves or not self._is_split_sum(node, axes) else SUM
        if row.kind == "all-gather" and self._is_stored_split(node, axes):
            return STORED_SPLIT
        if self.declaration(node, row) or self._is_new_state(node, axes):
            return LAYOUT
        return ""

    def declaration(self, node: Node, row: Collective) -> str | None:
        """The line that declares a layout for what is moved; None if there is none.

        It is that of the collective where several lines declare it.
        """
        declared = [each for each in self._declared if row.source in each.lines]
        found = [
            {each.line for each in declared if self._leads_to(each, array, node, row)}
            for array in row.arrays
        ]
        if not all(found):
            return None
        lines = set[str]().union(*found)
        return lines.pop() if len(lines) == 1 else row.source

    def _leads_to(
        self, declared: DeclaredLayout, array: Shape, node: Node, row: Collective
    ) -> bool:
        """Whether a collective may be a step on an array's way to a declared layout."""
        over, axes = self._over(node), frozenset(row.axes)
        if not declared.axes <= over:
            return False
        # On its way it may still be split over axes that the next step gathers.
        size = math.prod(declared.shape)
        sizes = {size // self._devices(declared.axes), size // self._devices(over)}
        if math.prod(array.dims) not in sizes:
            return False
        if row.kind == "all-gather":
            return not axes & declared.axes and self._is_about(declared, array, node)
        # What moves to other devices is split there as declared.
        moves = any(name in _MOVES for name in _primitives(row.op_name))
        return axes <= declared.axes and not moves

    def _is_about(self, declared: DeclaredLayout, array: Shape, node: Node) -> bool:
        """Whether the dim that is gathered can be one that is declared."""
        place = int(node.instruction.attributes["dimensions"].strip("{}"))
        extent, devices = array.dims[place], self._devices(self._over(node))
        dims = {
            dim
            for dim, size in enumerate(declared.shape)
            if size >= extent > 0 == size % extent and devices % (size // extent) == 0
        }
        return not dims or bool(dims & declared.dims)

    def _devices(self, axes: Axes) -> int:
        return math.prod(self._shape.get(axis, 1) for axis in axes)

    def _is_split_sum(self, node: Node, axes: Axes) -> bool:
        """Whether layouts split what is summed, and not the partitioner by itself."""
        if self._summed is None:
            return True
        return all(
            axes <= self._summed | self._stored.over(n.computation, n.instruction)
            for n in self._operands(node)
        )

    def _is_stored_split(self, node: Node, axes: Axes) -> bool:
        """Whether inputs are gathered for what something else splits over the axis."""
        stored = all(
            any(axes <= self._over(found) for found in self._inputs(operand))
            for operand in self._operands(node)
        )
        return stored and any(axes & self._over(user) for user in self._combined(node))

    def _is_new_state(self, node: Node, axes: Axes) -> bool:
        """Whether results are gathered that stored split arrays were computed into."""
        if not any(user.element == RESULT for user in self._users(node)):
            return False
        return all(
            any(
                axes <= self._over(found) and _size(found) == _size(operand)
                for found in self._inputs(operand, combined=True)
            )
            for operand in self._operands(node)
        )

    def _over(self, node: Node) -> Axes:
        return self._varying.over(node.computation, node.instruction)

    def _operands(self, node: Node) -> list[Node]:
        return [node.beside(name) for name in node.instruction.operands]

    def _inputs(self, node: Node, *, combined: bool = False) -> Iterator[Node]:
        """Inputs of the program that a value is computed from.

        Args:
          node: The value.
          combined: Whether to look behind what combines several arrays element by
            element, too; else there is one at most.
        """
        waiting, seen = list(self._flow.written(node)), set()
        while waiting:
            found = waiting.pop()
            if found.key in seen:
                continue
            seen.add(found.key)
            opcode = found.instruction.opcode
            if opcode == "parameter":
                yield found
            elif opcode in _PART_OF_ARRAY or opcode == "all-gather":
                waiting.extend(self._written(found, 0))
            elif opcode == "dynamic-update-slice":
                # What a loop keeps for the backward pass, one layer after the other.
                waiting.extend(self._written(found, 1))
            elif opcode not in _STOPS:
                operands = [
                    o for o in self._flow.operands(found) if not _is_constant(o)
                ]
                waiting.extend(operands if combined or len(operands) == 1 else ())

    def _written(self, node: Node, operand: int) -> Iterator[Node]:
        yield from self._flow.written(node.beside(node.instruction.operands[operand]))

    def _users(self, node: Node) -> Iterator[Node]:
        """The operations that read an array, in whatever form it is kept."""
        waiting, seen = [node], set()
        while waiting:
            for user in self._flow.read(waiting.pop()):
                if user.key in seen:
                    continue
                seen.add(user.key)
                if user.instruction.opcode in _SAME_ARRAY and user.element != RESULT:
                    waiting.append(user)
                else:
                    yield user

    def _combined(self, node: Node) -> Iterator[Node]:
        """What is computed from an array, up to the first that mixes its elements."""
        waiting, seen = [node], set()
        while waiting:
            for user in self._users(waiting.pop()):
                if user.key in seen or user.element == RESULT or self._cuts(user):
                    continue
                seen.add(user.key)
                yield user
                if user.instruction.opcode not in _STOPS:
                    waiting.append(user)

    def _cuts(self, user: Node) -> bool:
        """Whether an operation takes the part of an array that is its own device's."""
        if user.instruction.opcode != "dynamic-slice" or user.element == RESULT:
            return False
        return any(
            self._varying.over(user.computation, index)
            for index in user.computation.sources(user.instruction)[1:]
        )


def _is_written(row: Collective) -> bool:
    """Whether the program says it, and not only what it serves."""
    return all(map(_COLLECTIVES.fullmatch, _primitives(row.op_name)))


def _primitives(op_name: str) -> list[str]:
    """The operations that a name stack ends in: one, or one for each that XLA combined.

    Example:
      >>> _primitives("jit(step)/(mlp/reduce_sum:shard_map/psum)")
      ['reduce_sum', 'psum']
    """
    return [part.rpartition("/")[2].strip("()") for part in op_name.split(":")]


def _is_constant(node: Node) -> bool:
    opcode = node.instruction.opcode
    if opcode == "broadcast":
        return _is_constant(node.beside(node.instruction.operands[0]))
    return opcode == "constant"


def _size(node: Node) -> int:
    return math.prod(node.instruction.shapes[0].dims)
