# SPDX-License-Identifier: Apache-2.0
"""Draws which device holds which block of an array, as grids of cells.

A split dim is a direction of a grid: the last split dim goes across, the one before it
goes down, and each index along further split dims has a grid of its own. Dims that are
not split take no space, so an array of any rank can be drawn.
``jax.debug.visualize_sharding`` draws arrays of at most two dims, and only prints.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from tessera.analysis.tables import Cell, aligned, html_lines, html_table

if TYPE_CHECKING:
    from tessera.analysis.inspection import Block

MAX_SIDE: Final = 16
MAX_GRIDS: Final = 6
_MAX_RUNS: Final = 4
_GAP: Final = "…"
_BESIDE: Final = "display:inline-block;vertical-align:top;margin:0 1em 1em 0"

# The (start, stop) of some dims.
_Ranges: TypeAlias = dict[int, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Grid:
    """Blocks along two dims, or one.

    Attributes:
      caption: The index along further dims, ``dim 0 = 0:4``; empty for the only grid.
      header: The dims, then the range of each column.
      rows: The range of each row, then a cell with the devices of each block.
    """

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str | Cell, ...], ...]

    def as_text(self) -> str:
        """An aligned table: ranges of one dim on the left, of the other on top."""
        table = aligned(self.header, self.rows)
        table = table.removeprefix("\n")  # nothing is split: the header is empty
        return f"{self.caption}\n{table}" if self.caption else table

    def as_html(self) -> str:
        """A table with a color for each block."""
        caption = html_lines([self.caption]) if self.caption else ""
        table = html_table(self.header, self.rows)
        return f'<div style="{_BESIDE}">{caption}{table}</div>'


@dataclass(frozen=True, slots=True)
class Picture:
    """The grids of one array; ``hidden`` more of them are left out."""

    grids: tuple[Grid, ...]
    hidden: int = 0

    def as_text(self) -> str:
        """The grids, one under the other."""
        return "\n\n".join([*(grid.as_text() for grid in self.grids), *self._more()])

    def as_html(self) -> str:
        """The grids, side by side where there is room."""
        grids = "".join(grid.as_html() for grid in self.grids)
        return f"<div>{grids}{''.join(map('<div>{}</div>'.format, self._more()))}</div>"

    def _more(self) -> list[str]:
        return [f"{_GAP} {self.hidden} more such grids"] * bool(self.hidden)


def draw(
    blocks: Iterable[tuple[int, "Block"]], axes: Sequence[Sequence[str]] = ()
) -> Picture:
    """Draw which device holds which block.

    Args:
      blocks: Device ids, each with the (start, stop) of every dim that it holds.
      axes: The mesh axes that split each dim, where they have names.

    Example:
      >>> rows = [(device, ((device % 2 * 4, device % 2 * 4 + 4), (0, 8)))
      ...         for device in range(4)]
      >>> print(draw(rows).as_text())
      dim 0
      0:4    0, 2
      4:8    1, 3
    """
    devices: dict[Block, list[int]] = {}
    for device, block in blocks:
        devices.setdefault(block, []).append(device)
    bounds = [sorted(set(ranges)) for ranges in zip(*devices, strict=True)]
    split = [dim for dim, ranges in enumerate(bounds) if len(ranges) > 1]
    *outer, down, across = [None, None, *split]
    if across is not None and down is None and across < len(bounds) - 1:
        down, across = across, None  # rows, where they are what is split
    names: dict[int | None, str] = {
        dim: f"dim {dim} over {'×'.join(axes[dim])}" if axes else f"dim {dim}"
        for dim in split
    }
    shades = {block: i / len(devices) for i, block in enumerate(sorted(devices))}
    origin = {dim: ranges[0] for dim, ranges in enumerate(bounds)}
    rows, columns = _choices(bounds, down), _choices(bounds, across)
    corner = " / ".join(names[dim] for dim in (down, across) if dim is not None)
    alone = "" if split else "whole"

    def cell(*ranges: _Ranges | None) -> Cell:
        at = dict(origin)
        for chosen in ranges:
            if chosen is None:
                return Cell(_GAP)
            at |= chosen
        block = tuple(at[dim] for dim in range(len(bounds)))
        return Cell(listed_ids(devices.get(block, ())), shades.get(block))

    def grid(outside: _Ranges) -> Grid:
        return Grid(
            caption=", ".join(
                f"{names[d]} = {_label({d: outside[d]})}" for d in outside
            ),
            header=(corner, *map(_label, columns)),
            rows=tuple(
                (_label(r) or alone, *(cell(outside, r, c) for c in columns))
                for r in rows
            ),
        )

    facets = [dim for dim in outer if dim is not None]
    total = math.prod(len(bounds[dim]) for dim in facets)
    ranges = itertools.product(*(bounds[dim] for dim in facets))
    shown = itertools.islice(ranges, MAX_GRIDS)
    grids = tuple(grid(dict(zip(facets, each, strict=True))) for each in shown)
    return Picture(grids, total - len(grids))


def _choices(
    bounds: Sequence[Sequence[tuple[int, int]]], dim: int | None
) -> list[_Ranges | None]:
    """The ranges of a dim that are drawn; None stands for the middle of very many."""
    if dim is None:
        return [{}]
    ranges: list[_Ranges | None] = [{dim: each} for each in bounds[dim]]
    if len(ranges) <= MAX_SIDE:
        return ranges
    half = MAX_SIDE // 2
    return [*ranges[:half], None, *ranges[-half:]]


def _label(ranges: _Ranges | None) -> str:
    if ranges is None:
        return _GAP
    return ", ".join(f"{start}:{stop}" for start, stop in ranges.values())


def listed_ids(ids: Sequence[int]) -> str:
    """Device ids as ranges such as ``0..7``; of many ranges, the first and the last.

    Example:
      >>> listed_ids([0, 4]), listed_ids(range(8)), listed_ids(range(0, 512, 8))
      ('0, 4', '0..7', '0, 8, 16, … 504 (64 devices)')
      >>> listed_ids([0, 1, 2, 64, 65, 66])
      '0..2, 64..66'
    """
    runs: list[list[int]] = []
    for device in ids:
        if runs and device == runs[-1][-1] + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    words = [
        f"{run[0]}..{run[-1]}" if len(run) > 2 else ", ".join(map(str, run))
        for run in runs
    ]
    if len(words) <= _MAX_RUNS:
        return ", ".join(words)
    first = ", ".join(words[: _MAX_RUNS - 1])
    return f"{first}, {_GAP} {words[-1]} ({len(ids)} devices)"
