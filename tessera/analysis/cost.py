# SPDX-License-Identifier: Apache-2.0
"""Estimates how a step's time divides between computation and communication.

It divides a program's FLOPs and bytes by the peaks of its devices. Real kernels are
slower, and a real program overlaps the two in part, so the ratio is what matters: it
shows which mesh axis a step would wait for.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jax.typing import DTypeLike

from tessera.analysis.collective import Collective
from tessera.analysis.device_peaks import peak_flops
from tessera.analysis.flops import Flops, format_flops
from tessera.analysis.ledger import Ledger
from tessera.analysis.memory import Memory, format_bytes
from tessera.analysis.tables import aligned, format_seconds
from tessera.targets.link_times import Span, collective_seconds
from tessera.targets.machine import Machine, machine_of_kind


@dataclass(frozen=True, slots=True)
class Balance:
    """Seconds of one execution on each device, by what takes them.

    Matmuls and memory are at the peaks of the device, which no program reaches, and
    collectives at the rate that large ones reach.

    Attributes:
      device_kind: The device that the estimate is for.
      flops: Matmul FLOPs of one device.
      memory_bytes: The program's arguments and outputs on one device, each read or
        written at least once.
      communicated: Bytes of the collectives of one device, per combination of axes.
      compute: Seconds of matmuls; None where the device's peaks are unknown, as are the
        next two.
      memory: Seconds to move ``memory_bytes``.
      communication: Seconds of collectives, per combination of axes.
    """

    device_kind: str
    flops: float
    memory_bytes: int
    communicated: Mapping[tuple[str, ...], int]
    compute: float | None
    memory: float | None
    communication: Mapping[tuple[str, ...], float] | None

    @property
    def communication_share(self) -> float | None:
        """The share of communication in the time, if nothing overlapped."""
        if self.communication is None or self.compute is None:
            return None
        sent = sum(self.communication.values())
        return sent / (sent + self.compute) if sent else 0.0

    def as_text(self) -> str:
        """A table, titled as an estimate."""
        title = f"estimate for {self.device_kind}, per device and execution"
        if self.communication is None:
            title += " (its peaks are not known: amounts alone)"
        seconds = self.communication or {}
        parts = [
            ("matmuls", f"{format_flops(self.flops)} FLOPs", self.compute),
            ("memory", format_bytes(self.memory_bytes), self.memory),
        ]
        for axes, size in self.communicated.items():
            part = f"communication over {'×'.join(axes)}"
            parts.append((part, format_bytes(size), seconds.get(axes)))
        rows = [[part, amount, format_seconds(spent)] for part, amount, spent in parts]
        columns = ["part", "amount", "time"]
        lines = [title, aligned(columns, rows, right=columns[1:])]
        if self.communication_share is not None:
            share = f"{100 * self.communication_share:.0f} %"
            lines.append(f"communication is {share} of matmuls and communication")
            lines.append(
                "every axis is taken to run over the devices' own fast links, "
                "at the rate of large collectives and without overlap"
            )
        return "\n".join(lines)


def balance(
    ledger: Ledger,
    flops: Flops,
    memory: Memory,
    device_kind: str,
    dtype: DTypeLike = "bfloat16",
) -> Balance:
    """Estimate how one execution's time divides, from the devices' peaks.

    Args:
      ledger: The program's collectives.
      flops: Its operations, all devices together; split evenly between them.
      memory: Its memory on each device.
      device_kind: ``jax.devices()[0].device_kind``.
      dtype: The dtype of the matmuls' operands: bf16, f16 or f32.

    The times of collectives are those of ``targets.link_times``.
    """
    found = machine_of_kind(device_kind)
    local_flops = flops.matmul / math.prod(ledger.mesh_shape.values())
    memory_bytes = memory.arguments + memory.outputs
    seconds: dict[tuple[str, ...], float] = {}
    if found is not None:
        for row in ledger.rows:
            spent = row.counted_calls * _seconds(row, found)
            seconds[row.axes] = seconds.get(row.axes, 0.0) + spent
    rate = peak_flops(device_kind, dtype)
    return Balance(
        device_kind=device_kind,
        flops=local_flops,
        memory_bytes=memory_bytes,
        communicated={axes: total.nbytes for axes, total in ledger.by_axis().items()},
        compute=local_flops / rate if rate else None,
        memory=memory_bytes / found.memory_bandwidth if found else None,
        communication=seconds if found else None,
    )


def _seconds(row: Collective, found: Machine) -> float:
    """Seconds of one call on the fastest links, by ``link_times``."""
    size = row.group_size
    where = Span(size, size, ((size, 1.0),) if found.is_torus else ())
    return collective_seconds(found, row.kind, row.nbytes, where)
