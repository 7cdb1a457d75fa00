# SPDX-License-Identifier: Apache-2.0
"""Trace a block of code: a program, and the changes that the block makes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tessera.errors import ControlFlowError, TesseraError
from tessera.graph.tracer.control_flow.block_state import (
    Contents,
    Key,
    State,
    flattened,
)
from tessera.graph.tracer.control_flow.conversion_state import (
    NEEDS_VALUE,
    current,
)
from tessera.graph.tracer.control_flow.merge_points import describe
from tessera.graph.tracer.control_flow.user_code import line_of, user_line
from tessera.graph.tracer.declared_layouts import is_numeric_array
from tessera.jax_compat import jaxprs


@dataclass(frozen=True)
class Block:
    """A traced block: its program, and the values that it leaves.

    Attributes:
      program: Its outputs are the arrays that the block leaves, each once.
      changes: The variables and entries that it changed.
      end: What the state holds when it ends.
      outputs: The arrays, by id, in the order of the program's outputs.
    """

    program: jaxprs.Program
    changes: Sequence[Key]
    end: Contents
    outputs: Mapping[int, Any]


def traced_block(
    run: Callable[..., Any],
    state: State,
    before: Contents,
    what: str,
) -> Block:
    """Trace a block, and undo its changes of the state.

    Args:
      run: The block.
      state: What it may change.
      before: What the state holds when it begins.
      what: Its name in messages.

    Raises:
      ControlFlowError: [T319] it raises, or changes what cannot be traced.
    """
    ends: list[Contents] = []
    arrays: dict[int, Any] = {}

    def flat() -> list[Any]:
        run()
        state.require_others_unchanged(what)
        ends.append(state.read())
        for key in state.changes(before, ends[0]):
            leaves = flattened(state.value(ends[0], key)).leaves
            arrays.update((id(leaf), leaf) for leaf in leaves if is_numeric_array(leaf))
        return [jnp.asarray(leaf) for leaf in arrays.values()]

    conversion = current()
    opened = nullcontext() if conversion is None else conversion.block()
    try:
        with _errors_recorded(what), opened:
            program = jax.make_jaxpr(flat)()
    finally:
        state.write(before)
    return Block(program, state.changes(before, ends[0]), ends[0], arrays)


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
