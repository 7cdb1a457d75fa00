# SPDX-License-Identifier: Apache-2.0
"""Block sizes of attention's kernels, and their defaults. Imports no Pallas."""

import math
from typing import Any, NamedTuple

WARPGROUP_ROWS = 64  # in a matmul of one warpgroup


class Blocks(NamedTuple):
    """Block sizes of the portable kernel.

    Attributes:
      queries: Rows of queries.
      keys: Rows of keys.
    """

    queries: int
    keys: int


class Tiles(NamedTuple):
    """Tile sizes of a Hopper kernel.

    Attributes:
      rows: Rows whose results a thread block computes: 64 for each warpgroup.
      columns: Rows that it iterates over, in one slot of shared memory.
      slots: The number of slots.
    """

    rows: int
    columns: int
    slots: int

    @property
    def warpgroups(self) -> int:
        """The number of compute warpgroups."""
        return self.rows // WARPGROUP_ROWS


class Portable(NamedTuple):
    """The portable kernel, and its block sizes in both directions."""

    blocks: Blocks = Blocks(128, 128)

    def multiples(self, *, backward: bool) -> tuple[int, int]:
        """What the numbers of queries and of keys must be multiples of."""
        del backward
        return tuple(self.blocks)


class Hopper(NamedTuple):
    """The Hopper kernel, and its tile sizes in each direction.

    Attributes:
      forward: Tiles of queries over keys.
      backward: Tiles of queries over keys, and of keys over queries.
      interpret: ``plgpu.InterpretGPUParams`` to run on a CPU; None on a GPU.
    """

    forward: Tiles
    backward: Tiles
    interpret: Any = None

    def multiples(self, *, backward: bool) -> tuple[int, int]:
        """What the numbers of queries and of keys must be multiples of."""
        if not backward:
            return self.forward.rows, self.forward.columns
        both = math.lcm(self.backward.rows, self.backward.columns)
        return both, both


Kernel = Portable | Hopper

# By head size; others are padded to the next of these. Registers and shared memory are
# used as in FlashAttention-3: 64 to 192 of 227 KiB.
_DEFAULTS = {
    64: Hopper(forward=Tiles(192, 128, 2), backward=Tiles(128, 64, 2)),
    128: Hopper(forward=Tiles(128, 128, 2), backward=Tiles(128, 64, 2)),
    256: Hopper(forward=Tiles(128, 64, 1), backward=Tiles(128, 64, 1)),
}
WIDEST = max(_DEFAULTS)


def padded_width(width: int) -> int:
    """The head size that a Hopper kernel pads to."""
    return min(known for known in _DEFAULTS if known >= width)


def default_for_hopper(width: int) -> Hopper:
    """The tile sizes for a head size that was not tuned."""
    return _DEFAULTS[padded_width(width)]
