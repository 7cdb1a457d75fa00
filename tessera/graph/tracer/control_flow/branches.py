# SPDX-License-Identifier: Apache-2.0
"""``if``, ``and``, ``or``, ``not`` and ``a if c else b``: on traced values, ``cond``.

A condition that Python knows is decided by Python, as ever. Where it is traced, both
branches are traced, and ``jax.lax.cond`` runs one of them.
"""

import weakref
from collections.abc import Callable, Sequence
from types import CellType
from typing import Any

import jax
import jax.numpy as jnp

from tessera.graph.tracer.control_flow.block_state import (
    ABSENT,
    Key,
    State,
    Unusable,
)
from tessera.graph.tracer.control_flow.merge_points import Merge, MergeResult
from tessera.graph.tracer.control_flow.traced_blocks import Block, traced_block, truth
from tessera.graph.tracer.control_flow.user_code import user_line
from tessera.jax_compat import jaxprs

Run = Callable[[], Any]


def if_stmt(test: Any, body: Run, orelse: Run) -> None:
    """An ``if``."""
    if not isinstance(test, jaxprs.Tracer):
        body() if test else orelse()
        return
    choose(test, body, orelse, State((body, orelse)), "the `if`")


def if_exp(test: Any, body: Run, orelse: Run, *, computes_both: bool = False) -> Any:
    """``body if test else orelse``."""
    if not isinstance(test, jaxprs.Tracer):
        return body() if test else orelse()
    value = CellType(None)
    ways = _assigning(value, body), _assigning(value, orelse)
    state = State((body, orelse), values=[("its value", value)])
    what = "`and` or `or`" if computes_both else "the conditional expression"
    choose(test, *ways, state, what, computes_both=computes_both)
    result = value.cell_contents
    return result.read() if isinstance(result, Unusable) else result


def _assigning(value: CellType, operand: Run) -> Run:
    """An operand of an expression as a block that assigns the expression's value."""

    def run() -> None:
        value.cell_contents = operand()

    return run


def choose(
    test: Any,
    body: Run,
    orelse: Run,
    state: State,
    what: str,
    *,
    computes_both: bool = False,
) -> None:
    """Trace both blocks; ``jax.lax.cond`` runs one of them.

    Args:
      test: The condition.
      body: The block that runs if it holds.
      orelse: The other one.
      state: What they may change.
      what: The statement in messages.
      computes_both: Whether the program computes both blocks, if neither prints.

    Raises:
      BranchError: [T318] they leave values of different types.
      ControlFlowError: [T319] the condition is not one number, or a block does what
        cannot be traced.
    """
    predicate = truth(test, what)
    before, where = state.read(), f"{what} at {user_line()}"
    known = _known(test, state, before)
    starts = [
        before | {key: sense is way for key, sense in known.items()}
        for way in (True, False)
    ]
    blocks = []
    for run, start in zip((body, orelse), starts, strict=True):
        state.write(start)
        blocks.append(traced_block(run, state, start, where))
    state.write(before)
    ways = ("if it holds", "if not")
    merge = Merge(where, ways, state, (blocks[0].side, blocks[1].side))
    merged: dict[Key, Any] = {}
    for key in dict.fromkeys((*blocks[0].after, *blocks[1].after)):
        values = [
            block.after.get(key, start.get(key, ABSENT))
            for block, start in zip(blocks, starts, strict=True)
        ]
        merged[key] = merge.merged(key, *values)
    merge.require_agreement()
    results = _cond(predicate, blocks, merge, computes_both)
    filled = MergeResult(before, merged, results)
    state.write(filled.values)
    merge.record_ambiguous(filled)


def _cond(
    predicate: Any, blocks: Sequence[Block], merge: Merge, computes_both: bool
) -> Sequence[Any]:
    """The outputs of ``cond``: one for each slot of the merge, in order."""
    has_effects = any(block.program.effects for block in blocks)
    if not merge.numbers and not has_effects:
        return []

    def way(block: Block, first: bool) -> Callable[[], list[Any]]:
        def run() -> list[Any]:
            outputs = jaxprs.evaluate(block.program)
            return [
                number.cast(
                    block.value(number.first if first else number.second, outputs),
                    number.second if first else number.first,
                )
                for number in merge.numbers
            ]

        return run

    ways = way(blocks[0], True), way(blocks[1], False)
    if computes_both and not has_effects:
        pairs = zip(ways[0](), ways[1](), strict=True)
        return [jnp.where(predicate, first, second) for first, second in pairs]
    return jax.lax.cond(predicate, *ways)


# --- what follows from a condition

# What a condition is the negation of, by its id and for as long as it lives.
_negations: dict[int, Any] = {}


def not_(value: Any) -> Any:
    """``not value``."""
    if not isinstance(value, jaxprs.Tracer):
        return not value
    negated = jnp.logical_not(truth(value, "`not`"))
    _negations[id(negated)] = value
    weakref.finalize(negated, _negations.pop, id(negated))
    return negated


def _known(test: Any, state: State, before: dict[Key, Any]) -> dict[Key, bool]:
    """Variables that are the condition (True) or its negation (False).

    What they are in each branch is known there: so it is known that a function has
    returned, where it returns on either side of an ``if not returned``.
    """
    opposite = _negations.get(id(test))
    return {
        key: value is test
        for key, value in before.items()
        if (value is test or (value is opposite and value is not None))
        and state.is_variable(key)
    }


def and_(value: Any, second: Run) -> Any:
    """``value and second()``."""
    if not isinstance(value, jaxprs.Tracer):
        return value and second()
    return if_exp(value, second, lambda: value, computes_both=True)


def or_(value: Any, second: Run) -> Any:
    """``value or second()``."""
    if not isinstance(value, jaxprs.Tracer):
        return value or second()
    return if_exp(value, lambda: value, second, computes_both=True)
