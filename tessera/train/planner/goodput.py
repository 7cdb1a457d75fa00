# SPDX-License-Identifier: Apache-2.0
"""Predicts the goodput of a run that failures interrupt, and when to save.

Failures are a Poisson process. The formulas are those of Daly 2006 ("A higher order
estimate of the optimum checkpoint interval"), the interval that of Young 1974.
"""

import math
from dataclasses import dataclass
from typing import Final

LLAMA_3: Final = 419 / (54 * 24 * 16_384)
"""Interruptions per device and hour of the 54 days of Llama 3 405B on 16,384 H100
(arXiv 2407.21783, section 3.3.4)."""


@dataclass(frozen=True)
class Goodput:
    """The share of wall time in steps that count, and what the rest is lost to.

    Attributes:
      interval: Seconds of training from one checkpoint to the next.
      writing: The share in which the loop waits for checkpoints.
      repeating: The share in steps that a failure undid.
      restarting: The share from a failure to the next step.
    """

    interval: float
    writing: float
    repeating: float
    restarting: float

    @property
    def share(self) -> float:
        """The goodput."""
        return 1 - self.writing - self.repeating - self.restarting


def goodput(
    between: float, wait: float, write: float, restart: float, step: float = 0.0
) -> Goodput:
    """The goodput of a run that saves as often as loses least.

    Args:
      between: Mean seconds from one failure to the next, of all devices together.
      wait: Seconds in which the loop waits for a checkpoint.
      write: Seconds until the checkpoint is complete, most of them in the background.
      restart: Seconds from a failure to the next step.
      step: Seconds of a step, the shortest interval.

    Example:
      >>> found = goodput(between=11_000, wait=1, write=30, restart=300)
      >>> f"{found.share:.1%}, a checkpoint every {found.interval:.0f} s"
      '95.7%, a checkpoint every 148 s'
    """
    # The next one cannot begin before the last is complete.
    interval = max(math.sqrt(2 * wait * between), write, step)
    failures = math.expm1((interval + wait) / between)  # for each checkpoint
    # A failure also undoes what was done while the last checkpoint was written.
    undone = failures * between * math.expm1(write / between)
    restarts = failures * between * math.exp(write / between)
    restarts *= math.expm1(restart / between)
    repeated = failures * between - interval - wait + undone
    total = interval + wait + repeated + restarts
    return Goodput(interval, wait / total, repeated / total, restarts / total)


def seconds_between(devices: int, rate: float = LLAMA_3) -> float:
    """Mean seconds between failures at a rate per device and hour."""
    return 3600 / (rate * devices)


def spare_hosts(between: float, repair: float, certainty: float = 0.99) -> int:
    """Hosts that replace those in repair, so that almost no failure waits for one.

    Args:
      between: As for ``goodput``; each failure takes a host out.
      repair: Seconds until it is back.
      certainty: The probability that no more are out at a time.
    """
    mean, number = repair / between, 0
    term = found = math.exp(-mean)
    while found < certainty:
        number += 1
        term *= mean / number
        found += term
    return number
