# SPDX-License-Identifier: Apache-2.0
"""``graph.trace``: shows a step at every phase of its compilation, from jaxpr to XLA.

It compiles and never runs, so it works on meshes that this machine does not have.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeVar

from tessera.analysis.tables import aligned, format_seconds
from tessera.graph.compile_stages import Compiled, Lowered, Traced
from tessera.graph.function import Function
from tessera.graph.tracer.declared_layouts import Options
from tessera.graph.training_steps import Step
from tessera.jax_compat import jaxprs, mlir
from tessera.jax_compat.tracebacks import at_boundary

__all__ = ["Explanation", "trace"]

# The entry of a batch that a model takes.
_INPUT: Final = "input"
_HINT: Final = (
    "details: .traced.as_text(), .traced.diff(name of a pass), .layouts(), "
    ".compiled.collectives"
)

_T = TypeVar("_T")


@dataclass(frozen=True, repr=False)
class Explanation:
    """A step at every phase; prints as a summary.

    Attributes:
      traced: The step as traced, and after each pass.
      field: The entry of a batch that it was traced with, where not with the whole.
      seconds: Wall time of each phase that has run: ``trace``, ``lower``, ``compile``.
    """

    traced: Traced
    field: str = ""
    seconds: dict[str, float] = dataclasses.field(default_factory=dict, compare=False)

    @cached_property
    def lowered(self) -> Lowered:
        """The step as StableHLO."""
        return _timed(self.seconds, "lower", self.traced.lower)

    @cached_property
    def compiled(self) -> Compiled:
        """The step as the program of one device."""
        return _timed(self.seconds, "compile", self.lowered.compile)

    def layouts(self) -> str:
        """The lowered module with the layout of each operation, as Shardy propagates.

        On one device, where every array is whole, it is the lowered module.
        """
        if self.traced.graph.mesh is None:
            return self.lowered.as_text()
        return mlir.propagated_text(self.lowered.jax)

    def as_text(self) -> str:
        """Phases with sizes and times, collectives by axis, memory per device."""
        header = self.traced.as_text().partition("\ninputs:")[0]
        if self.field:
            header += f"\ntraced with batch[{self.field!r}]"
        columns = ["phase", "size", "time"]
        phases = aligned(columns, self._phases(), right=columns[1:])
        ledger, memory = self.compiled.collectives, self.compiled.memory
        parts = [header, phases, ledger.summary(), memory.as_text(), _HINT]
        return "\n\n".join(parts)

    __str__ = as_text
    __repr__ = as_text

    def _phases(self) -> Iterator[list[str]]:
        traced, *passes = self.traced.passes
        # Each phase has run when the compiled program is there.
        compiled, lowered = self.compiled.as_text(), self.lowered.as_text()
        yield ["trace", _equations(traced.graph.program), self._time("trace")]
        for record in passes:
            spent = "skipped" if record.skipped else format_seconds(record.seconds)
            yield [f"  {record.name}", _equations(record.graph.program), spent]
        count = lowered.count(" = ")
        yield ["lower", f"{count} operations", self._time("lower")]
        count = compiled.count(" = ")
        yield ["compile", f"{count} instructions", self._time("compile")]

    def _time(self, phase: str) -> str:
        return format_seconds(self.seconds.get(phase))


def _timed(seconds: dict[str, float], phase: str, run: Callable[[], _T]) -> _T:
    """Run a phase and record its wall time."""
    start = time.perf_counter()
    result = run()
    seconds[phase] = time.perf_counter() - start
    return result


def _equations(program: jaxprs.Program) -> str:
    return f"{_count(program)} equations"


def _count(program: jaxprs.Program) -> int:
    """Number of equations, nested programs included."""
    return sum(
        1 + sum(map(_count, jaxprs.inner_programs(equation)))
        for equation in jaxprs.equations(program)
    )


@at_boundary
def trace(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Show how a model or a step is traced, transformed, laid out and compiled.

    Args:
      model: A step, a stage, a ``ts.function`` or a plain function; a plain function is
        treated as a training step.
      *args: Its arguments; ``jax.ShapeDtypeStruct`` may stand for an array. A model
        that cannot be traced with a batch, a dict, takes ``batch["input"]``, as in the
        step that calls it; the explanation says so.
      **kwargs: The same by name.

    Returns:
      An explanation that prints a summary: the phases with sizes and times, the
      collectives by mesh axis with bytes per device, and memory per device. Its
      ``traced`` has the equations with the user's lines and what each pass changed,
      ``layouts()`` each operation with its layout, and ``compiled`` each collective
      with the line that caused it.

    Example:
      >>> import jax.numpy as jnp
      >>> explanation = trace(lambda x: jnp.sin(x).sum(), jnp.ones((2, 2)))
      >>> "sin" in explanation.traced.as_text()
      True
    """
    if not isinstance(model, Function):
        name = getattr(model, "__name__", type(model).__name__)
        model = Step(model, Options(name=name, split_batch=True, batch=None))
    seconds: dict[str, float] = {}
    try:
        traced = _timed(seconds, "trace", lambda: model.trace(*args, **kwargs))
        return Explanation(traced, seconds=seconds)
    except Exception:
        batch = args[0] if len(args) == 1 and not kwargs else None
        if isinstance(batch, Mapping) and _INPUT in batch:
            with suppress(Exception):  # the first error says more than a second one
                entry = batch[_INPUT]
                traced = _timed(seconds, "trace", lambda: model.trace(entry))
                return Explanation(traced, _INPUT, seconds)
        raise
