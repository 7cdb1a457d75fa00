# SPDX-License-Identifier: Apache-2.0
"""Names a rank that is slow: every step of a run takes as long as its slowest rank.

A step ends at the same time on all ranks, because they exchange arrays in it. So each
rank measures what is its own. Its *host* time is the part of a step in which its loop
does not wait for devices: in data, in Python, in a process that has no processor. Its
*device* time is that of a small matmul on each of its accelerators, when nothing else
runs there; CPU devices share processors, so that it would tell nothing of them. The
ranks share their times through the run's key-value store, with no device program.
"""

import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any, Final

import jax
import jax.numpy as jnp

from tessera.jax_compat import processes
from tessera.train.loop.run_records import RunRecords

_log: Final = logging.getLogger("tessera")
_KEY: Final = "tessera/rank_times"
_SHARED: Final = re.compile(r"(\d{1,15})" + 3 * r" (\d{1,9}\.\d{9})")
_EVERY_S: Final = 5.0
# So much longer than the others' median is slow; less is noise.
_SLOW: Final = 1.5
# Of a step: a host that takes less of it holds up nobody.
_HOLDS_UP: Final = 0.5
_REPEAT_WARNING_S: Final = 600.0
_PROBES: Final = 3
# Slow measurements in a row: one may meet something else that runs there.
_IN_A_ROW: Final = 3
_IS_SLOW: Final = (
    "rank %d is slow, and all others wait for it: %s takes %.4g s, the median of the "
    "others %.4g s"
)
_HOST: Final = "the host's part of a step (data, Python)"
_DEVICE: Final = "a matmul on its devices"


@dataclass(frozen=True)
class RankTime:
    """What one rank measured, in seconds.

    Attributes:
      number: Of the step after which it was measured.
      step: Mean of a step, the same on all ranks but for its noise.
      host: Mean of the host's own part of it.
      device: Of the small matmul, on the slowest of the rank's devices; 0 on CPUs.
    """

    number: int
    step: float
    host: float
    device: float


class RankTimes:
    """Compares the ranks of a run every few seconds; a single rank has none to compare.

    Args:
      devices: Of this process.
      rank: Its number; rank 0 reports.
      count: Ranks of the run.
      records: Where the times are recorded.
    """

    def __init__(
        self, devices: Any, rank: int, count: int, records: RunRecords
    ) -> None:
        self._devices, self._rank, self._count = devices, rank, count
        self._records = records
        self._board = processes.board() if count > 1 else None
        self._steps, self._seconds, self._host = 0, 0.0, 0.0
        self._shared_at = time.monotonic()
        # By what is slow: the rank, the number of its last time, how many in a row.
        self._in_a_row = dict[str, tuple[int, int, int]]()
        self._quiet_until = dict[tuple[str, int], float]()

    def take(self, step: int, seconds: float, device_wait: float) -> None:
        """Count a step; every few seconds, share the means, and compare them.

        Args:
          step: Its number.
          seconds: How long it took.
          device_wait: Of these, how long the loop waited for devices.
        """
        if self._board is None:
            return
        self._steps += 1
        self._seconds += seconds
        self._host += max(seconds - device_wait, 0.0)
        if time.monotonic() - self._shared_at < _EVERY_S:
            return
        steps, self._shared_at = self._steps, time.monotonic()
        means = self._seconds / steps, self._host / steps, device_seconds(self._devices)
        self._steps, self._seconds, self._host = 0, 0.0, 0.0
        try:
            text = " ".join([str(step), *(f"{seconds:.9f}" for seconds in means)])
            self._board.put(f"{_KEY}/{self._rank}", text)
            times = self._read() if self._rank == 0 else {}
        except Exception:  # the connection breaks with another rank, which others tell
            self._board = None
            return
        if len(times) == self._count:
            self._report(step, steps, times)

    def _read(self) -> dict[int, RankTime]:
        """The times of the ranks that have shared any; what is no time is left out."""
        assert self._board is not None
        times: dict[int, RankTime] = {}
        for rank, text in self._board.texts(_KEY).items():
            match = _SHARED.fullmatch(text)
            if match and rank.isdecimal() and int(rank) < self._count:
                times[int(rank)] = RankTime(
                    int(match[1]), *map(float, match.groups()[1:])
                )
        return times

    def _report(self, step: int, steps: int, times: Mapping[int, RankTime]) -> None:
        hosts = {rank: times[rank].host for rank in sorted(times)}
        devices = {rank: times[rank].device for rank in sorted(times)}
        numbers = {rank: each.number for rank, each in times.items()}
        holds_up = _HOLDS_UP * max(each.step for each in times.values())
        waiting = self._compare(_HOST, hosts, numbers, least=holds_up)
        self._compare(_DEVICE, devices, numbers)
        self._records.write(
            "ranks",
            step=step,
            seconds={str(rank): round(it, 6) for rank, it in hosts.items()},
            device_seconds={str(rank): round(it, 6) for rank, it in devices.items()},
            waiting_seconds=round(steps * waiting, 6),
        )

    def _compare(
        self,
        what: str,
        seconds: Mapping[int, float],
        numbers: Mapping[int, int],
        least: float = 0.0,
    ) -> float:
        """Name a rank that is slow several times in a row, once in ten minutes.

        Returns:
          How long the others wait for it; 0 if it is not slow.
        """
        slowest, others = slowest_of(seconds)
        own, now = seconds[slowest], time.monotonic()
        if own <= max(_SLOW * others, least):
            self._in_a_row.pop(what, None)
            return 0.0
        rank, number, times = self._in_a_row.get(what, (slowest, -1, 0))
        if rank != slowest:
            times = 1
        elif number != numbers[slowest]:  # else it has shared none since
            times += 1
        self._in_a_row[what] = slowest, numbers[slowest], times
        quiet_until = self._quiet_until.get((what, slowest), 0.0)
        if times >= _IN_A_ROW and now >= quiet_until:
            self._quiet_until[what, slowest] = now + _REPEAT_WARNING_S
            _log.warning(_IS_SLOW, slowest, what, own, others)
        return own - others


def slowest_of(seconds: Mapping[int, float]) -> tuple[int, float]:
    """The slowest rank, and the median of the others.

    Example:
      >>> slowest_of({0: 0.1, 1: 0.4, 2: 0.2})
      (1, 0.15000000000000002)
    """
    slowest = max(seconds, key=lambda rank: seconds[rank])
    return slowest, median(s for rank, s in seconds.items() if rank != slowest)


def device_seconds(devices: Any) -> float:
    """How long a small matmul takes on the slowest of some devices, in seconds.

    Args:
      devices: Of this process. What they still compute is waited for first.

    Returns:
      The seconds, or 0 for CPU devices, which share their processors.
    """
    if devices[0].platform == "cpu":
        return 0.0
    return max(map(_matmul_seconds, devices))


def _matmul_seconds(device: Any) -> float:
    array = _array(device)
    _matmuls(array).block_until_ready()
    seconds: list[float] = []
    for _ in range(_PROBES):
        begin = time.perf_counter()
        _matmuls(array).block_until_ready()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


@jax.jit
def _matmuls(array: jax.Array) -> jax.Array:
    return jnp.tanh(array @ array) @ array


@cache
def _array(device: Any) -> jax.Array:
    return jax.device_put(jnp.full((2048, 2048), 1e-3), device)
