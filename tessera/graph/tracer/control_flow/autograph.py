# SPDX-License-Identifier: Apache-2.0
"""AutoGraph: trace a function as it is, and convert its source only if that fails.

A function that needs the number or the text of a traced value, or that prints, is
traced again with its source converted, and so are the functions that it calls. Before
that, what the first trace changed outside of the function is restored.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from tessera.errors import ControlFlowError
from tessera.graph.tracer.control_flow.active_conversion import (
    NEEDS_VALUE,
    Conversion,
    conversion_context,
)
from tessera.graph.tracer.control_flow.reachability import Reach
from tessera.graph.tracer.control_flow.user_code import (
    is_user_code,
    line_of,
    prints,
)
from tessera.jax_compat import traces

_Result = TypeVar("_Result")

# What NumPy and JAX raise where Python asks for the truth of several.
_AMBIGUOUS = "The truth value of an array with more than one element is ambiguous"

# Functions that were converted before: they need not be traced as they are.
_seen: "weakref.WeakSet[Any]" = weakref.WeakSet()


class ExternalState:
    """The objects that outlive a trace and that the function can change.

    Their content is recorded when this is made.

    Attributes:
      arrays: NumPy arrays, which nothing restores.

    Args:
      function: The user's function.
      given: Values that it is given beside arrays.
    """

    def __init__(self, function: Any, arguments: Iterable[Any]) -> None:
        self.arguments = list(arguments)
        body = getattr(function, "body", function)
        reach = Reach([body], [("", value) for value in self.arguments], None)
        self._before = [(owner, owner.content()) for owner in reach.mutable_objects]
        self.arrays, self._iterators = reach.arrays, reach.iterators
        self._is_traced = False

    @property
    def targets(self) -> dict[int, Any]:
        """The mutable objects, by id."""
        return {id(owner.target): owner.target for owner, _ in self._before}

    def restore(self) -> None:
        """Undo what earlier traces changed; called before each trace.

        Raises:
          ControlFlowError: [T319] they may have moved on an iterator.
        """
        for owner, before in self._before:
            owner.fill(before)
        for name, iterator in self._iterators if self._is_traced else ():
            raise ControlFlowError(
                f"{name!r} is moved on by a function that is traced more than once",
                got=f"a {type(iterator).__name__} from outside of it",
                fix="take from it before the call, and pass what it gives",
            )
        self._is_traced = True


def with_control_flow(
    run: Callable[[], _Result], function: Callable[..., Any], outside: ExternalState
) -> _Result:
    """Trace a function as it is; where that cannot be done, with its source converted.

    Args:
      run: Traces it.
      function: The user's function.
      outside: What it can change that outlives the trace.

    Raises:
      ControlFlowError: [T319] the trace meets what cannot be converted.
    """
    if function not in _seen and not any(map(prints, (function, *outside.arguments))):
        value_requests: list[str] = []
        try:
            with (
                conversion_context(None),
                _value_requests_recorded(value_requests, text=True),
            ):
                result = run()
            if not value_requests:
                return result
        except Exception as error:
            if not value_requests and not _needs_value(error):
                raise
        _seen.add(function)
    module = getattr(function, "__module__", None) or ""
    conversion = Conversion(module.partition(".")[0], outside.targets)
    conversion.lock(outside.arrays)
    try:
        with (
            conversion_context(conversion),
            _value_requests_recorded(conversion.value_requests),
        ):
            result = run()
    except NEEDS_VALUE as error:
        conversion.require_nothing_refused(but=error)
        raise _unsupported_error(error, conversion) from error
    except Exception as error:
        conversion.require_nothing_refused(but=error)
        raise
    conversion.require_nothing_refused()
    return result


@contextmanager
def _value_requests_recorded(found: list[str], *, text: bool = False) -> Iterator[None]:
    """Record the user's lines that need the number, or the text, of a traced value.

    JAX answers with an exception, which the user's code may catch.
    """

    def note(kind: str, frame: FrameType) -> None:
        if (text or kind != "text") and is_user_code(frame.f_code, frame.f_globals):
            found.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")

    with traces.values_watched(note):
        yield


def _needs_value(error: Exception) -> bool:
    return isinstance(error, NEEDS_VALUE) or str(error).startswith(_AMBIGUOUS)


def _unsupported_error(error: Exception, conversion: Conversion) -> ControlFlowError:
    where, line = line_of(error)
    got = str(error).strip().partition("\n")[0] + (f"\nin: {line}" if line else "")
    return conversion.value_error(where, got)
