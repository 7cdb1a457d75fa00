# SPDX-License-Identifier: Apache-2.0
"""Shows the phases of a step side by side, for each line of the user's code.

A row has the line's equations as traced and after the passes, its operations with their
layouts, and the operations and collectives that XLA compiled.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final, TypeAlias

from tessera.analysis import hlo
from tessera.analysis.hlo_walk import cause, executions
from tessera.analysis.ledger import KINDS, Ledger
from tessera.analysis.memory import format_bytes
from tessera.analysis.propagation import OpLayout
from tessera.analysis.source_lines import short, user_line
from tessera.analysis.tables import aligned
from tessera.foundations.primitive_properties import CALLS
from tessera.jax_compat import jaxprs

COLUMNS: Final = ("trace", "passes", "lower", "compile")

# Source line -> the operations of one phase at that line, with their number.
Stage: TypeAlias = Mapping[str, Counter[str]]

# Instructions that contain others, or name values, and compute nothing.
_NO_WORK: Final = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "fusion", "call", "bitcast")
)
_COLLECTIVES: Final = {f"{kind}{suffix}" for kind in KINDS for suffix in ("", "-start")}


@dataclass(frozen=True, slots=True)
class SideBySide:
    """The phases of each line; prints as a table.

    Attributes:
      rows: Source line, then its operations in each phase of ``COLUMNS``.
    """

    rows: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...]

    def as_text(self) -> str:
        """One row a line of the source, as many lines high as it has operations."""
        cells = [
            ["" if index else line, *parts]
            for line, stages in self.rows
            for index, parts in enumerate(zip_longest(*stages, fillvalue=""))
        ]
        return aligned(["line", *COLUMNS], cells)

    __str__ = as_text
    __repr__ = as_text


def side_by_side(stages: Iterable[Stage], line: str = "") -> SideBySide:
    """A table of several phases.

    Args:
      stages: One for each of ``COLUMNS``.
      line: A part of the source lines to show, such as ``train.py:12``.
    """
    stages = list(stages)
    lines = dict.fromkeys(source for stage in stages for source in stage)
    return SideBySide(
        tuple(
            (
                short(source) or "(no line)",
                tuple(_counted(stage.get(source, Counter())) for stage in stages),
            )
            for source in sorted(lines, key=lambda source: not source)
            if line in source
        )
    )


def of_program(program: jaxprs.Program) -> Stage:
    """The equations of a program by source line, nested programs included."""
    return _grouped(_equations(program, ""))


def of_layouts(layouts: Iterable[OpLayout]) -> Stage:
    """Operations with their layouts, by source line."""
    return _grouped(
        (op.source, op.op + (f" P({', '.join(map(repr, op.spec))})" if op.spec else ""))
        for op in layouts
        if op.op not in ("input", "output")
    )


def of_compiled(text: str, ledger: Ledger) -> Stage:
    """Collectives, and the operations inside XLA's fusions, by source line."""
    return _grouped(_instructions(hlo.parse(text), ledger))


def _instructions(module: hlo.Module, ledger: Ledger) -> Iterator[tuple[str, str]]:
    for row in ledger.rows:
        yield row.source, f"{row.kind} {'×'.join(row.axes)} {format_bytes(row.nbytes)}"
    for node in executions(module):
        instruction = node.instruction
        if instruction.opcode not in _NO_WORK | _COLLECTIVES:
            frames = module.frames(instruction)
            source = user_line(frames or module.frames(cause(module, node)))
            yield source, instruction.opcode


def _equations(program: jaxprs.Program, around: str) -> Iterator[tuple[str, str]]:
    for equation in jaxprs.equations(program):
        source = jaxprs.source_line(equation) or around
        if equation.primitive.name not in CALLS:
            yield source, equation.primitive.name
        for inner in jaxprs.inner_programs(equation):
            yield from _equations(inner, source)


def _grouped(operations: Iterable[tuple[str, str]]) -> Stage:
    lines: dict[str, Counter[str]] = defaultdict(Counter)
    for source, name in operations:
        lines[source][name] += 1
    return lines


def _counted(names: Counter[str]) -> tuple[str, ...]:
    return tuple(f"{n} × {name}" if n > 1 else name for name, n in names.items())
