# SPDX-License-Identifier: Apache-2.0
"""How kernels cut their work, and which sizes they begin with. No kernel language."""

import math
from typing import Any, NamedTuple

WARPGROUP_ROWS = 64  # of a product of one warpgroup


class Blocks(NamedTuple):
    """Rows of queries and of keys that a program of the portable kernel holds.

    Attributes:
      queries: Rows of queries.
      keys: Rows of keys.
    """

    queries: int
    keys: int


class Tiles(NamedTuple):
    """How a kernel for Hopper cuts its work.

    Attributes:
      rows: What a block of threads computes results for: 64 for each warpgroup.
      columns: What it goes over, a slot of shared memory at a time.
      slots: How many of those there are.
    """

    rows: int
    columns: int
    slots: int

    @property
    def warpgroups(self) -> int:
        """That compute."""
        return self.rows // WARPGROUP_ROWS


class Portable(NamedTuple):
    """The portable kernel, and how it cuts its work in both directions."""

    blocks: Blocks = Blocks(128, 128)

    def multiples(self, *, backward: bool) -> tuple[int, int]:
        """Of what the numbers of queries and of keys have to be multiples."""
        del backward
        return tuple(self.blocks)


class Hopper(NamedTuple):
    """The kernel for Hopper, and how it cuts its work in each direction.

    Attributes:
      forward: Of queries over keys.
      backward: Of queries over keys, and of keys over queries.
      interpret: ``plgpu.InterpretGPUParams`` to run on a CPU; None on a GPU.
    """

    forward: Tiles
    backward: Tiles
    interpret: Any = None

    def multiples(self, *, backward: bool) -> tuple[int, int]:
        """Of what the numbers of queries and of keys have to be multiples."""
        if not backward:
            return self.forward.rows, self.forward.columns
        both = math.lcm(self.backward.rows, self.backward.columns)
        return both, both


Kernel = Portable | Hopper

# Heads of other sizes are padded to the next of these. Registers and shared memory are
# as in FlashAttention-3: 64 to 192 of 227 KiB.
_DEFAULTS = {
    64: Hopper(forward=Tiles(192, 128, 2), backward=Tiles(128, 64, 2)),
    128: Hopper(forward=Tiles(128, 128, 2), backward=Tiles(128, 64, 2)),
    256: Hopper(forward=Tiles(128, 64, 1), backward=Tiles(128, 64, 1)),
}
WIDEST = max(_DEFAULTS)


def padded_width(width: int) -> int:
    """The size of heads that a kernel for Hopper computes with."""
    return min(known for known in _DEFAULTS if known >= width)


def default_for_hopper(width: int) -> Hopper:
    """What is used for heads of a size when nothing was tuned."""
    return _DEFAULTS[padded_width(width)]
