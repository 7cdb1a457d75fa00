# SPDX-License-Identifier: Apache-2.0
"""Goodput: the share of a run's wall time that went into steps that counted.

The rest is counted by its cause, over all attempts, from the beginning of the first
process. A step that a later attempt repeats did not count. The rollout that a step
learns from, and its rewards, are parts of the step. The term is Google's ML
Productivity Goodput (https://cloud.google.com/blog, 2024).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from tessera.train.records.events import Event

# Phase of the watchdog -> cause.
_CAUSE_OF: Final = {
    "start": "start",
    "claim": "start",
    "startup": "start",
    "rendezvous": "waiting_for_ranks",
    "shutdown": "waiting_for_ranks",
    "compile": "compile",
    "evaluation": "evaluation",
    "save": "checkpoint",
}

CAUSES: Final = (
    "step",
    "repeated_steps",
    *dict.fromkeys(_CAUSE_OF.values()),
    "data",
    "restart",
    "other",
)
"""What the time of a run went into; ``step`` alone is goodput."""

STEP_PARTS: Final = ("rollout", "reward", "step")
"""Phases whose time counts as ``step``."""


@dataclass
class Goodput:
    """Where the wall time of a run went.

    Attributes:
      seconds: By cause, all of ``CAUSES``.
      parts: By phase, all of ``STEP_PARTS``; together the seconds of ``step``.
    """

    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(CAUSES, 0.0)
    )
    parts: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(STEP_PARTS, 0.0)
    )
    # Phase, first step, last step and seconds of what may still be repeated.
    _steps: list[tuple[str, int, int, float]] = field(default_factory=list)
    _ended_at: float | None = None

    @property
    def total_seconds(self) -> float:
        """Wall time from the beginning of the first process."""
        return sum(self.seconds.values())

    @property
    def shares(self) -> dict[str, float]:
        """The shares of the wall time, by cause; all are 0 before it begins."""
        total = self.total_seconds or 1.0
        return {cause: seconds / total for cause, seconds in self.seconds.items()}

    def add(self, event: Event) -> None:
        """Count the next event of the run; those that took no time count nothing."""
        kind = event["event"]
        if kind == "start":
            begin = _number(event.get("process_start"))
            if self._ended_at is not None and begin is not None:
                # Clocks may be set: no time is negative.
                self.seconds["restart"] += max(begin - self._ended_at, 0.0)
            self._repeat_after(event.get("resumed_step") or 0)
        elif kind == "ranks":
            self._wait(_number(event.get("waiting_seconds")) or 0.0)
        elif kind == "phase":
            self._add_phase(event)

    def _add_phase(self, event: Event) -> None:
        seconds = max(_number(event.get("seconds")) or 0.0, 0.0)
        begin = _number(event.get("time"))
        if begin is not None:
            self._ended_at = begin + seconds
        phase = str(event.get("phase"))
        if phase not in STEP_PARTS:
            self.seconds[_CAUSE_OF.get(phase, "other")] += seconds
            return
        data = min(max(_number(event.get("data_seconds")) or 0.0, 0.0), seconds)
        self.seconds["data"] += data
        self.seconds["step"] += seconds - data
        self.parts[phase] += seconds - data
        first, last = event.get("first_step"), event.get("last_step")
        if isinstance(first, int) and isinstance(last, int) and first <= last:
            self._steps.append((phase, first, last, seconds - data))

    def _repeat_after(self, step: int) -> None:
        """Count the steps after this one as repeated: others take their place."""
        kept: list[tuple[str, int, int, float]] = []
        for phase, first, last, seconds in self._steps:
            lost = (last - max(step, first - 1)) / (last - first + 1)
            lost = min(max(lost, 0.0), 1.0) * seconds
            self._move(phase, lost, "repeated_steps")
            if first <= step:
                kept.append((phase, first, min(last, step), seconds - lost))
        self._steps = kept

    def _wait(self, seconds: float) -> None:
        """Count time of the last steps as waiting for a slow rank."""
        for index in reversed(range(len(self._steps))):
            phase, first, last, of_steps = self._steps[index]
            if phase != "step":
                continue
            waited = min(max(seconds, 0.0), of_steps)
            self._steps[index] = phase, first, last, of_steps - waited
            self._move(phase, waited, "waiting_for_ranks")
            if (seconds := seconds - waited) <= 0:
                return

    def _move(self, phase: str, seconds: float, cause: str) -> None:
        """Count time of a part of a step as lost."""
        self.parts[phase] -= seconds
        self.seconds["step"] -= seconds
        self.seconds[cause] += seconds


def goodput_of(events: Iterable[Event]) -> Goodput:
    """The goodput of a run, by all events of all of its attempts.

    Args:
      events: As ``read_events`` gives them.

    Example:
      >>> events = [
      ...     {"event": "start", "time": 0.0, "process_start": 0.0},
      ...     {"event": "phase", "time": 0.0, "phase": "compile", "seconds": 1.0},
      ...     {"event": "phase", "time": 1.0, "phase": "step", "seconds": 3.0},
      ... ]
      >>> goodput_of(events).shares["step"]
      0.75
    """
    goodput = Goodput()
    for event in events:
        goodput.add(event)
    return goodput


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None
