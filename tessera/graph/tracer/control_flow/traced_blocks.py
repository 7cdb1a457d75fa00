# SPDX-License-Identifier: Apache-2.0
"""Trace a block of code: a program, and the changes that the block makes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tessera.errors import ControlFlowError, TesseraError
from tessera.graph.tracer.control_flow.active_conversion import (
    NEEDS_VALUE,
    current,
    external_change_error,
)
from tessera.graph.tracer.control_flow.block_state import ABSENT, Key, State
from tessera.graph.tracer.control_flow.containers import BranchContents, leaves_in
from tessera.graph.tracer.control_flow.merge_points import SCALARS, describe
from tessera.graph.tracer.control_flow.mutable_objects import differences
from tessera.graph.tracer.control_flow.user_code import line_of, user_line
from tessera.graph.tracer.declared_layouts import is_number
from tessera.jax_compat import jaxprs


@dataclass(frozen=True)
class Block:
    """A traced block: its program, and the values that it leaves.

    Attributes:
      program: Its outputs are the arrays that the block leaves, each once.
      after: Every variable and entry that it changed; ``ABSENT`` for removed ones.
      side: The contents of containers that existed before.
      order: Which output an array is, by its id.
    """

    program: jaxprs.Program
    after: Mapping[Key, Any]
    side: BranchContents
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
    """Trace a block, and undo its changes of the state.

    Args:
      run: The block; takes traced values of the types of ``inputs``.
      state: What it may change.
      before: What the state holds when it begins.
      what: Its name in messages.
      inputs: Types.

    Raises:
      ControlFlowError: [T319] it raises, or changes what cannot be traced.
    """
    _refuse_iterators(state, what)
    conversion = current()
    if conversion is not None:
        conversion.lock(state.arrays)
    after: dict[Key, Any] = {}
    arrays: dict[int, Any] = {}
    branch_contents: list[BranchContents] = []

    def flat(*values: Any) -> list[Any]:
        run(*values)
        now = state.read()
        after.update(differences(before, now, ABSENT))
        _require_traceable(state, after, what)
        branch_contents.append(state.side(now, after))
        leaves = leaves_in(after.values(), branch_contents[0].contents)
        arrays.update((id(leaf), leaf) for leaf in leaves if _is_array(leaf))
        return [jnp.asarray(leaf) for leaf in arrays.values()]

    try:
        with _errors_recorded(what), _counted_block(what):
            program = jax.make_jaxpr(flat)(*inputs)
    finally:
        state.write(before)
    order = {name: location for location, name in enumerate(arrays)}
    return Block(program, after, branch_contents[0], order)


def _is_array(leaf: Any) -> bool:
    return is_number(leaf) and not isinstance(leaf, SCALARS)


def _require_traceable(state: State, after: Mapping[Key, Any], what: str) -> None:
    """Refuse a change of an object that outlives the trace, or of bytes."""
    for key in after:
        owner = state.owner(key)
        if owner.outside:
            raise external_change_error(key.name, what)
        if isinstance(owner.target, bytearray):
            raise ControlFlowError(
                f"the bytes {owner.path!r} are written into in {what}",
                fix="write before, or use a jax.numpy array",
            )


def _refuse_iterators(state: State, what: str) -> None:
    """Refuse a block that can move on an iterator which it has not made."""
    for name, iterator in state.iterators:
        raise ControlFlowError(
            f"{name!r} is moved on in {what}, which is traced whether it runs or not",
            got=f"a {type(iterator).__name__} from before it",
            fix="take what it needs before, or make it there",
        )


@contextmanager
def _counted_block(what: str) -> Iterator[None]:
    """Count a block that is being traced."""
    conversion = current()
    if conversion is None:
        yield
        return
    if not conversion.blocks:
        held = [(owner, owner.content()) for owner, _ in conversion.library_state]
        conversion.library_state[:] = held
    conversion.blocks += 1
    try:
        yield
        conversion.require_library_state_unchanged(what)
    finally:
        conversion.blocks -= 1


@contextmanager
def _errors_recorded(what: str) -> Iterator[None]:
    """Record an exception that leaves a block, even if the user's code catches it.

    The block is traced whether it runs or not, so whether it is raised is not known.
    """
    try:
        yield
    except Exception as error:
        refusal = error
        if not isinstance(error, (TesseraError, *NEEDS_VALUE)):
            refusal = _raised_error(error, what).with_traceback(error.__traceback__)
        conversion = current()
        if conversion is not None:
            conversion.refuse(refusal)
        if refusal is error:
            raise
        raise refusal from error


def _raised_error(error: Exception, what: str) -> ControlFlowError:
    location, line = line_of(error)
    return ControlFlowError(
        f"{type(error).__name__} at {location} is raised in {what}, which is traced "
        "whether it runs or not",
        got=str(error).strip().partition("\n")[0],
        fix="give back a value that tells, and raise outside, or use "
        "jax.experimental.checkify"
        if line.startswith("raise")
        else "let both ways be possible for every value of the condition, or decide "
        "with a value of Python",
    )


def truth(value: Any, what: str) -> Any:
    """A traced value as one boolean, as in a Python condition.

    Raises:
      ControlFlowError: [T319] it is not one number.
    """
    if jnp.ndim(value) != 0:
        raise ControlFlowError(
            f"the condition of {what} at {user_line()} is an array, not one number",
            got=describe(value),
            fix="reduce it with .all() or .any(), or choose for each element with "
            "jnp.where",
        )
    return value if value.dtype == jnp.bool_ else value != jnp.zeros((), value.dtype)
