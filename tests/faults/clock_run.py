# SPDX-License-Identifier: Apache-2.0
"""A training run in two processes whose clocks are set while it goes on.

Its arguments are those of ``run_training.py``. At step 3 the clock of rank 0 goes five
minutes forward, and at step 5 ten minutes back; that of rank 1 goes the other ways.
Only Python's clocks are set.
"""

import os
import sys
import time
from typing import Any

from tessera.train.loop import train
from tessera.train.loop.main import main
from tessera.train.loop.metrics import MetricWriter

JUMPS = {3: 300.0, 5: -600.0}
offset, real_time = 0.0, time.time


class Writer(MetricWriter):
    """Sets the clock when the numbers of a step are written."""

    def write(self, step: int, values: Any) -> None:
        global offset
        super().write(step, values)
        sign = 1 if os.environ["RANK"] == "0" else -1
        offset += sign * JUMPS.get(step, 0.0)


if __name__ == "__main__":
    time.time = lambda: real_time() + offset
    time.time_ns = lambda: int(time.time() * 1e9)
    train.MetricWriter = Writer  # type: ignore[misc]
    sys.exit(main())
