# SPDX-License-Identifier: Apache-2.0
"""The state of the trace that converts source now, and the errors it has recorded.

The user's code may catch an error that the conversion raises, where plain Python would
have raised nothing. So the first error is recorded, and raised again at the end.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import jax

from tessera.errors import BranchError, ControlFlowError

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

# What JAX raises where Python asks for the numbers of a traced value.
NEEDS_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerIntegerConversionError,
)


@dataclass(eq=False)
class Conversion:
    """A trace whose functions are converted.

    Attributes:
      package: The top-level package of the function that is traced.
      own: What the call has made or was given, by id, and how many blocks were being
        traced then. Nothing else may be changed.
      visible: Ids of the objects that the function of JAX being called was given: what
        else it hands to a user's function is new. None in the user's code.
      callbacks: What libraries are given in place of the user's functions.
      failures: Functions that could not be converted, and why.
      value_requests: The user's lines that needed the number of a traced value.
      blocks: The nesting depth of the branches and loop bodies being traced.
    """

    package: str
    own: dict[int, tuple[Any, int]] = field(default_factory=dict)
    visible: frozenset[int] | None = frozenset()
    callbacks: dict[Any, Any] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    value_requests: list[str] = field(default_factory=list)
    blocks: int = 0
    _refusal: BaseException | None = None

    def adopt(self, values: Iterable[Any]) -> None:
        """Let the call change some objects from now on."""
        for value in values:
            self.own.setdefault(id(value), (value, self.blocks))

    @contextmanager
    def block(self) -> Iterator[None]:
        """A block is traced; what it makes is its own, and ends with it."""
        self.blocks += 1
        try:
            yield
        finally:
            for key in [k for k, (_, at) in self.own.items() if at == self.blocks]:
                del self.own[key]
            self.blocks -= 1

    def refuse(self, error: BaseException) -> None:
        """Record an error: the trace fails with it even if user code catches it."""
        if self._refusal is None:
            self._refusal = error

    def require_nothing_refused(self, but: BaseException | None = None) -> None:
        """Raise the first recorded error.

        Args:
          but: An exception that already ends the trace.
        """
        if self._refusal is not None and self._refusal is not but:
            raise self._refusal
        if but is None and self.value_requests:
            raise self.value_error(
                self.value_requests[0], "its number or its text, outside of `print`"
            )

    def value_error(self, where: str, got: str) -> ControlFlowError:
        """The error [T319] for Python code that needs the number of a traced value."""
        runs_plainly = "".join(
            f"\n{name} runs as it is: {why}" for name, why in self.failures.items()
        )
        return ControlFlowError(
            f"Python needs a value at {where} that is only known when the program runs",
            got=got + runs_plainly,
            fix="use `if` in a function that is defined in a file, or jnp.where and "
            "jax.lax.cond; for loops jax.lax.fori_loop and jax.lax.while_loop\n"
            "for `a < b < c`, max, min, any, all, int and float write `a < b and "
            "b < c`, jnp.maximum, jnp.minimum, jnp.any, jnp.all and x.astype\n"
            "leave out x.item() and x.tolist(): arrays compute as numbers do\n"
            "to show values, use print(x), with an f-string as its argument\n"
            "a Python value stays one unless a transformation of JAX takes it as an "
            "argument: close over it, or use functools.partial",
        )


open_conversion: ContextVar[Conversion | None] = ContextVar(
    "tessera_conversion", default=None
)


def current() -> Conversion | None:
    """The conversion of the function that is being traced, if it is converted."""
    return open_conversion.get()


def recorded(
    operator: Callable[_Parameters, _Result],
) -> Callable[_Parameters, _Result]:
    """An operator whose errors are recorded, even if the user's code catches them."""

    @functools.wraps(operator)
    def run(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        try:
            return operator(*args, **kwargs)
        except (BranchError, ControlFlowError) as error:
            conversion = current()
            if conversion is not None:
                conversion.refuse(error)
            raise

    return run
