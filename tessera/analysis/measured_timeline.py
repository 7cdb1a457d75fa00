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
from tessera.analysis.timeline.event import Event, perfetto
from tessera.analysis.trace_events import OpEvent


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
      the program's operations, or where the executions cannot be told apart.
    """
    axes_of = axes_by_instruction(module, ledger)
    own = [event for event in events if event.op in axes_of]
    device = min((event.device for event in own), default=None)
    entry = module.computations[module.entry].instructions
    last = _last_execution(
        [event for event in own if event.device == device], entry, executions
    )
    if not last:
        return None
    begin = last[0].start
    drawn = []
    for event in last:
        axes = axes_of[event.op]
        lane = "computation" if axes is None else f"sent over {'×'.join(axes)}"
        start, spent = event.start - begin, event.end - event.start
        drawn.append(
            Event(event.op, "", "", lane, axes or (), lane, start, spent, spent, 1)
        )
    return perfetto(drawn, "the last measured execution on the first device")


def _last_execution(
    events: Collection[OpEvent], entry: Collection[str], executions: int
) -> list[OpEvent]:
    """The events of one device in its last execution, in order; none if unknown.

    Instructions of the entry computation run once in each execution, and a device runs
    one after another. What runs between the last of them in one execution and the first
    in the next belongs to a loop, of which nothing says whose it is.
    """
    ordered = sorted(events, key=lambda event: event.start)
    if executions == 1:
        return ordered
    runs = defaultdict[str, list[OpEvent]](list)
    for event in ordered:
        if event.op in entry:
            runs[event.op].append(event)
    once = [found for found in runs.values() if len(found) == executions]
    if not once:
        return []
    before, begin = max(f[-2].end for f in once), min(f[-1].start for f in once)
    if any(before <= event.start < begin for event in ordered):
        return []
    return [event for event in ordered if event.start >= begin]
