# SPDX-License-Identifier: Apache-2.0
"""The stages of a step side by side: what becomes of each line of the user's code.

One row a line: its equations as traced, after the passes, the operations with their
layouts, and what XLA compiled them to, collectives among them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final, TypeAlias

from tessera import _jax
from tessera.analysis import hlo
from tessera.analysis.hlo_walk import cause, executions
from tessera.analysis.ledger import KINDS, Ledger
from tessera.analysis.memory import format_bytes
from tessera.analysis.propagation import OpLayout
from tessera.analysis.source_lines import short, user_line
from tessera.analysis.tables import aligned, html_table
from tessera.primitive_properties import CALLS

COLUMNS: Final = ("trace", "passes", "lower", "compile")

# Line -> what it became, with how often.
Stage: TypeAlias = Mapping[str, Counter[str]]

# What holds other instructions, or names values, and computes nothing itself.
_NO_WORK: Final = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "fusion", "call", "bitcast")
)
_COLLECTIVES: Final = {f"{kind}{half}" for kind in KINDS for half in ("", "-start")}


@dataclass(frozen=True, slots=True)
class SideBySide:
    """What became of each line; prints as a table, and renders in a notebook.

    Attributes:
      rows: Source line, then what it is at each stage of ``COLUMNS``.
    """

    rows: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...]

    def as_text(self) -> str:
        """One row a line of the source, as many lines high as it has operations."""
        cells = [
            [line if place == 0 else "", *parts]
            for line, stages in self.rows
            for place, parts in enumerate(zip_longest(*stages, fillvalue=""))
        ]
        return aligned(["line", *COLUMNS], cells)

    __str__ = as_text
    __repr__ = as_text

    def _repr_html_(self) -> str:
        return html_table(
            ["line", *COLUMNS],
            ([line, *map("\n".join, stages)] for line, stages in self.rows),
        )


def side_by_side(stages: Iterable[Stage], line: str = "") -> SideBySide:
    """Put stages beside each other.

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


def of_program(program: _jax.Program) -> Stage:
    """The equations of a program by their line, those of nested ones included."""
    found: dict[str, Counter[str]] = {}
    for source, name in _equations(program, ""):
        found.setdefault(source, Counter())[name] += 1
    return found


def of_layouts(layouts: Iterable[OpLayout]) -> Stage:
    """Operations by their line, each with its layout."""
    found: dict[str, Counter[str]] = {}
    for op in layouts:
        if op.op not in ("input", "output"):
            spec = f" P({', '.join(map(repr, op.spec))})" if op.spec else ""
            found.setdefault(op.source, Counter())[op.op + spec] += 1
    return found


def of_compiled(text: str, ledger: Ledger) -> Stage:
    """What XLA made by its line: operations inside fusions, and collectives."""
    found: dict[str, Counter[str]] = {}
    for row in ledger.rows:
        words = f"{row.kind} {'×'.join(row.axes)} {format_bytes(row.nbytes)}"
        found.setdefault(row.source, Counter())[words] += 1
    module = hlo.parse(text)
    for execution in executions(module):
        instruction = execution.instruction
        if instruction.opcode not in _NO_WORK | _COLLECTIVES:
            frames = module.frames(instruction)
            source = user_line(frames or module.frames(cause(module, execution)))
            found.setdefault(source, Counter())[instruction.opcode] += 1
    return found


def _equations(program: _jax.Program, around: str) -> Iterator[tuple[str, str]]:
    for equation in _jax.equations(program):
        source = _jax.source_line(equation) or around
        if equation.primitive.name not in CALLS:
            yield source, equation.primitive.name
        for inner in _jax.inner_programs(equation):
            yield from _equations(inner, source)


def _counted(found: Counter[str]) -> tuple[str, ...]:
    return tuple(f"{n} × {name}" if n > 1 else name for name, n in found.items())
