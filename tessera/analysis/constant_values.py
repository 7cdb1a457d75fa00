# SPDX-License-Identifier: Apache-2.0
"""Evaluates what a compiled program computes from constants and loop counters alone.

That tells how long its loops are, and how often each branch of a conditional is taken:
causal attention, for example, skips pairs of blocks by their numbers. Everything else
is unknown, and so is what depends on it.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Final, TypeAlias

import numpy as np

from tessera.analysis.constant_operations import evaluate, is_row_major
from tessera.analysis.hlo import Computation, Instruction, Module
from tessera.analysis.hlo_walk import trip_count

# Where an element is in nested tuples.
Index: TypeAlias = tuple[int, ...]

_MAX_LANES: Final = 2**16
_MAX_ELEMENTS: Final = 2**22
_LONGEST_LOOP: Final = 2**16
_SAME: Final = ("optimization-barrier", "copy-done", "copy-start", "copy")
_PROBES: Final = np.array([0, 1, 7])


class Frame:
    """A computation as it is executed from one place, in as many lanes as it is.

    A lane is one execution: each iteration of a loop has its own. Of very many lanes a
    sample stands for all.

    Args:
      module: The program.
      computation: What is executed.
      caller: What executes it, with its frame; None for the entry.
      outer: The caller's lane of each lane, int ``[L]``.
      counters: In the body or the condition of a loop the number of each lane's
        iteration, int ``[L]``.
    """

    def __init__(
        self,
        module: Module,
        computation: Computation,
        caller: "tuple[Frame, Instruction] | None" = None,
        outer: np.ndarray | None = None,
        counters: np.ndarray | None = None,
    ) -> None:
        self.module, self.computation, self.caller = module, computation, caller
        self.origins: _Origins = caller[0].origins if caller else _Origins(module)
        self._outer = np.zeros(1, int) if outer is None else outer
        self._counters = counters
        self._known: dict[tuple[str, Index], np.ndarray | None] = {}
        self._loops: dict[str, _Carried] = {}

    @classmethod
    def entry(cls, module: Module) -> "Frame":
        """The frame of the whole program."""
        return cls(module, module.computations[module.entry])

    @property
    def lanes(self) -> int:
        """Executions that are looked at."""
        return len(self._outer)

    def count(self, loop: Instruction) -> int | None:
        """How often a ``while`` of this computation runs its body, where it is known."""
        known = trip_count(self.module, loop, self.computation)
        return self._carried(loop).count if known is None else known

    def shares(self, conditional: Instruction) -> tuple[float, ...] | None:
        """How often each branch is taken, as shares of 1; None where data decide."""
        branches = self.module.callees(conditional)
        taken = self._branch(conditional)
        if taken is None:
            return None
        counts = np.bincount(taken, minlength=len(branches))
        return tuple(float(each) for each in counts / len(taken))

    def body(self, loop: Instruction) -> "Frame":
        """The frame of a loop's body."""
        count = self.count(loop) or 1
        outer, counters = np.divmod(_sampled(self.lanes * count), count)
        body = self.module.body(loop)
        return Frame(self.module, body, (self, loop), outer, counters)

    def branch(self, conditional: Instruction, number: int) -> "Frame":
        """The frame of a branch, with the lanes that take it."""
        outer, taken = np.arange(self.lanes), self._branch(conditional)
        if taken is not None:
            outer = np.flatnonzero(taken == number)
        branch = self.module.callees(conditional)[number]
        return Frame(self.module, branch, (self, conditional), outer)

    def call(self, instruction: Instruction, callee: Computation) -> "Frame":
        """The frame of a computation that an instruction executes once."""
        outer = np.arange(self.lanes)
        return Frame(self.module, callee, (self, instruction), outer)

    def value(self, name: str, index: Index = ()) -> np.ndarray | None:
        """The value of an instruction in each lane, ``[L or 1, *dims]``, if known."""
        key = name, index
        if key not in self._known:
            self._known[key] = None  # what depends on itself is unknown
            instruction = self.computation.instructions.get(name)
            if instruction is not None:
                self._known[key] = self._evaluated(instruction, index)
        return self._known[key]

    def _branch(self, conditional: Instruction) -> np.ndarray | None:
        """The number of the branch that each lane takes."""
        chosen = self.value(conditional.operands[0])
        if chosen is None or not self.lanes:
            return None
        last = len(self.module.callees(conditional)) - 1
        taken = np.broadcast_to(chosen.reshape(-1), self.lanes)
        if chosen.dtype == bool:
            return np.where(taken, 0, 1)
        # XLA takes the last branch for any other number.
        return np.where((taken < 0) | (taken > last), last, taken)

    def _evaluated(self, instruction: Instruction, index: Index) -> np.ndarray | None:
        opcode, operands = instruction.opcode, instruction.operands
        if opcode == "parameter":
            return self._parameter(int(operands[0]), index)
        if opcode == "get-tuple-element":
            number = int(instruction.attributes["index"])
            return self.value(operands[0], (number, *index))
        if opcode == "tuple":
            return self.value(operands[index[0]], index[1:]) if index else None
        if opcode in _SAME and operands:
            return self.value(operands[0], index)
        if opcode in ("fusion", "call"):
            (callee,) = self.module.callees(instruction)
            return self.call(instruction, callee).value(callee.root.name, index)
        if opcode == "while":
            return self._fixed_element(instruction, index)
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
                if (known := self.value(name)) is None:
                    return None
                operands.append(known)
        if size * max(map(len, operands), default=1) > _MAX_ELEMENTS:
            return None
        applied = ""
        if instruction.opcode == "reduce":
            applied = self.module.callees(instruction)[0].root.opcode
        return evaluate(instruction, operands, applied)

    def _parameter(self, number: int, index: Index) -> np.ndarray | None:
        if self.caller is None:
            return None
        frame, caller = self.caller
        if caller.opcode == "while":
            return self._loop_element(frame, caller, index)
        operands = caller.operands
        if caller.opcode == "conditional":
            branches = frame.module.callees(caller)
            operands = operands[1 + branches.index(self.computation) :]
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
        assert self._counters is not None
        begin = self._from_caller(first)
        assert begin is not None
        return (begin + step * self._counters).astype(first.dtype)

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
        if known[0].size * self.lanes > _MAX_ELEMENTS:
            return None
        return known[self._outer]

    def _carried(self, loop: Instruction) -> "_Carried":
        if loop.name not in self._loops:
            self._loops[loop.name] = _Carried(self, loop)
        return self._loops[loop.name]


class _Origins:
    """Follows values back through what does not change them.

    Args:
      module: The program.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._fixed: dict[tuple[str, int], int | None] = {}

    def fixed(self, loop: Instruction, number: int) -> int | None:
        """The element with whose first value every iteration begins; or None.

        It is the element itself where the loop does not change it. A compiler that
        fetches an operand ahead copies it from another element in each iteration; the
        first iteration then begins with a value of its own.
        """
        key = loop.name, number
        if key not in self._fixed:
            self._fixed[key] = None
            self._fixed[key] = self._find_fixed(loop, number)
        return self._fixed[key]

    def _find_fixed(self, loop: Instruction, number: int) -> int | None:
        body = self._module.body(loop)
        name, index = self._origin(body, body.root, (number,))
        if name != body.parameters[0].name or len(index) != 1:
            return None
        source = index[0]
        return source if source in (number, self.fixed(loop, source)) else None

    def _origin(
        self, computation: Computation, instruction: Instruction, index: Index
    ) -> tuple[str, Index]:
        """The name and element of what a value is a copy of."""
        while True:
            opcode, operands = instruction.opcode, instruction.operands
            if opcode == "get-tuple-element":
                index = (int(instruction.attributes["index"]), *index)
                name = operands[0]
            elif opcode == "tuple" and index and index[0] < len(operands):
                name, index = operands[index[0]], index[1:]
            elif opcode in _SAME:
                name = operands[0]
            elif opcode == "while" and index:
                number = self.fixed(instruction, index[0])
                if number is None:
                    return instruction.name, index
                name, index = operands[0], (number, *index[1:])
            else:
                return instruction.name, index
            instruction = computation.instructions[name]


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
        condition = self._frame.module.computations[self._loop.called["condition"][0]]
        length = 2**8
        while length <= _LONGEST_LOOP:
            counters = np.arange(length)
            outer = np.zeros(length, int)
            inside = Frame(
                self._frame.module,
                condition,
                (self._frame, self._loop),
                outer,
                counters,
            )
            holds = inside.value(condition.root.name)
            if holds is None or len(holds) == 1:
                return None
            if not holds.all():
                return int(np.argmin(holds))
            length *= 2**4
        return None

    def _result(self, number: int) -> Instruction | None:
        root = self._body.root
        if root.opcode != "tuple" or number >= len(root.operands):
            return None
        return self._body.instructions.get(root.operands[number])

    def _probe(self, number: int) -> int | None:
        """The step, found by evaluating the body on some values of the element."""
        result = self._result(number)
        shape = result.shapes[0] if result is not None and result.shapes else None
        if result is None or shape is None or shape.dims or shape.dtype[0] not in "su":
            return None
        probe = _Probe(self._frame, self._loop, number)
        after = probe.value(result.name)
        if after is None or len(after) != len(_PROBES):
            return None
        added = set((after.astype(np.int64) - _PROBES).tolist())
        return added.pop() if len(added) == 1 else None


class _Probe(Frame):
    """The body of a loop, one element of which has chosen values."""

    def __init__(self, frame: Frame, loop: Instruction, number: int) -> None:
        outer = np.zeros(len(_PROBES), int)
        body = frame.module.body(loop)
        super().__init__(frame.module, body, (frame, loop), outer)
        self._number = number

    def _loop_element(
        self, frame: Frame, loop: Instruction, index: Index
    ) -> np.ndarray | None:
        if index == (self._number,):
            return _PROBES.astype(np.int32)
        if index and self.origins.fixed(loop, index[0]) is not None:
            return self._from_caller(frame._fixed_element(loop, index))
        return None


def _sampled(count: int) -> np.ndarray:
    """The numbers up to a count, or a sample of them that is always the same."""
    if count <= _MAX_LANES:
        return np.arange(count)
    chosen = np.random.default_rng(0).integers(0, count, _MAX_LANES)
    return np.sort(chosen)
