# SPDX-License-Identifier: Apache-2.0
"""Tile sizes of attention's kernels: the defaults, and a cache of tuned ones.

Each tuned case is a file in the cache folder of the user, which ``tuning`` writes.
Imports no Pallas.
"""

import hashlib
import json
import math
import os
import stat
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax

from tessera.ops.attention.dispatch import Device, Operands, Options

WARPGROUP_ROWS = 64  # in a matmul of one warpgroup
FORMAT = 2  # of the files; raised when a change of the kernels outdates them
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


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


def kernel_for(operands: Operands, options: Options, device: Device) -> Hopper:
    """The kernel of a call with its tuned or default tile sizes; measures nothing."""
    tuned = _read(str(_file(_case(operands, options, device))))
    return tuned or default_for_hopper(operands.q.shape[3])


# --- the cache


def _case(operands: Operands, options: Options, device: Device) -> str:
    """What a measurement is valid for, as text."""
    case = {
        "format": FORMAT,
        "device": device.kind or device.platform,
        "jax": jax.__version__,
        "queries": list(operands.q.shape),
        "keys": list(operands.k.shape),
        "dtype": operands.q.dtype.name,
        "causal": options.causal,
        "window": options.window,
        "soft_cap": options.soft_cap is not None,
        "offset": options.offset,
    }
    return json.dumps(case, sort_keys=True)


def cache_folder() -> Path:
    """The folder of the cache: below ``XDG_CACHE_HOME``, or ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "tessera" / "attention"


def _file(case: str) -> Path:
    return cache_folder() / f"{hashlib.sha256(case.encode()).hexdigest()[:32]}.json"


@cache
def _read(path: str) -> Hopper | None:
    """The kernel in a file that only the user may write; None for anything else."""
    try:
        with open(path) as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.getuid() or status.st_mode & _OTHERS_WRITE:
                return None
            stored = json.load(file)["kernel"]
        ways = [Tiles(*map(int, stored[way])) for way in ("forward", "backward")]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if any(t.rows % 64 or t.columns % 64 or min(t) < 1 for t in ways):
        return None
    return Hopper(*ways)


def store(
    kernel: Hopper,
    seconds: float,
    operands: Operands,
    options: Options,
    device: Device,
) -> None:
    """Write a measurement to the cache, atomically."""
    _read.cache_clear()
    case = _case(operands, options, device)
    sizes = {"forward": kernel.forward, "backward": kernel.backward}
    text = json.dumps({"case": case, "kernel": sizes, "seconds": seconds}, indent=1)
    folder = cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder)  # mode 600
    with os.fdopen(handle, "w") as file:
        file.write(text + "\n")
    os.replace(temporary, _file(case))
