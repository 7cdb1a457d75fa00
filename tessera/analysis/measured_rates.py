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
    data, whole = as_json(measured, balance, ledger), measured.seconds
    title = (
        f"measured on {balance.device_kind}, per device and execution: mean of "
        f"{measured.executions} executions of {format_seconds(whole)}"
    )
    table = aligned(_COLUMNS, _rows(measured, balance, data), right=_COLUMNS[1:])
    notes = ["a collective's time includes waiting for the other devices"]
    if measured.overlap is not None:
        hidden = f"{100 * measured.overlap:.0f} %"
        notes.insert(0, f"{hidden} of communication ran while the device computed")
    achieved = format_flops(data["matmul_flops_per_second"])
    share = _percent(data["matmul_share_of_peak"])
    text = f"over the whole step {achieved} FLOP/s in matmuls"
    notes.append(text + (f", {share} of the peak" if share else ""))
    if balance.device_kind == "cpu":
        notes.append("devices simulated on a CPU share its cores")
    elif not share:
        notes.append("the peaks of this device are not known")
    return "\n".join([title, table, *notes])


def as_json(measured: Measured, balance: Balance, ledger: Ledger) -> dict[str, Any]:
    """The same as plain data: seconds, bytes/s, FLOP/s, shares of 1."""
    machine, data = machine_of_kind(balance.device_kind), measured.as_json()
    for entry in data["communication"]:
        rate = _bandwidth(measured, ledger, tuple(entry["axes"]))
        entry["bytes_per_second"], entry["share_of_peak"] = rate, None
        if rate and machine:
            entry["share_of_peak"] = rate / machine.links[0].bandwidth
    achieved, least = balance.flops / measured.seconds, balance.compute
    data["matmul_flops_per_second"] = achieved
    data["matmul_share_of_peak"] = least / measured.seconds if least else None
    return data


def _rows(
    measured: Measured, balance: Balance, data: dict[str, Any]
) -> Iterator[list[str]]:
    whole, spent, least = measured.seconds, measured.compute, balance.compute
    yield [
        "computation",
        f"{format_flops(balance.flops)} FLOPs in matmuls",
        "",
        format_seconds(spent),
        _percent(spent / whole),
        "",
        f"{format_flops(balance.flops / spent if spent else 0.0)} FLOP/s",
        _percent(least / spent if least and spent else None),
    ]
    for entry in data["communication"]:
        axes, rate = tuple(entry["axes"]), entry["bytes_per_second"]
        yield [
            f"communication over {'×'.join(axes)}",
            format_bytes(balance.communicated[axes]),
            f"{entry['calls']:g}",
            format_seconds(entry["seconds"]),
            _percent(entry["seconds"] / whole),
            _percent(entry["hidden"] / entry["seconds"] if entry["seconds"] else None),
            f"{format_bytes(rate)}/s" if rate else "",
            _percent(entry["share_of_peak"]),
        ]
    idle = measured.idle
    yield ["idle", "", "", format_seconds(idle), _percent(idle / whole), "", "", ""]


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


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"
