# SPDX-License-Identifier: Apache-2.0
"""Binds the arguments of a call to the parameters of a function."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tessera.errors import ArgumentError, did_you_mean


def bind_call(
    signature: inspect.Signature,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    name: str,
) -> inspect.BoundArguments:
    """Bind arguments as Python does.

    Args:
      signature: Of the function.
      args: Positional arguments.
      kwargs: Keyword arguments.
      name: The function's name in messages.

    Raises:
      ArgumentError: [T301] the function does not accept them.

    Example:
      >>> def scaled(x, factor=2): ...
      >>> bind_call(inspect.signature(scaled), (1, 2, 3), {}, name="scaled")
      Traceback (most recent call last):
      ...
      tessera.errors.ArgumentError: [T301] 'scaled' cannot be called like this: too many
      positional arguments
        got: 3 positional arguments
        fix: call it as scaled(x, factor=2)
        docs: https://tessera-spmd.github.io/tessera/errors/T301.html
    """
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        plural = "s" if len(args) != 1 else ""
        named = ", ".join(map(repr, kwargs))
        names = [*signature.parameters]
        unknown = [keyword for keyword in kwargs if keyword not in names]
        hint = f"\n{did_you_mean(unknown[0], names)}" if unknown else ""
        raise ArgumentError(
            f"{name!r} cannot be called like this: {error}",
            got=f"{len(args)} positional argument{plural}"
            + (f", and by keyword {named}" if named else ""),
            fix=f"call it as {name}{_without_hints(signature)}{hint}",
        ) from None


def refuse_options(
    given: Mapping[str, Any],
    function: Callable[..., Any],
    elsewhere: Mapping[str, str],
) -> None:
    """Refuse options that a function of Tessera does not have.

    Args:
      given: They.
      function: The function.
      elsewhere: Those that its like in JAX or PyTorch has, which are unset or False by
        default, and what to write.

    Raises:
      ArgumentError: [T301] there is one.
    """
    for name, value in given.items():
        if name not in elsewhere or value:
            known = inspect.signature(function).parameters.values()
            names = [p.name for p in known if p.kind is not p.VAR_KEYWORD]
            raise ArgumentError(
                f"{function.__name__!r} has no option {name!r}",
                got=f"{name}={value!r}",
                fix=elsewhere.get(name) or did_you_mean(name, names),
            )


def _without_hints(signature: inspect.Signature) -> inspect.Signature:
    """The signature without annotations, to show how to call the function."""
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return inspect.Signature(bare)
