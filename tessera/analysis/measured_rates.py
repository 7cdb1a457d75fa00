# SPDX-License-Identifier: Apache-2.0
"""Reports measured times as rates beside the devices' peaks, as a table and as JSON.

The bandwidth of a collective is that of the links: the bytes that each device sends by
the algorithm that sends least, divided by the collective's time.
"""

from collections.abc import Iterator
from typing import Any

from tessera.analysis.cost import Balance
from tessera.analysis.flops import format_flops
from tessera.analysis.ledger import Ledger
from tessera.analysis.measured_times import Measured
from tessera.analysis.memory import format_bytes
from tessera.analysis.tables import aligned, format_seconds
from tessera.targets.link_times import sent_bytes
from tessera.targets.machine import machine_of_kind

_COLUMNS = (
    *("part", "amount", "calls", "time"),
    *("of the step", "hidden", "rate", "of peak"),
)


def as_text(measured: Measured, balance: Balance, ledger: Ledger) -> str:
    """Computation, communication by axes, and idle time as a table.

    Args:
      measured: The times.
      balance: The amounts, and the device's peaks where they are known.
      ledger: The collectives.
    """
    count, whole = measured.executions, measured.seconds
    title = (
        f"measured on {balance.device_kind}, per device and execution: mean of {count} "
        f"executions of {format_seconds(whole)}"
    )
    table = aligned(_COLUMNS, _rows(measured, balance, ledger), right=_COLUMNS[1:])
    notes = ["a collective's time includes waiting for the other devices"]
    if measured.overlap is not None:
        hidden = f"{100 * measured.overlap:.0f} %"
        notes.insert(0, f"{hidden} of communication ran while the device computed")
    achieved = balance.flops / whole
    text = f"over the whole step {format_flops(achieved)} FLOP/s in matmuls"
    rate = _share(achieved, _peak_flops(balance))
    notes.append(text + (f", {rate} of the peak" if rate else ""))
    if balance.device_kind == "cpu":
        notes.append("devices simulated on a CPU share its cores")
    elif not rate:
        notes.append("the peaks of this device are not known")
    return "\n".join([title, table, *notes])


def as_json(measured: Measured, balance: Balance, ledger: Ledger) -> dict[str, Any]:
    """The same as plain data: seconds, bytes/s, FLOP/s, shares of 1."""
    link = _link(balance)
    data = measured.as_json()
    for entry in data["communication"]:
        rate = _bandwidth(measured, ledger, tuple(entry["axes"]))
        entry["bytes_per_second"] = rate
        entry["share_of_peak"] = rate / link if rate and link else None
    achieved, best = balance.flops / measured.seconds, _peak_flops(balance)
    data["matmul_flops_per_second"] = achieved
    data["matmul_share_of_peak"] = achieved / best if best else None
    return data


def _rows(measured: Measured, balance: Balance, ledger: Ledger) -> Iterator[list[str]]:
    whole = measured.seconds
    rate = balance.flops / measured.compute if measured.compute else 0.0
    yield [
        "computation",
        f"{format_flops(balance.flops)} FLOPs in matmuls",
        "",
        format_seconds(measured.compute),
        _share(measured.compute, whole),
        "",
        f"{format_flops(rate)} FLOP/s",
        _share(rate, _peak_flops(balance)),
    ]
    for axes, spent in measured.communication.items():
        bandwidth = _bandwidth(measured, ledger, axes)
        yield [
            f"communication over {'×'.join(axes)}",
            format_bytes(balance.communicated[axes]),
            f"{spent.calls:g}",
            format_seconds(spent.seconds),
            _share(spent.seconds, whole),
            _share(spent.hidden, spent.seconds),
            f"{format_bytes(bandwidth)}/s" if bandwidth else "",
            _share(bandwidth or 0.0, _link(balance)),
        ]
    idle = measured.idle
    yield ["idle", "", "", format_seconds(idle), _share(idle, whole), "", "", ""]


def _bandwidth(
    measured: Measured, ledger: Ledger, axes: tuple[str, ...]
) -> float | None:
    """Bytes/s that each device sends while collectives over some axes run."""
    sent = sum(
        sent_bytes(row.kind, row.nbytes, row.group_size) * row.counted_calls
        for row in ledger.rows
        if row.axes == axes
    )
    seconds = measured.communication[axes].seconds
    return sent / seconds if seconds else None


def _link(balance: Balance) -> float | None:
    found = machine_of_kind(balance.device_kind)
    return found.links[0].bandwidth if found else None


def _peak_flops(balance: Balance) -> float | None:
    return balance.flops / balance.compute if balance.compute else None


def _share(part: float, whole: float | None) -> str:
    return f"{100 * part / whole:.0f} %" if whole else ""
