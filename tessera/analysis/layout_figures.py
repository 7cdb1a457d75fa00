# SPDX-License-Identifier: Apache-2.0
"""Which device holds which block of an array, as grids of cells.

A dim that is split is a direction of a grid: the last of them goes across, the one
before goes downwards, and for each place along the others there is a grid of its own.
Dims that are whole take no place, so an array of any rank is drawn.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tessera.analysis.tables import aligned

if TYPE_CHECKING:
    from tessera.analysis.inspection import Block

MAX_SIDE: Final = 16
MAX_GRIDS: Final = 6
_MAX_RUNS: Final = 4
_GAP: Final = "…"


@dataclass(frozen=True, slots=True)
class Cell:
    """One block, or a gap in a picture that shows some of very many.

    Attributes:
      text: The devices that hold the block.
      shade: Number of the block among all blocks, from 0 up to 1; None for a gap.
    """

    text: str
    shade: float | None = None


@dataclass(frozen=True, slots=True)
class Grid:
    """Blocks along two dims, or one; what they are of the others is in the caption.

    Attributes:
      caption: ``dim 0 = 0:4``; empty where there is one grid.
      down: What the rows are, such as ``dim 1``, and the range of each row.
      across: The same of the columns.
      cells: Row by row.
    """

    caption: str
    down: tuple[str, tuple[str, ...]]
    across: tuple[str, tuple[str, ...]]
    cells: tuple[tuple[Cell, ...], ...]

    def as_text(self) -> str:
        """An aligned table: ranges of the one dim on the left, of the other on top."""
        corner = " / ".join(filter(None, (self.down[0], self.across[0])))
        rows = [
            [label, *(cell.text for cell in row)]
            for label, row in zip(self.down[1], self.cells, strict=True)
        ]
        table = aligned([corner, *self.across[1]], rows)
        table = table.removeprefix("\n")  # nothing is split: the header is empty
        return f"{self.caption}\n{table}" if self.caption else table


@dataclass(frozen=True, slots=True)
class Picture:
    """The grids of one array; ``hidden`` more of them are left out."""

    grids: tuple[Grid, ...]
    hidden: int = 0

    def as_text(self) -> str:
        """The grids, one under the other."""
        more = [f"{_GAP} {self.hidden} more such grids"] * bool(self.hidden)
        return "\n\n".join([*(grid.as_text() for grid in self.grids), *more])


def draw(
    placed: Iterable[tuple[int, "Block"]], axes: Sequence[Sequence[str]] = ()
) -> Picture:
    """Draw which device holds which block.

    Args:
      placed: Device ids, each with the (start, stop) of every dim that it holds.
      axes: The mesh axes that split each dim, where they have names.

    Example:
      >>> rows = [(device, ((device % 2 * 4, device % 2 * 4 + 4), (0, 8)))
      ...         for device in range(4)]
      >>> print(draw(rows).as_text())
      dim 0
      0:4    0, 2
      4:8    1, 3
    """
    holders: dict[Block, list[int]] = {}
    for device, block in placed:
        holders.setdefault(block, []).append(device)
    rank = len(next(iter(holders), ()))
    bounds = [sorted({block[dim] for block in holders}) for dim in range(rank)]
    split = [dim for dim in range(rank) if len(bounds[dim]) > 1]
    *outer, down, across = [None, None, *split]
    if across is not None and down is None and across < rank - 1:
        down, across = across, None  # rows, where they are what is split
    whole = {dim: bounds[dim][0] for dim in range(rank) if dim not in split}
    names: dict[int | None, str] = {
        dim: f"dim {dim} over {'×'.join(axes[dim])}" if axes else f"dim {dim}"
        for dim in split
    }
    order = {block: number for number, block in enumerate(sorted(holders))}

    def grid(place: dict[int, tuple[int, int]]) -> Grid:
        rows, columns = _shown(bounds, down), _shown(bounds, across)

        def cell(row: tuple[int, int] | None, column: tuple[int, int] | None) -> Cell:
            at = whole | place
            for dim, found in ((down, row), (across, column)):
                if dim is not None and found is None:
                    return Cell(_GAP)
                if dim is not None and found is not None:
                    at |= {dim: found}
            block = tuple(at[dim] for dim in range(rank))
            if block not in holders:
                return Cell("")
            return Cell(listed_ids(holders[block]), order[block] / len(order))

        return Grid(
            caption=", ".join(f"{names[d]} = {_range(b)}" for d, b in place.items()),
            down=(names.get(down, ""), _labels(rows, "" if split else "whole")),
            across=(names.get(across, ""), _labels(columns, "")),
            cells=tuple(tuple(cell(r, c) for c in columns) for r in rows),
        )

    facets = [dim for dim in outer if dim is not None]
    places = itertools.product(*(bounds[dim] for dim in facets))
    total = math.prod(len(bounds[dim]) for dim in facets)
    shown = [
        grid(dict(zip(facets, place, strict=True)))
        for place in itertools.islice(places, MAX_GRIDS)
    ]
    return Picture(tuple(shown), total - len(shown))


def _shown(
    bounds: Sequence[Sequence[tuple[int, int]]], dim: int | None
) -> list[tuple[int, int] | None]:
    """The ranges of a dim that are drawn; None where the middle of many is left out."""
    if dim is None:
        return [None]
    ranges = list(bounds[dim])
    if len(ranges) <= MAX_SIDE:
        return [*ranges]
    half = MAX_SIDE // 2
    return [*ranges[:half], None, *ranges[-half:]]


def _labels(ranges: Sequence[tuple[int, int] | None], alone: str) -> tuple[str, ...]:
    """What is written beside rows or above columns; ``alone`` for the only one."""
    if list(ranges) == [None]:
        return (alone,)
    return tuple(_GAP if r is None else _range(r) for r in ranges)


def _range(bounds: tuple[int, int]) -> str:
    return f"{bounds[0]}:{bounds[1]}"


def listed_ids(ids: Sequence[int]) -> str:
    """Device ids in few words: runs as ``0..7``, of very many the number.

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
