# SPDX-License-Identifier: Apache-2.0
"""What the devices of a run send, by mesh axis, as metrics."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tessera.analysis.ledger import Ledger
from tessera.analysis.measured_times import Measured
from tessera.errors.untrusted_text import parse_json

_BYTES = "communication_bytes/"
_SECONDS = "communication_seconds/"
# Of a line of metrics: a few dozen numbers by name.
_LONGEST_LINE = 2**20


def new_bytes(ledger: Ledger, metrics: Path) -> dict[str, float]:
    """Bytes of one step over each combination of axes, unless they are known already.

    A run that resumes on the same mesh so has the lines of one that was not stopped.

    Args:
      ledger: Of the compiled step.
      metrics: The run's ``metrics.jsonl``.
    """
    sent = {
        _name(_BYTES, axes): float(total.nbytes)
        for axes, total in ledger.by_axis().items()
    }
    return {} if sent == _last_bytes(metrics) else sent


def seconds(measured: Measured) -> dict[str, float]:
    """Seconds of one step in collectives over each combination of axes."""
    times = measured.communication.items()
    return {_name(_SECONDS, axes): spent.seconds for axes, spent in times}


def _name(kind: str, axes: tuple[str, ...]) -> str:
    # A character that all trackers take in a name.
    return kind + "-".join(axes)


def _last_bytes(metrics: Path) -> Mapping[str, Any]:
    last: dict[str, Any] = {}
    with metrics.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if _BYTES in line:
                with suppress(ValueError):
                    read = parse_json(line, longest=_LONGEST_LINE)
                    last = {n: x for n, x in read.items() if n.startswith(_BYTES)}
    return last
