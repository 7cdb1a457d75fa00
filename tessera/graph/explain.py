# SPDX-License-Identifier: Apache-2.0
"""``graph.trace``: everything that becomes of a step, from its equations to XLA's.

It compiles and never runs, so it works on meshes that this machine does not have.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tessera.analysis.propagation import OpLayout, op_layouts
from tessera.analysis.propagation import as_text as layouts_as_text
from tessera.graph.function import Function
from tessera.graph.stages import Compiled, Lowered, Traced
from tessera.graph.tracing.declarations import Options
from tessera.graph.training_step import Step


@dataclass(frozen=True)
class Explanation:
    """A step at every stage; what is not asked for is not computed.

    Attributes:
      traced: The step as traced, and after each pass.
    """

    traced: Traced

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
        """Every operation with its layout; empty on one device."""
        mesh = self.traced.graph.mesh
        return () if mesh is None else op_layouts(self.lowered.jax, mesh)

    def diff(self, name: str) -> str:
        """The lines of the graph that one pass changed.

        Raises:
          UnknownPassError: [T307] there is no such pass.
        """
        return self.traced.diff(name)

    def as_text(self, *, hlo: bool = False) -> str:
        """The stages in order: equations, passes, layouts, collectives, memory.

        Args:
          hlo: Whether to add the compiled module itself.
        """
        sections = {
            "1 trace": self.traced.as_text(),
            "2 passes": self._passes_as_text(),
            "3 lower: each operation with its layout": layouts_as_text(self.layouts)
            if self.layouts
            else "one device: every array is whole",
            "4 compile: each collective": self.compiled.collectives.as_text(),
            "4 compile: memory": self.compiled.memory.as_text(),
        }
        if hlo:
            sections["4 compile: module"] = self.compiled.as_text()
        return "\n\n".join(f"=== {name} ===\n{text}" for name, text in sections.items())

    def _passes_as_text(self) -> str:
        lines = []
        for record in self.traced.passes[1:]:
            if record.skipped:
                lines.append(f"--- {record.name}: skipped")
                continue
            diff = self.diff(record.name)
            lines.append(f"--- {record.name}: {record.seconds * 1e3:.1f} ms")
            lines.append(diff or "    changes nothing")
        return "\n".join(lines)

    __str__ = as_text
    __repr__ = as_text


def trace(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Show how a model or a step is traced, transformed, laid out and compiled.

    Args:
      model: A step, a stage, a ``ts.function`` or a plain function; a plain function is
        treated as a training step.
      *args: Its arguments; ``jax.ShapeDtypeStruct`` may stand for an array.
      **kwargs: The same by name.

    Returns:
      An explanation that prints: the equations with the user's lines, what each pass
      changed, each operation with its layout, each collective with its mesh axes,
      bytes per device and the line that caused it, and memory per device.

    Example:
      >>> import jax.numpy as jnp
      >>> explanation = trace(lambda x: jnp.sin(x).sum(), jnp.ones((2, 2)))
      >>> "sin" in explanation.as_text()
      True
    """
    if not isinstance(model, Function):
        name = getattr(model, "__name__", type(model).__name__)
        model = Step(model, Options(name=name, split_batch=True))
    return Explanation(model.trace(*args, **kwargs))
