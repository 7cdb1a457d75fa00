# SPDX-License-Identifier: Apache-2.0
"""``if``, ``and``, ``or``, ``not`` and ``a if c else b``: on traced values, ``cond``.

A condition that Python knows is decided by Python, as ever. Where it is traced, both
branches are traced, and ``jax.lax.cond`` runs one of them.
"""

from collections.abc import Callable, Sequence
from types import CellType
from typing import Any

import jax
import jax.numpy as jnp

from tessera.graph.tracer.control_flow.absent_values import Unusable
from tessera.graph.tracer.control_flow.block_state import Contents, State
from tessera.graph.tracer.control_flow.merge_points import Merge, filled
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
    state = State((body, orelse), {"its value": value})
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
    # The condition is known on each side: so it is known that a function has returned,
    # where it returns on either side of an ``if returned``.
    flags = [key for key in state.flags if state.value(before, key) is test]
    blocks: list[Block] = []
    starts: list[Contents] = []
    for run, holds in ((body, True), (orelse, False)):
        starts.append(state.updated(before, dict.fromkeys(flags, holds)))
        state.write(starts[-1])
        blocks.append(traced_block(run, state, starts[-1], where))
    state.write(before)
    merge = Merge(where, state)
    keys = dict.fromkeys((*blocks[0].changes, *blocks[1].changes))
    first, second = (state.trees(block.end, keys) for block in blocks)
    merged = {key: merge.merged(key, first[key], second[key]) for key in keys}
    merge.require_agreement()
    results = _cond(predicate, blocks, merge, computes_both)
    state.write(state.updated(before, filled(merged, results)))
    state.require_same_order((block.end for block in blocks), where)


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


def not_(value: Any) -> Any:
    """``not value``."""
    if not isinstance(value, jaxprs.Tracer):
        return not value
    return jnp.logical_not(truth(value, "`not`"))


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
