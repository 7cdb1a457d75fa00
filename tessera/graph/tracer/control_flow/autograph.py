# SPDX-License-Identifier: Apache-2.0
"""AutoGraph: trace a function as it is, and convert its source only if that fails.

A function that needs the number or the text of a traced value, or that prints, is
traced again with its source converted, and so are the functions that it calls.
"""

import dataclasses
import reprlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from tessera.errors import ControlFlowError
from tessera.graph.tracer.control_flow import (
    conversion_state,
    converted_calls,
    printing,
)
from tessera.graph.tracer.control_flow.conversion_state import (
    NEEDS_VALUE,
    Conversion,
    open_conversion,
)
from tessera.graph.tracer.control_flow.user_code import (
    is_user_code,
    line_of,
    prints,
)
from tessera.jax_compat import traces
from tessera.tracing import scope

_Result = TypeVar("_Result")

# What NumPy and JAX raise where Python asks for the truth of several.
_AMBIGUOUS = "The truth value of an array with more than one element is ambiguous"

# Converted code calls ``str`` and other functions from here.
_CALLERS = tuple(
    module.__file__ for module in (conversion_state, converted_calls, printing)
)

_OF_DATACLASSES = (dataclasses.__file__, reprlib.__file__)

# Functions that were converted before: they need not be traced as they are.
_seen: "weakref.WeakSet[Any]" = weakref.WeakSet()


def with_control_flow(
    run: Callable[[], _Result], function: Callable[..., Any], statics: Iterable[Any]
) -> _Result:
    """Trace a function as it is; where that cannot be done, with its source converted.

    Args:
      run: Traces it.
      function: The user's function.
      statics: Its arguments that are no arrays, which may be functions that print.

    Raises:
      ControlFlowError: [T319] the trace meets what cannot be converted.
    """
    if function not in _seen and not any(map(prints, (function, *statics))):
        value_requests: list[str] = []
        try:
            with conversion_context(None), _requests_recorded(value_requests):
                result = run()
            if not value_requests:
                return result
        except Exception as error:
            if not value_requests and not _needs_value(error):
                raise
        _seen.add(function)
    module = getattr(function, "__module__", None) or ""
    conversion = Conversion(module.partition(".")[0])
    try:
        with (
            conversion_context(conversion),
            _requests_recorded(conversion.value_requests),
        ):
            result = run()
    except Exception as error:
        conversion.require_nothing_refused(but=error)
        if isinstance(error, NEEDS_VALUE):
            raise _unsupported_error(error, conversion) from error
        raise
    conversion.require_nothing_refused()
    return result


@contextmanager
def conversion_context(conversion: Conversion | None) -> Iterator[None]:
    """Convert the functions that are called inside, or none of them."""
    caller = None if conversion is None else converted_calls.as_callback
    with scope.holding(open_conversion, conversion), scope.calling(caller):
        yield


@contextmanager
def _requests_recorded(found: list[str]) -> Iterator[None]:
    """Record the user's lines that need the number or text of a traced value.

    JAX answers with an exception, which the user's code may catch, or a description.
    """

    def note(frame: FrameType | None) -> None:
        frame = _asking(frame)
        if frame is not None and is_user_code(frame.f_code, frame.f_globals):
            found.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")

    with traces.values_watched(note):
        yield


def _asking(frame: FrameType | None) -> FrameType | None:
    """The frame of the code that asks, beneath those that ask for it.

    The ``__repr__`` of a dataclass has no file, and is called by Python's own.
    """
    while frame is not None:
        caller = frame.f_back
        if frame.f_code.co_filename in _CALLERS:
            frame = caller
        elif caller is not None and caller.f_code.co_filename in _OF_DATACLASSES:
            frame = caller.f_back
        else:
            break
    return frame


def _needs_value(error: Exception) -> bool:
    return isinstance(error, NEEDS_VALUE) or str(error).startswith(_AMBIGUOUS)


def _unsupported_error(error: Exception, conversion: Conversion) -> ControlFlowError:
    where, line = line_of(error)
    got = str(error).strip().partition("\n")[0] + (f"\nin: {line}" if line else "")
    return conversion.value_error(where, got)
