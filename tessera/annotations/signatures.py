# SPDX-License-Identifier: Apache-2.0
"""The signature by which a function is called, behind wrappers that pass calls on."""

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any, Final

_KINDS: Final = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)
_KINDS_OF_ANY: Final = {
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.VAR_KEYWORD,
}
_ANY: Final = inspect.Signature(
    [
        inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
        inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
    ]
)


def own_signature(function: Callable[..., Any]) -> inspect.Signature:
    """The signature of a function itself, not of what it wraps.

    A callable that does not say takes anything.

    Example:
      >>> print(own_signature(len), own_signature(type))
      (obj, /) (*args, **kwargs)
    """
    try:
        return inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return _ANY


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """The signature that says what a function's arguments are called.

    A wrapper that takes ``(*args, **kwargs)`` passes them on to what it wraps. Another
    one has its own parameters: ``functools.wraps`` does not give it those of another.
    """
    if not (hasattr(function, "__wrapped__") and passes_calls_on(function)):
        return own_signature(function)
    found = signature_of(function.__wrapped__)
    parameters = list(found.parameters.values())
    if isinstance(function, MethodType) and parameters[:1]:
        return found.replace(parameters=parameters[1:])  # without self
    return found


def passes_calls_on(function: Callable[..., Any]) -> bool:
    """Whether a function takes ``(*args, **kwargs)``, as most wrappers do."""
    parameters = own_signature(function).parameters.values()
    kinds = {parameter.kind for parameter in parameters}
    return inspect.Parameter.VAR_POSITIONAL in kinds and kinds <= _KINDS_OF_ANY


def argument_names(signature: inspect.Signature, count: int) -> list[str]:
    """What a function calls its first positional arguments.

    Example:
      >>> def scaled(x, factor, *more): ...
      >>> argument_names(inspect.signature(scaled), 3)
      ['x', 'factor', 'args[2]']
    """
    names = [name for name, p in signature.parameters.items() if p.kind in _KINDS]
    return [*names[:count], *(f"args[{i}]" for i in range(len(names), count))]
