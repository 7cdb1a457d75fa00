# SPDX-License-Identifier: Apache-2.0
"""Reads a trace of JAX's profiler: when each device ran which operation of a program.

The profiler has one format for every backend: planes of lines of events. On CPU an
event of XLA's executor names its operation and its device; on GPU a kernel names its
operation and is in the plane of its device; a TPU's plane has a line of operations.
"""

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from jax.profiler import ProfileData

COMMAND_BUFFERS: Final = "xla_gpu_enable_command_buffer"
"""The option of which kernels GPUs launch at once, as a CUDA graph; ``""`` is none.

The trace of a graph says of no kernel which operation it is (openxla/xprof#3070).
"""

_DEVICE = re.compile(r"/device:\w+:(\d+)")
_OPERATIONS = "XLA Ops"
_NAME = re.compile(r"%?([\w.\-]+)")


@dataclass(frozen=True, slots=True)
class OpEvent:
    """One operation on one device.

    Attributes:
      op: XLA's name of the instruction.
      device: The number of the device in its process.
      start: Seconds since a time that all events of the trace share.
      end: Seconds since the same time.
    """

    op: str
    device: int
    start: float
    end: float


def op_events(folder: Path, module: str) -> list[OpEvent]:
    """The operations of one program in the newest trace of a folder.

    Args:
      folder: The log folder of ``jax.profiler.start_trace``.
      module: The name of the compiled module, such as ``jit_step``: a trace has the
        operations of every program that ran.

    Returns:
      The events, in no order; none where the backend's profiler records no operations.
    """
    files = sorted(folder.glob("plugins/profile/*/*.xplane.pb"))
    newest = [path for path in files if path.parent == files[-1].parent]
    with warnings.catch_warnings():
        # Python 3.12 warns that jaxlib's own types have no module name.
        warnings.simplefilter("ignore", DeprecationWarning)
        return [
            event
            for path in newest
            for event in _events(ProfileData.from_file(str(path)), module)
        ]


def _events(data: Any, module: str) -> Iterator[OpEvent]:
    for plane in data.planes:
        number = _DEVICE.match(plane.name)
        lines = list(plane.lines)
        operations = [line for line in lines if line.name == _OPERATIONS]
        for line in operations or lines:
            for event in line.events:
                stats = dict(event.stats)
                op = stats.get("hlo_op")
                if op is None and line.name == _OPERATIONS:
                    op = _first_name(event.name)
                if op is None or stats.get("hlo_module", module) != module:
                    continue
                device = int(number[1]) if number else stats.get("device_ordinal", 0)
                start = event.start_ns * 1e-9
                yield OpEvent(op, device, start, start + event.duration_ns * 1e-9)


def _first_name(text: str) -> str | None:
    """The instruction of ``%fusion.3 = f32[8]{0} fusion(...)``."""
    match = _NAME.match(text)
    return match[1] if match else None
