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
from typing import Any, Final, TypeAlias, TypeVar

from tessera.analysis.tables import aligned, format_seconds
from tessera.errors import UnknownPassError, did_you_mean
from tessera.graph.compile_stages import Compiled, Lowered, Traced
from tessera.graph.function import Function
from tessera.graph.tracer.declared_layouts import Options
from tessera.graph.training_steps import Step
from tessera.jax_compat import jaxprs, mlir

__all__ = ["Explanation", "StageView", "trace"]

# The entry of a batch that a model takes.
_INPUT: Final = "input"
_PHASES: Final = ("trace", "passes", "lower", "compile")
_HINT: Final = (
    'details: .stage("trace"), .stage("passes"), .stage("lower"), .stage("compile"); '
    "all of them: .as_text(full=True)"
)

# A title and a text.
Section: TypeAlias = tuple[str, str]

_T = TypeVar("_T")


@dataclass(frozen=True, repr=False)
class Explanation:
    """A step at every phase; prints as a summary, and computes details on request.

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

    def diff(self, name: str | None = None) -> str:
        """The lines of the graph that one pass changed, as a unified diff.

        Args:
          name: The pass; None is each that changed something, in order.

        Raises:
          UnknownPassError: [T307] there is no such pass.
        """
        if name is not None:
            return self.traced.diff(name)
        names = [record.name for record in self.traced.passes[1:]]
        return "\n".join(filter(None, map(self.traced.diff, names)))

    def stage(self, name: str, *, hlo: bool = False) -> "StageView":
        """One phase alone, which prints as text.

        Args:
          name: ``trace``, ``passes``, ``lower`` or ``compile``; nothing that comes
            after it is computed.
          hlo: Whether ``compile`` shows its module too.

        Raises:
          UnknownPassError: [T307] there is no such phase.
        """
        sections = {
            "trace": self._traced,
            "passes": self._passes,
            "lower": self._lowered,
            "compile": self._compiled,
        }
        if name not in sections:
            raise UnknownPassError(
                f"a step has no stage {name!r}", fix=did_you_mean(name, sections)
            )
        return StageView(tuple(sections[name](hlo)))

    def summary(self) -> str:
        """Phases with sizes and times, collectives by axis, memory per device."""
        header = self.traced.as_text().partition("\ninputs:")[0]
        columns = ["phase", "size", "time"]
        phases = aligned(columns, self._phases(), right=columns[1:])
        ledger, memory = self.compiled.collectives, self.compiled.memory
        return "\n\n".join([header, phases, ledger.summary(), memory.as_text()])

    def as_text(self, *, full: bool = False, hlo: bool = False) -> str:
        """The summary; then, on request, every phase in order.

        Args:
          full: Whether to add all equations, the diff of each pass, the lowered module
            with the layout of each operation, and each collective.
          hlo: Whether to add the compiled module as well.
        """
        if not (full or hlo):
            return f"{self.summary()}\n\n{_HINT}"
        phases = [self.stage(name, hlo=hlo).as_text() for name in _PHASES]
        return "\n\n".join([self.summary(), *phases])

    def __str__(self) -> str:
        return self.as_text()

    __repr__ = __str__

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

    def _traced(self, _: bool) -> Iterator[Section]:
        entry = f" of batch[{self.field!r}]" if self.field else ""
        yield (f"1 trace{entry}", self.traced.as_text())

    def _passes(self, _: bool) -> Iterator[Section]:
        lines = []
        for record in self.traced.passes[1:]:
            if record.skipped:
                lines.append(f"--- {record.name}: skipped")
                continue
            diff = self.diff(record.name)
            lines.append(f"--- {record.name}: {record.seconds * 1e3:.1f} ms")
            lines.append(diff or "    changes nothing")
        yield ("2 passes", "\n".join(lines))

    def _lowered(self, _: bool) -> Iterator[Section]:
        if self.traced.graph.mesh is None:
            yield ("3 lower: one device, every array is whole", self.lowered.as_text())
            return
        text = mlir.propagated_text(self.lowered.jax)
        yield ("3 lower: each operation with its layout", text)

    def _compiled(self, hlo: bool) -> Iterator[Section]:
        compiled = self.compiled
        yield ("4 compile: each collective", compiled.collectives.as_text())
        yield ("4 compile: memory", compiled.memory.as_text())
        if hlo:
            yield ("4 compile: module", compiled.as_text())


@dataclass(frozen=True, slots=True, repr=False)
class StageView:
    """One phase of a step; prints as text."""

    sections: tuple[Section, ...]

    def as_text(self) -> str:
        """Each section under its title."""
        return "\n\n".join(f"=== {title} ===\n{text}" for title, text in self.sections)

    __str__ = as_text
    __repr__ = as_text


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
      collectives by mesh axis with bytes per device, and memory per device.
      ``as_text(full=True)`` adds the equations with the user's lines, what each pass
      changed, each operation with its layout, and each collective with the line that
      caused it. ``stage`` shows one phase, ``diff`` a pass.

    Example:
      >>> import jax.numpy as jnp
      >>> explanation = trace(lambda x: jnp.sin(x).sum(), jnp.ones((2, 2)))
      >>> "sin" in explanation.stage("trace").as_text()
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
