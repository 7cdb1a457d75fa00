# SPDX-License-Identifier: Apache-2.0
"""``graph.trace``: everything that becomes of a step, from its equations to XLA's.

It compiles and never runs, so it works on meshes that this machine does not have.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from tessera.analysis.propagation import OpLayout, op_layouts
from tessera.analysis.propagation import as_text as layouts_as_text
from tessera.api.function import Function
from tessera.api.training_step import Step
from tessera.compiler.stages import Compiled, Lowered, Traced
from tessera.compiler.trace.declared_layouts import Options
from tessera.errors import UnknownPassError, did_you_mean
from tessera.mesh import Mesh

if TYPE_CHECKING:
    from tessera.debug.side_by_side import SideBySide

# What a model takes of a batch.
_INPUT: Final = "input"
_STAGES: Final = ("trace", "passes", "lower", "compile")


@dataclass(frozen=True, repr=False)
class Explanation:
    """A step at every stage; what is not asked for is not computed.

    Attributes:
      traced: The step as traced, and after each pass.
      field: What it was given of a batch, where that was not the whole.
    """

    traced: Traced
    field: str = ""

    @cached_property
    def lowered(self) -> Lowered:
        """The step as StableHLO."""
        return self.traced.lower()

    @cached_property
    def compiled(self) -> Compiled:
        """The step as the program of one device."""
        return self.lowered.compile()

    @cached_property
    def layouts(self) -> tuple[OpLayout, ...]:
        """Every operation with its layout."""
        mesh = self.traced.graph.mesh or Mesh(("device",), devices=(0,))
        return op_layouts(self.lowered.jax, mesh)

    def diff(self, name: str | None = None) -> str:
        """The lines of the graph that one pass changed, as a unified diff.

        Args:
          name: The pass; None is each that changed something, one after the other.

        Raises:
          UnknownPassError: [T307] there is no such pass.
        """
        if name is not None:
            return self.traced.diff(name)
        names = [record.name for record in self.traced.passes[1:]]
        return "\n".join(filter(None, map(self.traced.diff, names)))

    def side_by_side(self, line: str = "") -> "SideBySide":
        """What each line of the user's code is at every stage, one row a line.

        Args:
          line: A part of the lines to show, such as ``train.py:12``.
        """
        # It reads compiled modules, which few programs do.
        from tessera.debug.side_by_side import (
            of_compiled,
            of_layouts,
            of_program,
            side_by_side,
        )

        stages = (
            of_program(self.traced.origin.graph.program),
            of_program(self.traced.graph.program),
            of_layouts(self.layouts),
            of_compiled(self.compiled.as_text(), self.compiled.collectives),
        )
        return side_by_side(stages, line)

    def stage(self, name: str, *, hlo: bool = False) -> "StageView":
        """One stage alone, which prints as text and renders in a notebook.

        Args:
          name: ``trace``, ``passes``, ``lower`` or ``compile``; nothing that comes
            after it is computed.
          hlo: Whether ``lower`` and ``compile`` show their modules too.

        Raises:
          UnknownPassError: [T307] there is no such stage.
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

    def as_text(self, *, hlo: bool = False) -> str:
        """The stages in order: equations, passes, layouts, collectives, memory.

        Args:
          hlo: Whether to add the compiled module itself.
        """
        return "\n\n".join(self.stage(name, hlo=hlo).as_text() for name in _STAGES)

    def __str__(self) -> str:
        return self.as_text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from tessera.analysis.tables import html_section

        table = html_section(
            "side by side", self.side_by_side()._repr_html_(), is_open=True
        )
        return table + "".join(self.stage(name)._repr_html_() for name in _STAGES)

    def _traced(self, _: bool) -> Iterator["Section"]:
        given = f" of batch[{self.field!r}]" if self.field else ""
        yield Section(f"1 trace{given}", self.traced.as_text())

    def _passes(self, _: bool) -> Iterator["Section"]:
        lines = []
        for record in self.traced.passes[1:]:
            if record.skipped:
                lines.append(f"--- {record.name}: skipped")
                continue
            diff = self.diff(record.name)
            lines.append(f"--- {record.name}: {record.seconds * 1e3:.1f} ms")
            lines.append(diff or "    changes nothing")
        yield Section("2 passes", "\n".join(lines), is_diff=True)

    def _lowered(self, hlo: bool) -> Iterator["Section"]:
        whole = "one device: every array is whole"
        text = layouts_as_text(self.layouts) if self.traced.graph.mesh else whole
        yield Section("3 lower: each operation with its layout", text)
        if hlo:
            yield Section("3 lower: module", self.lowered.as_text())

    def _compiled(self, hlo: bool) -> Iterator["Section"]:
        compiled = self.compiled
        yield Section("4 compile: each collective", compiled.collectives.as_text())
        yield Section("4 compile: memory", compiled.memory.as_text())
        if hlo:
            yield Section("4 compile: module", compiled.as_text())


@dataclass(frozen=True, slots=True)
class Section:
    """A part of an explanation: its title, its text, and whether that is a diff."""

    title: str
    text: str
    is_diff: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class StageView:
    """One stage of a step; prints as text and renders in a notebook."""

    sections: tuple[Section, ...]

    def as_text(self) -> str:
        """Its sections under their titles."""
        return "\n\n".join(f"=== {s.title} ===\n{s.text}" for s in self.sections)

    __str__ = as_text
    __repr__ = as_text

    def _repr_html_(self) -> str:
        from tessera.analysis.tables import html_diff, html_lines, html_section

        return "".join(
            html_section(
                s.title, html_diff(s.text) if s.is_diff else html_lines([s.text])
            )
            for s in self.sections
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
      An explanation that prints: the equations with the user's lines, what each pass
      changed, each operation with its layout, each collective with its mesh axes,
      bytes per device and the line that caused it, and memory per device. ``stage``
      shows one stage, ``side_by_side`` all of them for each line, ``diff`` a pass.

    Example:
      >>> import jax.numpy as jnp
      >>> explanation = trace(lambda x: jnp.sin(x).sum(), jnp.ones((2, 2)))
      >>> "sin" in explanation.stage("trace").as_text()
      True
    """
    if not isinstance(model, Function):
        name = getattr(model, "__name__", type(model).__name__)
        model = Step(model, Options(name=name, split_batch=True, batch=None))
    try:
        return Explanation(model.trace(*args, **kwargs))
    except Exception:
        batch = args[0] if len(args) == 1 and not kwargs else None
        if isinstance(batch, Mapping) and _INPUT in batch:
            with suppress(Exception):  # the first error says more than a second one
                return Explanation(model.trace(batch[_INPUT]), _INPUT)
        raise
