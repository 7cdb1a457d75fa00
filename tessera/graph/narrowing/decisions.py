# SPDX-License-Identifier: Apache-2.0
"""Decides which f32 values of a program ``ts.autocast`` stores in a narrow dtype.

Of the values that may be narrow (``candidates``), those are narrow that

- reach a matmul, which rounds its operands anyway, through operations that run narrow.
  The gradient of a weight reaches none and stays in f32;
- the backward pass reads of the forward pass: its residuals.

A value all of whose readers round it is rounded at once, wherever it comes from. That
changes no number, and a loop that stacks it stores half as much. Parameters are cast
where they are used, so that they are not stored a second time.

Calls and ``scan`` are analysed with the values that they are called with. A carry is
narrow if its first value and the next ones are.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from tessera.graph.narrowing.candidates import find_candidates
from tessera.graph.narrowing.frames import CallFrame, Narrow, Scalar
from tessera.graph.narrowing.rules import (
    CUSTOM_CALLS,
    PAIRWISE,
    Rule,
    is_f32,
    rule_of,
)
from tessera.jax_compat import jaxprs
from tessera.tracing.casts import AUTOCAST_DTYPES

_F32: Final = "f32"  # how a value is read by what computes in f32


def analyze(program: jaxprs.Program, scopes: str) -> CallFrame:
    """What is narrow in a program whose inputs and outputs are as declared.

    Args:
      program: The program.
      scopes: The path of name scopes that it is in.
    """
    frame, count = CallFrame(program, scopes), len(jaxprs.inputs(program))
    find_candidates(frame, [None] * count, [False] * count)
    _Decisions(frame).decide([_F32] * len(jaxprs.outputs(program)))
    _spread(frame)
    return frame


class _Decisions:
    """Decides from the readers of a frame's variables, going backward.

    Args:
      frame: The frame.
    """

    def __init__(self, frame: CallFrame) -> None:
        self._frame = frame
        self._wanted = set[jaxprs.Atom]()  # narrow for some reader
        self._readers = dict[jaxprs.Atom, Any]()  # a dtype, if all round to it

    def decide(self, readers: Sequence[Any]) -> "_Decisions":
        """Write into the frame what is narrow.

        Args:
          readers: Of each output: the dtype that it is read in, f32, or None.
        """
        frame = self._frame
        frame.narrow = {}
        frame.outputs = [None if reader == _F32 else reader for reader in readers]
        for atom, reader in zip(jaxprs.outputs(frame.program), readers, strict=True):
            if reader is not None:
                self._read(atom, reader)
        for equation in reversed(jaxprs.equations(frame.program)):
            self._store(equation.outvars)
            self._read_operands(equation)
        self._store(jaxprs.inputs(frame.program))
        return self

    def _store(self, variables: Iterable[jaxprs.Atom]) -> None:
        """Decide the dtypes of variables all of whose readers are known."""
        frame = self._frame
        for variable in variables:
            state, reader = frame.state(variable), self._readers.get(variable)
            if isinstance(state, Narrow) and variable in self._wanted:
                frame.narrow[variable] = state.dtype
            elif frame.is_computed(variable) and reader not in (None, _F32):
                frame.narrow[variable] = reader

    def _read(self, atom: jaxprs.Atom, reader: Any, *, wants: bool = True) -> None:
        """Note a reader that rounds a value to a dtype, or reads it in f32."""
        if isinstance(atom, jaxprs.Literal) or not is_f32(atom):
            return
        is_same = self._readers.setdefault(atom, reader) == reader
        self._readers[atom] = reader if is_same else _F32
        state = self._frame.state(atom)
        if wants and isinstance(state, Narrow) and state.dtype == reader:
            self._wanted.add(atom)

    def _read_f32(self, atoms: Iterable[jaxprs.Atom], *, wants: bool = False) -> None:
        """Note a reader in f32, or one that takes narrow values where there are any."""
        for atom in atoms:
            self._read(atom, _F32)
            if wants and isinstance(self._frame.state(atom), Narrow):
                self._wanted.add(atom)

    def _read_operands(self, equation: jaxprs.Equation) -> None:
        frame, dtype = self._frame, self._frame.dtype_inside(equation)
        rule, operands = rule_of(equation, dtype), equation.invars
        if id(equation) in frame.frames:
            self._read_in_call(equation, frame.frames[id(equation)])
        elif rule is Rule.MATMUL:
            for atom in operands[:2]:
                self._read(atom, dtype)
        elif rule is Rule.MOVE and equation.primitive.name in PAIRWISE:
            for atom, result in zip(operands, equation.outvars, strict=True):
                self._read(atom, frame.stored(result) or _F32)
        elif rule is Rule.MOVE and (moved := frame.moved_dtype(equation)) is not None:
            for atom in operands:
                self._read(atom, moved)
        elif (rounded := self._rounds_to(equation)) is not None:
            self._read(operands[0], rounded, wants=rounded == dtype)
        else:
            self._read_f32(operands, wants=frame.runs_narrow(equation))
            moves = rule is Rule.MOVE and isinstance(
                frame.state(equation.outvars[0]), Narrow
            )  # then what reads its result decides
            if frame.is_backward(equation) and not moves:
                self._want_residuals(operands, dtype)

    def _rounds_to(self, equation: jaxprs.Equation) -> Any:
        """The dtype that an equation converts f32 to, if it is one of autocast.

        Not in the backward pass: ``widen_sums`` may leave the cast of a gradient out,
        and is to find the sum in f32.
        """
        name = equation.primitive.name
        if name != "convert_element_type" or self._frame.is_backward(equation):
            return None
        dtype = equation.outvars[0].aval.dtype
        return dtype if dtype.name in AUTOCAST_DTYPES else None

    def _want_residuals(self, atoms: Iterable[jaxprs.Atom], dtype: Any) -> None:
        """Note a reader of the backward pass, in an autocast to ``dtype``."""
        for atom in atoms:
            state = self._frame.state(atom)
            if isinstance(state, Narrow) and state.is_forward and state.dtype == dtype:
                self._wanted.add(atom)

    def _read_in_call(self, equation: jaxprs.Equation, called: CallFrame) -> None:
        inputs = jaxprs.inputs(called.program)
        if equation.primitive.name in CUSTOM_CALLS:
            _Decisions(called).decide([_F32] * len(equation.outvars))
            for variable in inputs:
                called.narrow.pop(variable, None)
            wants = self._frame.runs_narrow(equation)
            self._read_f32(equation.invars, wants=wants)
            return
        if equation.primitive.name == "scan":
            inside = self._decide_loop(equation, called)
        else:
            readers = [self._reader(v) for v in equation.outvars]
            inside = _Decisions(called).decide(readers)
        for atom, variable in zip(equation.invars, inputs, strict=True):
            if variable in inside._readers or variable in called.narrow:
                self._read(atom, called.stored(variable) or _F32)

    def _reader(self, result: jaxprs.Atom) -> Any:
        """How a result is read: in a narrow dtype, in f32, or not at all."""
        is_read = result in self._readers
        return (self._frame.stored(result) or _F32) if is_read else None

    def _decide_loop(self, equation: jaxprs.Equation, body: CallFrame) -> "_Decisions":
        """Decide in a loop, when it does not change which carries are narrow."""
        consts, carries = jaxprs.scan_sizes(equation)
        results = equation.outvars[:carries]
        inputs = jaxprs.inputs(body.program)[consts : consts + carries]
        stacked = [self._reader(v) for v in equation.outvars[carries:]]
        wanted = [v in self._wanted for v in results]
        while True:
            dtypes = [
                state.dtype if isinstance(state, Narrow) and is_wanted else None
                for state, is_wanted in zip(
                    map(body.state, inputs), wanted, strict=True
                )
            ]
            readers = [*(dtype or _F32 for dtype in dtypes), *stacked]
            inside = _Decisions(body).decide(readers)
            both = zip(inputs, wanted, strict=True)
            more = [is_wanted or v in inside._wanted for v, is_wanted in both]
            if more == wanted:
                break
            wanted = more
        for variable, result, dtype in zip(inputs, results, dtypes, strict=True):
            _set(body.narrow, variable, dtype)
            _set(self._frame.narrow, result, dtype)
        return inside


def _set(narrow: dict[jaxprs.Atom, Any], variable: jaxprs.Atom, dtype: Any) -> None:
    narrow.pop(variable, None)
    if dtype is not None:
        narrow[variable] = dtype


# --- forward again: what is narrow stays so until something reads it in f32


def _spread(frame: CallFrame) -> None:
    """Let calls, loops and what moves narrow values store them as they are."""
    for equation in jaxprs.equations(frame.program):
        called, name = frame.frames.get(id(equation)), equation.primitive.name
        if called is not None and name in CUSTOM_CALLS:
            _spread(called)
        elif called is not None:
            _spread_into(frame, equation, called)
        elif rule_of(equation, None) is not Rule.MOVE:
            continue
        elif name in PAIRWISE:
            for atom, result in zip(equation.invars, equation.outvars, strict=True):
                _keep(frame, result, frame.stored(atom))
        elif (dtype := _common_dtype(frame, equation)) is not None:
            for result in equation.outvars:
                _keep(frame, result, dtype)


def _keep(frame: CallFrame, variable: jaxprs.Atom, dtype: Any) -> None:
    """Store a value in the dtype that it may have, as what it is made of is."""
    state = frame.state(variable)
    if isinstance(state, Narrow) and state.dtype == dtype:
        frame.narrow[variable] = dtype


def _common_dtype(frame: CallFrame, equation: jaxprs.Equation) -> Any:
    """The dtype that all operands of an equation are stored in, or None.

    Numbers count as stored in each dtype that has them.
    """
    atoms = [atom for atom in equation.invars if is_f32(atom)]
    dtypes = {frame.stored(atom) for atom in atoms} - {None}
    if len(dtypes) != 1:
        return None
    dtype = dtypes.pop()
    for atom in atoms:
        state = frame.state(atom)
        is_number = isinstance(state, Scalar) and state.is_exact(dtype)
        if frame.stored(atom) is None and not is_number:
            return None
    return dtype


def _spread_into(
    frame: CallFrame, equation: jaxprs.Equation, called: CallFrame
) -> None:
    """The same in a call, except for a loop's carries."""
    first, last = 0, 0
    if equation.primitive.name == "scan":
        first, carries = jaxprs.scan_sizes(equation)
        last = first + carries
    for number, variable in enumerate(jaxprs.inputs(called.program)):
        if not first <= number < last:
            _keep(called, variable, frame.stored(equation.invars[number]))
    _spread(called)
    outputs = jaxprs.outputs(called.program)
    for number in range(last - first, len(outputs)):
        dtype, result = called.stored(outputs[number]), equation.outvars[number]
        if called.outputs[number] is None and dtype is not None:
            _keep(frame, result, dtype)
            called.outputs[number] = frame.stored(result)
