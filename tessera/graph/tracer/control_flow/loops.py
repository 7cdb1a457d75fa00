# SPDX-License-Identifier: Apache-2.0
"""``while`` and ``for``: Python runs them, so the program has their iterations in turn.

How often a loop turns must be known; whether a ``break`` or ``return`` is met may be
traced. For as many turns as the program decides there is ``jax.lax.while_loop``.
"""

from collections.abc import Callable, Iterator
from typing import Any

from tessera.errors import ControlFlowError
from tessera.graph.tracer.control_flow.block_state import State
from tessera.graph.tracer.control_flow.branches import choose
from tessera.graph.tracer.control_flow.merge_points import describe
from tessera.graph.tracer.control_flow.user_code import user_line
from tessera.jax_compat import jaxprs


def while_stmt(test: Callable[[], Any], body: Callable[[], None]) -> None:
    """A ``while``.

    Raises:
      ControlFlowError: [T319] its condition is traced.
    """
    while not isinstance(holds := test(), jaxprs.Tracer):
        if not holds:
            return
        body()
    raise ControlFlowError(
        f"how often the `while` at {user_line()} turns is only known when the program "
        "runs",
        got=f"a condition that is {describe(holds)}, or a `break` on such a one",
        fix="use jax.lax.while_loop, or `for i in range(limit)` with `if` and `break`, "
        "where `limit` is a number of Python",
    )


def for_stmt(
    iterated: Any, left: Callable[[], Any], body: Callable[[Any], None]
) -> None:
    """A ``for``; ``left`` is whether a ``break`` or ``return`` was met.

    Raises:
      ControlFlowError: [T319] that is traced, and what it loops over is an iterator:
        what is left of it would depend on it.
    """
    for item in iterated:
        is_left = left()
        if not isinstance(is_left, jaxprs.Tracer):
            if is_left:
                break
            body(item)
            continue
        if isinstance(iterated, Iterator):
            raise ControlFlowError(
                f"an iterator is left by a `break` or `return` at {user_line()}, "
                "which is only known when the program runs",
                got=f"a {type(iterated).__name__}, of which the items that are left "
                "would depend on it",
                fix="loop over a list, such as list(items)",
            )
        state = State((body,))
        choose(is_left, lambda: None, lambda item=item: body(item), state, "the `for`")
