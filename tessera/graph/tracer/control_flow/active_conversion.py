# SPDX-License-Identifier: Apache-2.0
"""The state of the trace that converts source now, and the errors it has recorded.

The user's code may catch an error that the conversion raises, where plain Python would
have raised nothing. So the first error is recorded, and raised again at the end.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from tessera.errors import ControlFlowError
from tessera.graph.tracer.control_flow.lower_jumps import RETURN_VALUE_NAME
from tessera.graph.tracer.control_flow.mutable_objects import (
    MutableObject,
    differences,
    mutable_object,
)
from tessera.tracing import scope

# What JAX raises where Python asks for the numbers of a traced value.
NEEDS_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerIntegerConversionError,
)


@dataclass(frozen=True, eq=False)
class Ambiguous:
    """A container that stands for one of two; which one is known only at run time.

    It may be read. A mutation would have to change the one that it stands for.
    """

    owner: MutableObject
    content: Mapping[Any, Any]
    where: str

    @classmethod
    def now(cls, value: Any, name: str, where: str) -> "Ambiguous":
        """Record the content of a value that must not be mutated from now on."""
        owner = mutable_object(value, name, False)
        return cls(owner, owner.content(), where)

    def check(self) -> None:
        """Raise [T319] if it was mutated."""
        if differences(self.content, self.owner.content()):
            raise ControlFlowError(
                f"{self.owner.path!r} is changed after {self.where}, where it is one "
                "of two",
                got=f"a {type(self.owner.target).__name__} that is another object on "
                "each way; which one is only known when the program runs",
                fix="change a copy, such as dict(x) or list(x), or assign to its "
                "entries on both ways instead of to the variable",
            )


@dataclass(eq=False)
class Conversion:
    """A trace whose functions are converted.

    Attributes:
      package: The top-level package of the function that is traced.
      outside: Mutable objects that outlive the trace, by id.
      failures: Functions that could not be converted, and why.
      ambiguous: Containers that must not be mutated any more.
      returned: Those that must not be mutated once the function has returned them.
      library_state: Containers that a library may keep, with their content.
      merged: Objects that merge points have made, by id.
      locked: NumPy arrays that must not be written into until the trace ends.
      value_requests: The user's lines that needed the number of a traced value.
      blocks: The nesting depth of the branches and loop bodies being traced.
    """

    package: str
    outside: dict[int, Any] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    ambiguous: list[Ambiguous] = field(default_factory=list)
    returned: list[tuple[Any, str, str]] = field(default_factory=list)
    library_state: list[tuple[MutableObject, Mapping[Any, Any]]] = field(
        default_factory=list
    )
    merged: dict[int, Any] = field(default_factory=dict)
    value_requests: list[str] = field(default_factory=list)
    blocks: int = 0
    locked: list[np.ndarray[Any, Any]] = field(default_factory=list)
    _refusal: BaseException | None = None

    def refuse(self, error: BaseException) -> None:
        """Record an error: the trace fails with it even if user code catches it."""
        if self._refusal is None:
            self._refusal = error

    def record_ambiguous(self, value: Any, name: str, where: str) -> None:
        """Record a container that stands for one of two: it must not be mutated."""
        if name.startswith(RETURN_VALUE_NAME):
            self.returned.append((value, name, where))
        else:
            self.ambiguous.append(Ambiguous.now(value, name, where))

    def lock(self, arrays: Iterable[np.ndarray[Any, Any]]) -> None:
        """Make NumPy arrays that a block can write into read-only from now on."""
        for array in arrays:
            if array.flags.writeable:
                array.flags.writeable = False
                self.locked.append(array)

    def unlock(self) -> None:
        """Make the arrays writeable again; the trace has ended."""
        for array in sorted(self.locked, key=_depth):  # a view after its base
            array.flags.writeable = True

    def end_function(self) -> None:
        """Forbid callers to mutate a returned container that stands for one of two."""
        self.ambiguous += [Ambiguous.now(*each) for each in self.returned]
        self.returned.clear()

    def record_library_state(self, mutable_objects: Iterable[MutableObject]) -> None:
        """Forbid blocks to mutate containers that a library keeps and has returned."""
        for owner in mutable_objects:
            self.outside[id(owner.target)] = owner.target
            self.library_state.append((owner, owner.content()))

    def require_library_state_unchanged(self, what: str) -> None:
        """Raise [T319] if a block mutated a container that a library keeps."""
        for owner, content in self.library_state:
            if differences(content, owner.content()):
                owner.fill(content)
                raise external_change_error(owner.path, what)

    def require_nothing_refused(self, but: BaseException | None = None) -> None:
        """Raise the first recorded error, or [T319] for a forbidden mutation.

        Args:
          but: An exception that already ends the trace.
        """
        if self._refusal is not None and self._refusal is not but:
            raise self._refusal
        if but is not None:
            return
        if self.value_requests:
            raise self.value_error(self.value_requests[0], "an error that was caught")
        for each in self.ambiguous:
            each.check()

    def value_error(self, where: str, got: str) -> ControlFlowError:
        """The error [T319] for Python code that needs the number of a traced value."""
        runs_plainly = "".join(
            f"\n{name} runs as it is: {why}" for name, why in self.failures.items()
        )
        return ControlFlowError(
            f"Python needs a value at {where} that is only known when the program runs",
            got=got + runs_plainly,
            fix="use `if`, `while` or `for` in a function that is defined in a file, "
            "or jnp.where, jax.lax.cond and jax.lax.while_loop\n"
            "a Python value stays one unless a transformation of JAX takes it as an "
            "argument: close over it, or use functools.partial",
        )

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Drop the errors recorded inside, if it ends with an exception."""
        lists: list[list[Any]] = [self.ambiguous, self.returned, self.value_requests]
        refusal, counts = self._refusal, list(map(len, lists))
        try:
            yield
        except Exception:
            self._refusal = refusal
            for each, count in zip(lists, counts, strict=True):
                del each[count:]
            raise


def _depth(array: Any) -> int:
    return 1 + _depth(array.base) if isinstance(array, np.ndarray) else 0


def external_change_error(name: str, what: str) -> ControlFlowError:
    """The error [T319] for a block that changes an object which outlives the call."""
    return ControlFlowError(
        f"{name!r} is changed in {what}, and outlives the call",
        got="a global variable, or what a function that is there before the call "
        "closes over: a program cannot change it when it runs",
        fix="pass it as an argument and assign into that, or return the new value",
    )


_open: ContextVar[Conversion | None] = ContextVar("tessera_conversion", default=None)


def current() -> Conversion | None:
    """The conversion of the function that is being traced, if it is converted."""
    return _open.get()


@contextmanager
def conversion_context(conversion: Conversion | None) -> Iterator[None]:
    """Convert the functions that are called inside, or none of them."""
    token = _open.set(conversion)
    try:
        with scope.calling(None if conversion is None else _converted):
            yield
    finally:
        _open.reset(token)
        if conversion is not None:
            conversion.unlock()


def _converted(function: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper that calls a user's function converted."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        from tessera.graph.tracer.control_flow.converted_calls import converted_call

        return converted_call(function, args, kwargs)

    return run
