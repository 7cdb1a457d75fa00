# SPDX-License-Identifier: Apache-2.0
"""An estimate of how a step's time divides between computing and communicating.

It holds a program's FLOPs and collectives against what the devices do at best. Real
kernels are slower than that, and a real program overlaps the two in part, so the ratio
is what to look at: it says which mesh axis a step would wait for.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jax.typing import DTypeLike

from tessera.analysis.collective import Collective
from tessera.analysis.flops import Flops, format_flops
from tessera.analysis.ledger import Ledger
from tessera.analysis.memory import Memory, format_bytes
from tessera.analysis.peaks import Peak, peak, peak_flops
from tessera.analysis.tables import aligned


@dataclass(frozen=True, slots=True)
class Balance:
    """Seconds at best of one execution on each device, by what they are spent on.

    Attributes:
      device_kind: The device that the estimate is for.
      flops: Matmul FLOPs of one device.
      memory_bytes: The program's arguments and outputs on one device, each read or
        written at least once.
      communicated: Bytes of the collectives of one device, per combination of axes.
      compute: Seconds of matmuls; None where the device's peaks are not known, as are
        the next two.
      memory: Seconds of moving ``memory_bytes``.
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
        """Communication over computing and communication, if nothing overlapped."""
        if self.communication is None or self.compute is None:
            return None
        sent = sum(self.communication.values())
        return sent / (sent + self.compute) if sent else 0.0

    def as_text(self) -> str:
        """A table that says what it is: an estimate."""
        known = self.communication is not None
        title = f"estimate for {self.device_kind}, per device and execution"
        if not known:
            title += " (its peaks are not known: amounts alone)"
        rows = [
            [
                "matmuls",
                f"{format_flops(self.flops)} FLOPs",
                format_seconds(self.compute),
            ],
            ["memory", format_bytes(self.memory_bytes), format_seconds(self.memory)],
            *(
                [
                    f"communication over {'×'.join(axes)}",
                    format_bytes(size),
                    format_seconds(
                        self.communication[axes] if self.communication else None
                    ),
                ]
                for axes, size in self.communicated.items()
            ),
        ]
        table = aligned(
            ["part", "amount", "at best"], rows, right=["amount", "at best"]
        )
        lines = [title, table]
        if self.communication_share is not None:
            share = f"{100 * self.communication_share:.0f} %"
            lines.append(f"communication is {share} of matmuls and communication")
            lines.append(
                "every axis is taken to run over the devices' own fast links, "
                "at full rate and without overlap"
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
      memory: What it holds on each device.
      device_kind: What ``jax.devices()[0].device_kind`` says.
      dtype: Of the matmuls' operands: bf16, f16 or f32.

    Source:
      The formulas are those of "How to Scale Your Model", chapter 3
      (jax-ml.github.io/scaling-book/sharding), for large arrays: latency is left out.
    """
    found = peak(device_kind)
    local_flops = flops.matmul / math.prod(ledger.mesh_shape.values())
    touched = memory.arguments + memory.outputs
    seconds: dict[tuple[str, ...], float] = {}
    if found is not None:
        for row in ledger.rows:
            spent = row.counted_calls * collective_seconds(row, found)
            seconds[row.axes] = seconds.get(row.axes, 0.0) + spent
    rate = peak_flops(device_kind, dtype)
    return Balance(
        device_kind=device_kind,
        flops=local_flops,
        memory_bytes=touched,
        communicated={axes: total.nbytes for axes, total in ledger.by_axis().items()},
        compute=local_flops / rate if rate else None,
        memory=touched / found.memory_bandwidth if found else None,
        communication=seconds if found else None,
    )


def collective_seconds(row: Collective, peak: Peak) -> float:
    """Seconds at best of one call of a collective.

    V is the size of the array that all devices of a group hold together (the bytes of
    the row, but for all-to-all), W the link bandwidth, n the devices of a group:

        all-gather, reduce-scatter   V / W · (n − 1) / n
        all-reduce                   2 V / W · (n − 1) / n
        all-to-all                   v / W · (n − 1) / n on a switch, where each device
                                     sends v = V / n; V / 4 W around a ring
        permute, broadcast           v / W; on a ring one of its two directions
    """
    sent = sent_bytes(row)
    if peak.is_torus:
        match row.kind:
            case "all-to-all" | "ragged-all-to-all":
                sent = row.nbytes * row.group_size / 4
            case "collective-permute" | "collective-broadcast":
                sent = 2 * row.nbytes
    return sent / peak.link_bandwidth


def sent_bytes(row: Collective) -> float:
    """Bytes that one device sends in one call, by the algorithm that sends least.

    They are those of the formulas above on a switch. Over the time that the call takes
    they give the bandwidth that NCCL's tests call bus bandwidth.
    """
    share = (row.group_size - 1) / row.group_size
    match row.kind:
        case "all-reduce":
            return 2 * share * row.nbytes
        case "collective-permute" | "collective-broadcast":
            return float(row.nbytes)
    return share * row.nbytes


def format_seconds(seconds: float | None) -> str:
    """Seconds with the unit that fits, or a question mark where they are not known.

    Example:
      >>> format_seconds(0.0021), format_seconds(None)
      ('2.10 ms', '?')
    """
    if seconds is None:
        return "?"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds / 1e-6:.2f} µs"
