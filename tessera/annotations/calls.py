# SPDX-License-Identifier: Apache-2.0
"""Binds the arguments of a call to the parameters of a function."""

import inspect
from collections.abc import Mapping, Sequence
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


def _without_hints(signature: inspect.Signature) -> inspect.Signature:
    """The signature without annotations, to show how to call the function."""
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return inspect.Signature(bare)
