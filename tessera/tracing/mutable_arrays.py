# SPDX-License-Identifier: Apache-2.0
"""Mutable arrays, ``jax.new_ref``: where a function may take them, and where not."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax

from tessera.errors import WriteBackError
from tessera.foundations.context import holding
from tessera.jax_compat import jaxprs, traces

# The mutable arrays that the open call is given.
_given: ContextVar[tuple[Any, ...]] = ContextVar("given_references", default=())


def is_reference(leaf: Any) -> bool:
    """Whether a leaf is a mutable array, or the shape of one."""
    return isinstance(leaf, jax.Ref) or (
        isinstance(leaf, jax.ShapeDtypeStruct) and getattr(leaf, "is_ref", False)
    )


def check_results(result: Sequence[Any]) -> None:
    """Raise [T320] where the leaves of a result are mutable arrays, or no arrays."""
    for leaf in result:
        if isinstance(leaf, jax.Ref):
            raise WriteBackError(
                "a mutable array is returned, and cannot be given to the caller",
                got=str(jax.typeof(leaf)),
                fix="return its value: ref[...]",
            )
        if isinstance(leaf, jaxprs.Tracer) and not hasattr(jax.typeof(leaf), "shape"):
            raise WriteBackError(
                "a value that is no array is returned",
                got=str(jax.typeof(leaf)),
                fix="return arrays; jax.jit returns tokens and other types",
            )


def refuse_on_one_device(array: Any) -> None:
    """Raise [T320] for a closed-over array of one device that is mutable."""
    if isinstance(array, jax.Ref):
        raise WriteBackError(
            "a mutable array that a function closes over lies on one device",
            got=f"{jax.typeof(array)}, and a mesh of several",
            fix="pass it to the function as an argument",
        )


@contextmanager
def given(references: Sequence[Any]) -> Iterator[None]:
    """Open a call that is given some mutable arrays.

    Raises:
      WriteBackError: [T320] one of them is given twice.
    """
    origins = tuple(map(traces.get_referent, references))
    for index, reference in enumerate(references):
        if any(origins[index] is other for other in origins[:index]):
            raise WriteBackError(
                "a mutable array is given to the call a second time",
                got=f"one {jax.typeof(reference)} in two places of the arguments",
                fix="pass it once, or pass another one: jax.new_ref(ref[...])",
            )
    with holding(_given, origins):
        yield


def check_captured(captured: Sequence[Any]) -> None:
    """Raise [T320] where the open call is given a mutable array that is closed over.

    Args:
      captured: The arrays that a program closes over.
    """
    origins = _given.get()
    for array in captured if origins else ():
        if any(traces.get_referent(array) is origin for origin in origins):
            raise WriteBackError(
                "a mutable array is closed over, and is given to the call as well",
                got=str(jax.typeof(array)),
                fix="pass it to the function as an argument alone",
            )
