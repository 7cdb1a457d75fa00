# SPDX-License-Identifier: Apache-2.0
"""``if``, ``and``, ``or``, ``not`` and ``a if c else b``: on traced values, ``cond``.

A condition that Python knows is decided by Python, as ever. Where it is traced, both
branches are traced, and ``jax.lax.cond`` runs one of them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tessera.graph.tracer.control_flow.absent_values import Unusable
from tessera.graph.tracer.control_flow.block_state import State
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
    tessera__value: Any = None  # messages call it "its value"

    def assign_body() -> None:
        nonlocal tessera__value
        tessera__value = body()

    def assign_orelse() -> None:
        nonlocal tessera__value
        tessera__value = orelse()

    state = State((assign_body, assign_orelse, body, orelse))
    what = "`and` or `or`" if computes_both else "the conditional expression"
    choose(test, assign_body, assign_orelse, state, what, computes_both=computes_both)
    return (
        tessera__value.read()
        if isinstance(tessera__value, Unusable)
        else tessera__value
    )


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
    blocks = [traced_block(run, state, before, where) for run in (body, orelse)]
    merge = Merge(where, state)
    keys = dict.fromkeys((*blocks[0].changes, *blocks[1].changes))
    first, second = (state.trees(block.end, keys) for block in blocks)
    merged = {key: merge.merged(key, first[key], second[key]) for key in keys}
    merge.require_agreement()
    results = _cond(predicate, blocks, merge, computes_both)
    numbers = dict(zip(merge.numbers, results, strict=True))
    state.write(state.updated(before, filled(merged, numbers)))
    state.require_same_order((block.end for block in blocks), where)


def _cond(
    predicate: Any, blocks: Sequence[Block], merge: Merge, computes_both: bool
) -> Sequence[Any]:
    """The outputs of ``cond``: one for each number of the merge, in order."""
    has_effects = any(block.program.effects for block in blocks)
    if not merge.numbers and not has_effects:
        return []

    def way(block: Block, first: bool) -> Callable[[], list[Any]]:
        def run() -> list[Any]:
            arrays = jaxprs.evaluate(block.program)
            outputs = dict(zip(block.outputs, arrays, strict=True))
            return [
                number.cast(outputs.get(id(leaf), leaf), other)
                for number in merge.numbers
                for leaf, other in [number.pair if first else number.pair[::-1]]
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
