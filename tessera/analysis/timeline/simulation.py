# SPDX-License-Identifier: Apache-2.0
"""Executes a schedule on one stream of computation and on the links of a target.

Computation goes in the order of the schedule. A transfer begins when the schedule
starts it and its links are free; the end of one that is not over is waited for.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from tessera.analysis.timeline.schedule import (
    Branch,
    Compute,
    Loop,
    Start,
    Step,
    Transfer,
    Wait,
)
from tessera.targets.link_routes import UsedLink

Seconds: TypeAlias = defaultdict[str, float]

# Why the device waits for a transfer.
SYNCHRONOUS: Final = "synchronous"
LINKS_BUSY: Final = "links busy"
NEEDED_AT_ONCE: Final = "needed at once"
TOO_LITTLE_BESIDE: Final = "too little beside it"


def _no_seconds() -> Seconds:
    return defaultdict(float)


@dataclass(frozen=True, slots=True)
class Executed:
    """An operation or a transfer, and how often it is executed.

    Attributes:
      work: What it executes.
      times: How often it is executed, a fraction where a conditional skips it.
    """

    work: Compute | Transfer
    times: float


@dataclass
class Totals:
    """Sums over what was executed, in seconds.

    Attributes:
      compute: Of operations on the stream of computation, by kind.
      transferred: Of transfers, by their name.
      waited: For transfers, by their name.
      reasons: The same, by name and why.
      hidden: Of transfers beside which the device computes, by their name.
      conditional: Of computation in branches that a run may skip.
      unknown_loops: Loops whose length is known only at run time; each counts once.
    """

    compute: Seconds = field(default_factory=_no_seconds)
    transferred: Seconds = field(default_factory=_no_seconds)
    waited: Seconds = field(default_factory=_no_seconds)
    reasons: defaultdict[tuple[str, str], float] = field(
        default_factory=lambda: defaultdict(float)
    )
    hidden: Seconds = field(default_factory=_no_seconds)
    conditional: float = 0.0
    unknown_loops: int = 0

    def add(self, more: "Totals", times: int = 1) -> None:
        """Add what was executed several times."""
        for part in ("compute", "transferred", "waited", "reasons", "hidden"):
            for name, seconds in getattr(more, part).items():
                getattr(self, part)[name] += times * seconds
        self.conditional += times * more.conditional
        self.unknown_loops += more.unknown_loops

    def reason(self, transfer: Transfer) -> str:
        """Why the device waits for it, for most of the time that it waits."""
        seconds = {
            why: spent
            for (name, why), spent in self.reasons.items()
            if name == transfer.name
        }
        return max(seconds, key=lambda why: seconds[why], default="")


@dataclass
class _Flight:
    """A transfer that is on its way.

    Attributes:
      transfer: It.
      issued: When the schedule starts it.
      start: When it begins: once its links are free.
      end: When it is over.
      hidden: Seconds of it in which the device has computed so far.
      beside: Seconds that the device has computed since it was issued.
    """

    transfer: Transfer
    issued: float
    start: float
    end: float
    hidden: float = 0.0
    beside: float = 0.0

    def hide(self, start: float, end: float, share: float = 1.0) -> None:
        """Compute beside it for a share of the time from start to end."""
        both = min(end, self.end) - max(start, self.start)
        self.hidden += share * max(0.0, both)
        self.beside += share * (end - start)

    def reason(self, now: float) -> str:
        """Why it is not over when the schedule waits for it, now."""
        if self.start - self.issued > (self.end - now) / 2:
            return LINKS_BUSY
        is_alone = self.beside < (self.end - self.start) / 10
        return NEEDED_AT_ONCE if is_alone else TOO_LITTLE_BESIDE


class Simulation:
    """One execution of a program by one device.

    Attributes:
      now: Seconds that the stream of computation has taken.
      totals: Sums over what was executed.
      executed: What was executed.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self.now = 0.0
        self._free: dict[frozenset[UsedLink], float] = {}
        self._flights: dict[str, _Flight] = {}
        self.totals, self.executed = self._run(steps, 1.0)

    def _run(
        self, steps: Iterable[Step], share: float
    ) -> tuple[Totals, list[Executed]]:
        """Execute steps that are reached in a share of the executions around them.

        On average each of them takes that share of its time.
        """
        totals, executed = Totals(), list[Executed]()
        for step in steps:
            match step:
                case Compute():
                    spent = share * step.seconds
                    totals.compute[step.kind] += spent
                    executed.append(Executed(step, share))
                    self._compute(spent)
                case Start(key, transfer):
                    spent = share * transfer.seconds
                    self._begin(key, transfer, spent)
                    totals.transferred[transfer.name] += spent
                    executed.append(Executed(transfer, share))
                case Wait():
                    self._wait(step, totals)
                case Loop():
                    executed += self._loop(step, share, totals)
                case Branch():
                    executed += self._branch(step, share, totals)
        return totals, executed

    def _branch(self, branch: Branch, share: float, totals: Totals) -> list[Executed]:
        executed: list[Executed] = []
        for taken, body in branch.parts:
            inside, each = self._run(body, share * taken)
            if not branch.is_known:
                inside.conditional = sum(inside.compute.values())
            totals.add(inside)
            executed += each
        return executed

    def _compute(self, seconds: float) -> None:
        for flight in self._flights.values():
            flight.hide(self.now, self.now + seconds)
        self.now += seconds

    def _begin(self, key: str, transfer: Transfer, seconds: float) -> None:
        """Start a transfer as soon as its links are free."""
        links = transfer.links
        busy = (end for used, end in self._free.items() if not links.isdisjoint(used))
        start = max([self.now, *busy])
        end = start + seconds
        self._free[links] = end
        self._flights[key] = _Flight(transfer, self.now, start, end)

    def _wait(self, wait: Wait, totals: Totals) -> None:
        if wait.key not in self._flights:
            return
        flight = self._flights.pop(wait.key)
        name = flight.transfer.name
        totals.hidden[name] += flight.hidden
        if flight.end > self.now:
            reason = SYNCHRONOUS if wait.is_synchronous else flight.reason(self.now)
            totals.waited[name] += flight.end - self.now
            totals.reasons[name, reason] += flight.end - self.now
            self.now = flight.end

    def _loop(self, loop: Loop, share: float, totals: Totals) -> list[Executed]:
        """All iterations of a loop, of which the second stands for those after it."""
        count = 1 if loop.count is None else loop.count
        totals.unknown_loops += loop.count is None
        if count == 0:
            return []
        start = self.now
        first, executed = self._run(loop.body, share)
        totals.add(first)
        if count > 1:
            begin, free, flights = self.now, dict(self._free), dict(self._flights)
            later, executed = self._run(loop.body, share)
            later.unknown_loops = 0
            totals.add(later, count - 1)
            each = self.now - begin
            computing = sum(later.compute.values()) / each if each else 0.0
            self._skip((count - 2) * each, computing, free, flights)
        if self.now == start:
            return []
        return [replace(part, times=part.times * count) for part in executed]

    def _skip(
        self,
        seconds: float,
        computing: float,
        free: dict[frozenset[UsedLink], float],
        flights: dict[str, _Flight],
    ) -> None:
        """Let iterations pass like the last one.

        For a share of its time it was ``computing``. Before it, links were busy as in
        ``free``, and ``flights`` were on their way.
        """
        for links, end in self._free.items():
            if free.get(links) != end:
                self._free[links] = end + seconds
        for key, flight in self._flights.items():
            if flights.get(key) is flight:
                flight.hide(self.now, self.now + seconds, computing)
            else:
                flight.issued += seconds
                flight.start += seconds
                flight.end += seconds
        self.now += seconds
