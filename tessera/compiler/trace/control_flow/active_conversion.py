# SPDX-License-Identifier: Apache-2.0
"""The conversion that is under way: a trace of functions whose source is converted.

It remembers what was refused. A refusal is an exception, and the user's code may catch
it, where Python would have caught nothing; so it is raised again when the trace ends.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from tessera import scope
from tessera.compiler.trace.control_flow.mutable_places import (
    Holder,
    differences,
    holder_of,
)
from tessera.errors import ControlFlowError

# What JAX raises where Python asks for the numbers of a traced value.
NEEDS_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerIntegerConversionError,
)


# What messages call the value that a function returns.
RETURNED_NAME = "the value returned"


@dataclass(frozen=True, eq=False)
class Ambiguous:
    """A container that is one of two, which the program decides when it runs.

    Reading it is fine. Changing it would have to change the one that it is.
    """

    holder: Holder
    content: Mapping[Any, Any]
    where: str

    @classmethod
    def now(cls, thing: Any, name: str, where: str) -> "Ambiguous":
        """A thing that must not be changed from now on."""
        holder = holder_of(thing, name, False)
        return cls(holder, holder.content(), where)

    def check(self) -> None:
        """Raise [T319] if it was changed."""
        if differences(self.content, self.holder.content()):
            raise ControlFlowError(
                f"{self.holder.path!r} is changed after {self.where}, where it is one "
                "of two",
                got=f"a {type(self.holder.thing).__name__} that is another object on "
                "each way; which one is only known when the program runs",
                fix="change a copy, such as dict(x) or list(x), or assign to its "
                "entries on both ways instead of to the variable",
            )


@dataclass(eq=False)
class Conversion:
    """A trace whose functions are converted.

    Attributes:
      package: The top-level package of the function that is traced.
      outside: Things that hold values and outlive the trace, by id.
      failures: Functions that could not be converted, and why.
      ambiguous: Containers that must not be changed any more.
      returned: Those that must not be once the function that returns them has ended.
      hidden: What libraries keep and have given to the code, and what it held before.
      merged: What merges of two ways made, by id.
      locked: NumPy arrays that must not be written into until the trace ends.
      asked: The user's lines that asked a traced value for its number.
      blocks: How many branches and turns are being traced, one inside the other.
    """

    package: str
    outside: dict[int, Any] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    ambiguous: list[Ambiguous] = field(default_factory=list)
    returned: list[tuple[Any, str, str]] = field(default_factory=list)
    hidden: list[tuple[Holder, Mapping[Any, Any]]] = field(default_factory=list)
    merged: dict[int, Any] = field(default_factory=dict)
    locked: list[np.ndarray[Any, Any]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    blocks: int = 0
    _refusal: BaseException | None = None

    def refuse(self, error: BaseException) -> None:
        """Let the trace fail with this error, whoever may catch it before."""
        if self._refusal is None:
            self._refusal = error

    def note_ambiguous(self, thing: Any, name: str, where: str) -> None:
        """Let a container not be changed any more, as it is one of two."""
        if isinstance(thing, np.ndarray):
            if thing.flags.writeable:
                thing.flags.writeable = False
                self.locked.append(thing)
        elif name.startswith(RETURNED_NAME):
            self.returned.append((thing, name, where))
        else:
            self.ambiguous.append(Ambiguous.now(thing, name, where))

    def end_function(self) -> None:
        """Let what a function returns not be changed by others, if it is one of two."""
        self.ambiguous += [Ambiguous.now(*each) for each in self.returned]
        self.returned.clear()

    def note_hidden(self, holders: Iterable[Holder]) -> None:
        """Let blocks not change what a library keeps and has given to their code."""
        for holder in holders:
            self.outside[id(holder.thing)] = holder.thing
            self.hidden.append((holder, holder.content()))

    def require_hidden_unchanged(self, what: str) -> None:
        """Raise [T319] if a block changed what a library keeps."""
        for holder, content in self.hidden:
            if differences(content, holder.content()):
                holder.fill(content)
                raise outlives(holder.path, what)

    def require_nothing_refused(self, but: BaseException | None = None) -> None:
        """Raise what was refused first, or what was changed and must not be.

        Args:
          but: What ends the trace by itself.
        """
        if self._refusal is not None and self._refusal is not but:
            raise self._refusal
        if but is not None:
            return
        if self.asked:
            raise self.value_error(f" at {self.asked[0]}", "an error that was caught")
        for each in self.ambiguous:
            each.check()

    def value_error(self, where: str, got: str) -> ControlFlowError:
        """What is raised where Python needs a number that only the program knows."""
        runs_plainly = "".join(
            f"\n{name} runs as it is: {why}" for name, why in self.failures.items()
        )
        return ControlFlowError(
            f"Python needs a value{where} that is only known when the program runs",
            got=got + runs_plainly,
            fix="use `if`, `while` or `for` in a function that is defined in a file, "
            "or jnp.where, jax.lax.cond and jax.lax.while_loop\n"
            "a setting that Python decides on has to be a Python value, not an array",
        )

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Forget what is refused inside, if it ends with an exception."""
        lists: list[list[Any]] = [self.ambiguous, self.returned, self.asked]
        refusal, counts = self._refusal, list(map(len, lists))
        try:
            yield
        except Exception:
            self._refusal = refusal
            for each, count in zip(lists, counts, strict=True):
                del each[count:]
            raise


def outlives(name: str, what: str) -> ControlFlowError:
    """What is raised where a block changes what is there after the call."""
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
def opened(conversion: Conversion | None) -> Iterator[None]:
    """Let functions that are called be converted, or not."""
    token = _open.set(conversion)
    try:
        with scope.calling(None if conversion is None else _converted):
            yield
    finally:
        _open.reset(token)
        for array in [] if conversion is None else conversion.locked:
            array.flags.writeable = True


def _converted(function: Callable[..., Any]) -> Callable[..., Any]:
    """A user's function that is called in the middle of a conversion."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        from tessera.compiler.trace.control_flow.converted_calls import converted_call

        return converted_call(function, args, kwargs)

    return run
