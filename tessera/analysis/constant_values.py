# SPDX-License-Identifier: Apache-2.0
"""Evaluates what a compiled program computes from constants and loop counters alone.

That tells how long its loops are, and how often each branch of a conditional is taken:
causal attention, for example, skips pairs of blocks by their numbers. Everything else
is unknown, and so is what depends on it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Final

import numpy as np

from tessera.analysis.constant_operations import evaluate, is_row_major, known_array
from tessera.analysis.execution_lanes import Lanes
from tessera.analysis.hlo import Computation, Instruction, Module, Shape
from tessera.analysis.hlo_walk import trip_count
from tessera.analysis.value_origins import SAME, Index, Origins

_MAX_ELEMENTS: Final = 2**22
_LONGEST_LOOP: Final = 2**16
_PROBES: Final = np.array([0, 1, 7])


class Frame:
    """A computation as it is executed from one place.

    A lane is one execution: each iteration of a loop has its own.

    Args:
      module: The program.
      computation: What is executed.
      lanes: How often.
      caller: What executes it, with its frame; None for the entry.
      number: Of a branch, its number.
    """

    def __init__(
        self,
        module: Module,
        computation: Computation,
        lanes: Lanes,
        caller: "tuple[Frame, Instruction] | None" = None,
        number: int = 0,
    ) -> None:
        self.module, self.computation, self.caller = module, computation, caller
        self.lanes, self.number = lanes, number
        self.origins = caller[0].origins if caller else Origins(module)
        self._known: dict[tuple[str, Index], np.ndarray | None] = {}
        self._loops: dict[str, _Carried] = {}
        self._inputs: Mapping[str, np.ndarray] = {}
        self._assumes = caller[0]._assumes if caller else False
        self._again: dict[tuple[tuple[int, ...] | None, bool], Frame] = {}

    @classmethod
    def entry(
        cls,
        module: Module,
        inputs: Mapping[str, np.ndarray] | None = None,
        partitions: Sequence[int] | None = None,
    ) -> "Frame":
        """The frame of the whole program.

        Args:
          module: The program.
          inputs: Values of inputs, by JAX's name of them in the program.
          partitions: Devices on which it is executed, by their position in the
            program's list; None is any device.
        """
        chosen = None if partitions is None else np.array(partitions, np.uint32)
        frame = cls(module, module.computations[module.entry], Lanes.first(chosen))
        frame._inputs = inputs or {}
        return frame

    def on(self, partitions: Sequence[int]) -> "Frame":
        """The same computation, executed from the same place on some devices."""
        return self._executed(tuple(partitions), self._assumes)

    def assuming(self) -> "Frame":
        """The same computation where what data decide never prevents anything.

        Of a condition that holds where constants and data allow, constants decide.
        """
        return self._executed(None, True)

    def _executed(self, partitions: tuple[int, ...] | None, assumes: bool) -> "Frame":
        key = partitions, assumes
        if key not in self._again:
            self._again[key] = self._execute(partitions, assumes)
        return self._again[key]

    def _execute(self, partitions: tuple[int, ...] | None, assumes: bool) -> "Frame":
        if self.caller is None:
            entry = Frame.entry(self.module, self._inputs, partitions)
            entry._assumes = assumes
            return entry
        frame, caller = self.caller
        outer = frame._executed(partitions, assumes)
        if caller.opcode == "while":
            return outer.body(caller)
        if caller.opcode == "conditional":
            return outer.branch(caller, self.number)
        return outer.call(caller, self.computation)

    def count(self, loop: Instruction) -> int | None:
        """How often a ``while`` runs its body; None where data decide."""
        known = trip_count(loop)
        return self._carried(loop).count if known is None else known

    def shares(self, conditional: Instruction) -> tuple[float, ...] | None:
        """How often each branch is taken, as shares of 1; None where data decide."""
        taken = self.taken(conditional)
        if taken is None:
            return None
        counts = np.bincount(taken, minlength=len(self.module.callees(conditional)))
        return tuple(float(each) for each in counts / len(taken))

    def taken(self, conditional: Instruction) -> np.ndarray | None:
        """The number of the branch that each lane takes, int ``[L]``, if known."""
        chosen = self.value(conditional.operands[0])
        if chosen is None or not len(self.lanes):
            return None
        last = len(self.module.callees(conditional)) - 1
        taken = np.broadcast_to(chosen.reshape(-1), len(self.lanes))
        if chosen.dtype == bool:
            return np.where(taken, 0, 1)
        # XLA takes the last branch for any other number.
        return np.where((taken < 0) | (taken > last), last, taken).astype(int)

    def body(self, loop: Instruction) -> "Frame":
        """The frame of a loop's body."""
        lanes = self.lanes.repeated(self.count(loop) or 1)
        return Frame(self.module, self.module.body(loop), lanes, (self, loop))

    def branch(self, conditional: Instruction, number: int) -> "Frame":
        """The frame of a branch, with the lanes that take it."""
        outer, taken = np.arange(len(self.lanes)), self.taken(conditional)
        if taken is not None:
            outer = np.flatnonzero(taken == number)
        branch, lanes = (
            self.module.callees(conditional)[number],
            self.lanes.inner(outer),
        )
        return Frame(self.module, branch, lanes, (self, conditional), number)

    def call(self, instruction: Instruction, callee: Computation) -> "Frame":
        """The frame of a computation that an instruction executes once."""
        lanes = self.lanes.inner(np.arange(len(self.lanes)))
        return Frame(self.module, callee, lanes, (self, instruction))

    def value(self, name: str, index: Index = ()) -> np.ndarray | None:
        """The value of an instruction in each lane, ``[L or 1, *dims]``, if known."""
        key = name, index
        if key not in self._known:
            self._known[key] = None  # what depends on itself is unknown
            instruction = self.computation.instructions.get(name)
            if instruction is not None:
                self._known[key] = self._evaluated(instruction, index)
        return self._known[key]

    def _evaluated(self, instruction: Instruction, index: Index) -> np.ndarray | None:
        opcode, operands = instruction.opcode, instruction.operands
        if opcode == "parameter":
            if self.caller is None:
                return self._input(instruction)
            return self._parameter(self.caller, int(operands[0]), index)
        if opcode == "get-tuple-element":
            number = int(instruction.attributes["index"])
            return self.value(operands[0], (number, *index))
        if opcode == "tuple":
            return self.value(operands[index[0]], index[1:]) if index else None
        if opcode in SAME and operands:
            return self.value(operands[0], index)
        if opcode in ("fusion", "call"):
            (callee,) = self.module.callees(instruction)
            return self.call(instruction, callee).value(callee.root.name, index)
        if opcode == "while":
            return self._loop_result(instruction, index)
        if opcode == "conditional":
            return self._branch_result(instruction, index)
        if opcode == "partition-id":
            return self.lanes.partitions
        if index or instruction.is_tuple:
            return None
        return self._computed(instruction)

    def _computed(self, instruction: Instruction) -> np.ndarray | None:
        size = np.prod(instruction.shapes[0].dims) if instruction.shapes else 0
        if size > _MAX_ELEMENTS:
            return None
        sources = self.computation.sources(instruction)
        if instruction.opcode == "bitcast" and not all(
            map(is_row_major, (instruction, *sources))
        ):
            return None
        operands: list[np.ndarray] = []
        if instruction.opcode != "constant":
            for name in instruction.operands:
                known = self.value(name)
                if known is None and self._assumes and _is_conjunction(instruction):
                    continue
                if known is None:
                    return None
                operands.append(known)
        if _is_conjunction(instruction) and len(operands) < 2:
            return operands[0] if operands else None
        if size * max(map(len, operands), default=1) > _MAX_ELEMENTS:
            return None
        applied = ""
        if instruction.opcode == "reduce":
            applied = self.module.callees(instruction)[0].root.opcode
        return evaluate(instruction, operands, applied)

    def _input(self, parameter: Instruction) -> np.ndarray | None:
        known = self._inputs.get(parameter.op_name)
        if known is None or known.shape != parameter.shapes[0].dims:
            return None  # a part of it, where it is sharded
        return known[None]

    def _parameter(
        self, place: "tuple[Frame, Instruction]", number: int, index: Index
    ) -> np.ndarray | None:
        frame, caller = place
        if caller.opcode == "while":
            return self._loop_element(frame, caller, index)
        operands = caller.operands
        if caller.opcode == "conditional":
            operands = operands[1 + self.number :]
        return self._from_caller(frame.value(operands[number], index))

    def _loop_element(
        self, frame: "Frame", loop: Instruction, index: Index
    ) -> np.ndarray | None:
        """An element of what a loop carries from one iteration to the next."""
        if not index:
            return None
        if self.origins.fixed(loop, index[0]) is not None:
            return self._from_caller(frame._fixed_element(loop, index))
        carried = frame._carried(loop)
        first, step = carried.first(index[0]), carried.step(index[0])
        if first is None or step is None or len(index) > 1:
            return None
        begin, counters = self._from_caller(first), self.lanes.counters
        if begin is None or counters is None:
            return None
        return (begin + step * counters).astype(first.dtype)

    def _branch_result(
        self, conditional: Instruction, index: Index
    ) -> np.ndarray | None:
        """What the branches that lanes take result in."""
        taken = self.taken(conditional)
        if taken is None:
            return None
        result: np.ndarray | None = None
        for number in np.unique(taken):
            inside = self.branch(conditional, int(number))
            part = inside.value(inside.computation.root.name, index)
            if part is None or part[0].size * len(taken) > _MAX_ELEMENTS:
                return None
            if result is None:
                result = np.zeros((len(taken), *part.shape[1:]), part.dtype)
            result[taken == number] = part
        return result

    def _loop_result(self, loop: Instruction, index: Index) -> np.ndarray | None:
        """An element of what a loop ends with: fixed, or stacked by its iterations."""
        known = self._fixed_element(loop, index)
        if known is not None or len(index) != 1:
            return known
        return self._carried(loop).stacked(index[0])

    def _fixed_element(self, loop: Instruction, index: Index) -> np.ndarray | None:
        """An element that every iteration of a loop has, and that it results in."""
        number = self.origins.fixed(loop, index[0]) if index else None
        if number is None:
            return None
        known = self.value(loop.operands[0], (number, *index[1:]))
        first = self.value(loop.operands[0], index)
        if known is None or first is None or not np.array_equal(known, first):
            return None
        return known

    def _from_caller(self, known: np.ndarray | None) -> np.ndarray | None:
        if known is None or len(known) == 1:
            return known
        if known[0].size * len(self.lanes) > _MAX_ELEMENTS:
            return None
        return known[self.lanes.outer]

    def _carried(self, loop: Instruction) -> "_Carried":
        if loop.name not in self._loops:
            self._loops[loop.name] = _Carried(self, loop)
        return self._loops[loop.name]


def _is_conjunction(instruction: Instruction) -> bool:
    """Whether an operation is the ``and`` of two conditions."""
    return instruction.opcode == "and" and instruction.result.startswith("pred[")


class _Carried:
    """What a loop carries from one iteration to the next.

    Args:
      frame: Of the computation that contains the loop.
      loop: The ``while``.
    """

    def __init__(self, frame: Frame, loop: Instruction) -> None:
        self._frame, self._loop = frame, loop
        self._body = frame.module.body(loop)
        self._steps: dict[int, int | None] = {}

    def first(self, number: int) -> np.ndarray | None:
        """The value of an element before the loop: a scalar in each lane."""
        known = self._frame.value(self._loop.operands[0], (number,))
        return known if known is not None and known.ndim == 1 else None

    def step(self, number: int) -> int | None:
        """What each iteration adds to a counter; None of any other element."""
        if number not in self._steps:
            self._steps[number] = None  # unless it depends on itself alone
            self._steps[number] = self._probe(number)
        return self._steps[number]

    @cached_property
    def count(self) -> int | None:
        """How often the body runs: as long as the condition holds for its counters."""
        module = self._frame.module
        condition = module.computations[self._loop.called["condition"][0]]
        length = 2**8 if len(self._frame.lanes) else _LONGEST_LOOP + 1
        while length <= _LONGEST_LOOP:
            # All lanes have the length of the first.
            first, counters = np.zeros(length, int), np.arange(length)
            lanes = replace(self._frame.lanes.inner(first), counters=counters)
            inside = Frame(module, condition, lanes, (self._frame, self._loop))
            holds = inside.value(condition.root.name)
            if holds is None or len(holds) == 1:
                return None
            if not holds.all():
                return int(np.argmin(holds))
            length *= 2**4
        return None

    def stacked(self, number: int) -> np.ndarray | None:
        """The last value of an array of which the iterations write all parts.

        The body is evaluated on an array of zeros and on one of ones: where the results
        agree, it was written.
        """
        count, frame = self._frame.count(self._loop), self._frame
        result, shape = self._result(number), self._shape(number)
        if not count or result is None or shape is None or not shape.dims:
            return None
        lanes = frame.lanes.repeated(count)
        if len(lanes) != len(frame.lanes) * count:
            return None  # a sample
        after = []
        for value in (0, 1):
            whole = known_array(shape, value)
            if whole is None or whole.size * len(lanes) > _MAX_ELEMENTS:
                return None
            probe = _Probe(frame, self._loop, lanes, number, whole)
            after.append(probe.value(result.name))
        zeros, ones = after
        if zeros is None or ones is None or len(zeros) != len(lanes):
            return None
        by_iteration = len(frame.lanes), count, *shape.dims
        written = (zeros == ones).reshape(by_iteration)
        if not written.any(1).all():
            return None
        last = count - 1 - np.argmax(written[:, ::-1], axis=1, keepdims=True)
        return np.take_along_axis(zeros.reshape(by_iteration), last, 1)[:, 0]

    def _result(self, number: int) -> Instruction | None:
        root = self._body.root
        if root.opcode != "tuple" or number >= len(root.operands):
            return None
        return self._body.instructions.get(root.operands[number])

    def _shape(self, number: int) -> Shape | None:
        result = self._result(number)
        if result is None or result.is_tuple or len(result.shapes) != 1:
            return None
        return result.shapes[0]

    def _probe(self, number: int) -> int | None:
        """The step, found by evaluating the body on some values of the element."""
        result, shape = self._result(number), self._shape(number)
        if result is None or shape is None or shape.dims or shape.dtype[0] not in "su":
            return None
        if not len(self._frame.lanes):
            return None
        lanes = self._frame.lanes.inner(np.zeros(len(_PROBES), int))
        values = _PROBES.astype(np.int32)
        after = _Probe(self._frame, self._loop, lanes, number, values).value(
            result.name
        )
        if after is None or len(after) != len(_PROBES):
            return None
        added = set((after.astype(np.int64) - _PROBES).tolist())
        return added.pop() if len(added) == 1 else None


class _Probe(Frame):
    """The body of a loop, one element of which has chosen values.

    Args:
      frame: Of the computation that contains the loop.
      loop: The ``while``.
      lanes: Executions of the body; without counters only fixed elements are known.
      number: Of the element.
      values: Its values, ``[L or 1, *dims]``.
    """

    def __init__(
        self,
        frame: Frame,
        loop: Instruction,
        lanes: Lanes,
        number: int,
        values: np.ndarray,
    ) -> None:
        super().__init__(frame.module, frame.module.body(loop), lanes, (frame, loop))
        self._chosen, self._values = (number,), values

    def _loop_element(
        self, frame: Frame, loop: Instruction, index: Index
    ) -> np.ndarray | None:
        if index == self._chosen:
            return self._values
        is_fixed = index and self.origins.fixed(loop, index[0]) is not None
        if self.lanes.counters is None and not is_fixed:
            return None  # no other counter: the search for its step would not end
        return super()._loop_element(frame, loop, index)
