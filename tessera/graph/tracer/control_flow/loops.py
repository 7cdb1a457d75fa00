# SPDX-License-Identifier: Apache-2.0
"""``while`` and ``for``: Python runs them, so the program has their iterations in turn.

How often a loop turns must be known; whether a ``break`` or ``return`` is met may be
traced. For as many turns as the program decides there is ``jax.lax.while_loop``.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tessera.errors import ControlFlowError
from tessera.graph.tracer.control_flow.conversion_state import recorded
from tessera.graph.tracer.control_flow.merge_points import describe
from tessera.graph.tracer.control_flow.user_code import user_line
from tessera.jax_compat import jaxprs


def turns(holds: Any) -> Any:
    """The condition of a ``while``.

    Raises:
      ControlFlowError: [T319] it is traced.
    """
    if not isinstance(holds, jaxprs.Tracer):
        return holds
    raise ControlFlowError(
        f"how often the `while` at {user_line()} turns is only known when the program "
        "runs",
        got=f"a condition that is {describe(holds)}, or a `break` on such a one",
        fix="use jax.lax.while_loop, or `for i in range(limit)` with `if` and `break`, "
        "where `limit` is a number of Python",
    )


def items(
    iterated: Iterable[Any], left: Callable[[], tuple[Any, ...]]
) -> Iterator[Any]:
    """What a ``for`` loops over, until a ``break`` or ``return`` that Python knows.

    Args:
      iterated: What is looped over.
      left: Whether a ``break``, and whether a ``return``, was met.
    """
    for item in iterated:
        yield item
        if _is_left(iterated, left()):
            return


@recorded
def _is_left(iterated: Iterable[Any], flags: tuple[Any, ...]) -> bool:
    """Whether Python knows that a loop is left.

    Raises:
      ControlFlowError: [T319] only the program knows, and what is looped over is an
        iterator: what is left of it would depend on it.
    """
    if any(flag is True for flag in flags):
        return True
    is_traced = any(isinstance(flag, jaxprs.Tracer) for flag in flags)
    if is_traced and isinstance(iterated, Iterator):
        raise ControlFlowError(
            f"an iterator is left by a `break` or `return` at {user_line()}, "
            "which is only known when the program runs",
            got=f"a {type(iterated).__name__}, of which the items that are left "
            "would depend on it",
            fix="loop over a list, such as list(items)",
        )
    return False
