# SPDX-License-Identifier: Apache-2.0
"""A block of code, run under a trace of its own: a program, and what it changed."""

import dis
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tessera import _jax
from tessera.compiler.trace.control_flow.active_conversion import (
    NEEDS_VALUE,
    current,
    outlives,
)
from tessera.compiler.trace.control_flow.block_state import ABSENT, Key, State
from tessera.compiler.trace.control_flow.containers import Side, leaves_in
from tessera.compiler.trace.control_flow.merge_points import SCALARS, described
from tessera.compiler.trace.control_flow.mutable_places import (
    Numbers,
    Position,
    differences,
)
from tessera.compiler.trace.control_flow.user_code import user_line
from tessera.compiler.trace.declared_layouts import is_number
from tessera.errors import ControlFlowError, TesseraError


@dataclass(frozen=True)
class Block:
    """A block that was run under a trace: its program, and what it left where.

    Attributes:
      program: Its outputs are the arrays that it left, each once.
      after: Every place that has another value than before, or ``ABSENT``.
      side: What it left in containers that were there before.
      order: Which output an array is, by its id.
    """

    program: _jax.Program
    after: Mapping[Key, Any]
    side: Side
    order: Mapping[int, int]

    def value(self, leaf: Any, outputs: Sequence[Any]) -> Any:
        """A leaf of ``after``, from the outputs of the program."""
        return outputs[self.order[id(leaf)]] if id(leaf) in self.order else leaf


def traced_block(
    run: Callable[..., Any],
    state: State,
    before: dict[Key, Any],
    what: str,
    *,
    inputs: Sequence[Any] = (),
) -> Block:
    """Run a block under a trace of its own, and undo what it did to the state.

    Args:
      run: The block; takes traced values of the types of ``inputs``.
      state: What it may change.
      before: What the state holds when it begins.
      what: What messages call it.
      inputs: Types.

    Raises:
      ControlFlowError: [T319] it raises, or changes what cannot be traced.
    """
    after: dict[Key, Any] = {}
    arrays: dict[int, Any] = {}
    sides: list[Side] = []

    def flat(*values: Any) -> list[Any]:
        run(*values)
        now = state.read()
        after.update(differences(before, now, ABSENT))
        _require_traceable(state, after, what)
        sides.append(state.side(now, after))
        leaves = leaves_in(after.values(), sides[0].contents)
        arrays.update((id(leaf), leaf) for leaf in leaves if _is_array(leaf))
        return [jnp.asarray(leaf) for leaf in arrays.values()]

    try:
        with state.arrays_locked(), _refused(what), _noted(what):
            program = jax.make_jaxpr(flat)(*inputs)
    finally:
        state.write(before)
    order = {name: place for place, name in enumerate(arrays)}
    return Block(program, after, sides[0], order)


def _is_array(leaf: Any) -> bool:
    return is_number(leaf) and not isinstance(leaf, SCALARS)


def _require_traceable(state: State, after: Mapping[Key, Any], what: str) -> None:
    """Refuse a change of what outlives the trace, or cannot be put back."""
    for key in after:
        holder = state.holder(key)
        if isinstance(holder, Numbers) and not holder.outside:
            raise ControlFlowError(
                f"the NumPy array {key.name!r} is written into in {what}",
                got="a program computes new arrays, and writes into none",
                fix="use a jax.numpy array and x = x.at[i].set(v), or write before",
            )
        if isinstance(holder, Position):
            raise ControlFlowError(
                f"{key.name!r} is moved on in {what}, which is traced whether it runs "
                "or not",
                got=f"a {type(holder.thing).__name__} from before it",
                fix="take what it needs before, or make it there; for random numbers "
                "use jax.random with a key",
            )
        if holder is not None and holder.outside:
            raise outlives(key.name, what)


@contextmanager
def _noted(what: str) -> Iterator[None]:
    """Count the block among those that are being traced."""
    conversion = current()
    if conversion is None:
        yield
        return
    if not conversion.blocks:
        held = [(holder, holder.content()) for holder, _ in conversion.hidden]
        conversion.hidden[:] = held
    conversion.blocks += 1
    try:
        yield
        conversion.require_hidden_unchanged(what)
    finally:
        conversion.blocks -= 1


@contextmanager
def _refused(what: str) -> Iterator[None]:
    """Let an exception that leaves a block end the trace, whoever catches it.

    The block is traced whether it runs or not, so whether it is raised is not known.
    """
    try:
        yield
    except Exception as error:
        refusal = error
        if not isinstance(error, (TesseraError, *NEEDS_VALUE)):
            refusal = _raised(error, what).with_traceback(error.__traceback__)
        conversion = current()
        if conversion is not None:
            conversion.refuse(refusal)
        if refusal is error:
            raise
        raise refusal from error


def _raised(error: Exception, what: str) -> ControlFlowError:
    place, is_statement = "an unknown line", False
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not _jax.is_machinery(code.co_filename):
            place = f"{code.co_filename}:{trace.tb_lineno}"
        operation = dis.opname[code.co_code[trace.tb_lasti]]
        is_statement = operation == "RAISE_VARARGS"
        trace = trace.tb_next
    return ControlFlowError(
        f"{type(error).__name__} at {place} is raised in {what}, which is traced "
        "whether it runs or not",
        got=str(error).strip().partition("\n")[0],
        fix="give back a value that tells, and raise outside, or use "
        "jax.experimental.checkify"
        if is_statement
        else "let both ways be possible for every value of the condition, or decide "
        "with a value of Python",
    )


def truth(value: Any, what: str) -> Any:
    """A traced value as one boolean, as Python takes it for a condition.

    Raises:
      ControlFlowError: [T319] it is not one number.
    """
    if jnp.ndim(value) != 0:
        raise ControlFlowError(
            f"the condition of {what} at {user_line()} is an array, not one number",
            got=described(value),
            fix="reduce it with .all() or .any(), or choose for each element with "
            "jnp.where",
        )
    return value if value.dtype == jnp.bool_ else value != jnp.zeros((), value.dtype)
