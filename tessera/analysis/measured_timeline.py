# SPDX-License-Identifier: Apache-2.0
"""The measured timeline of a step: what one device did in its last execution.

It is written as a dry run's predicted one is, in Chrome's trace format, so that the
same pictures are drawn of both.
"""

from collections import defaultdict
from collections.abc import Collection
from typing import Any

from tessera.analysis.hlo import Module
from tessera.analysis.ledger import Ledger
from tessera.analysis.measured_times import axes_by_instruction
from tessera.analysis.trace_events import OpEvent

_COMPUTATION = "computation"


def measured_timeline(
    events: Collection[OpEvent], module: Module, ledger: Ledger, executions: int
) -> dict[str, Any] | None:
    """The last execution of a program on its first device, for ``json.dumps``.

    Args:
      events: Of the devices of this process.
      module: The compiled program.
      ledger: Its collectives.
      executions: How often it ran during the trace.

    Returns:
      A trace with a lane of computation and one for each combination of axes, in
      microseconds from the execution's first operation; None where no event is one of
      the program's operations, or none of them runs once in each execution.

    Source:
      "Trace Event Format", Google, section "Complete Events".
    """
    axes_of = axes_by_instruction(module, ledger)
    own = [event for event in events if event.op in axes_of]
    device = min((event.device for event in own), default=None)
    last = _last_execution([e for e in own if e.device == device], executions)
    if not last:
        return None
    kinds = {
        op: _COMPUTATION if axes is None else f"sent over {'×'.join(axes)}"
        for op, axes in axes_of.items()
    }
    lanes = {
        kind: lane for lane, kind in enumerate(sorted({kinds[e.op] for e in last}))
    }
    names = [
        {
            "ph": "M",
            "pid": 0,
            "tid": lane,
            "name": "thread_name",
            "args": {"name": kind},
        }
        for kind, lane in lanes.items()
    ]
    begin = last[0].start
    entries = [
        {
            "ph": "X",
            "pid": 0,
            "tid": lanes[kinds[event.op]],
            "name": event.op,
            "cat": kinds[event.op],
            "ts": round((event.start - begin) * 1e6, 3),
            "dur": round((event.end - event.start) * 1e6, 3),
        }
        for event in last
    ]
    return {"traceEvents": [*names, *entries], "displayTimeUnit": "ms"}


def _last_execution(events: Collection[OpEvent], executions: int) -> list[OpEvent]:
    """The events of one device from the beginning of its last execution.

    It begins where the first of the operations that run once in each does: those of
    loops run more often. A device runs one execution after another.
    """
    starts = defaultdict[str, list[float]](list)
    for event in events:
        starts[event.op].append(event.start)
    once = [max(times) for times in starts.values() if len(times) == executions]
    begin = min(once, default=float("inf"))
    return sorted(
        (event for event in events if event.start >= begin),
        key=lambda event: event.start,
    )
