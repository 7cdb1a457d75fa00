# SPDX-License-Identifier: Apache-2.0
"""``runtime.max_run_time``: ends a run before the time limit of its queue does.

The queue counts from the start of its job, so what counts here is the age of the
launcher, which all attempts of a run share, or that of the process without one.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tessera.runtime.launcher_protocol import ParentLauncher

_IMPORTED_AT: Final = time.monotonic()


@contextmanager
def time_limit(
    limit: float | None, request_stop: Callable[[str], None]
) -> Iterator[None]:
    """Request a stop once a time is over, if the block still runs then.

    Args:
      limit: Seconds from the start of the launcher, or else of this process; None is no
        limit.
      request_stop: Gets the cause, in a thread of its own.
    """
    if limit is None:
        yield
        return
    left = limit - process_age(_oldest_process(os.environ))
    cause = f"runtime.max_run_time={limit:g} is over"
    timer = threading.Timer(max(left, 0.0), request_stop, [cause])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def process_age(pid: int) -> float:
    """Seconds since a process began.

    Where the system does not say, since this one imported the module.
    """
    try:
        # The 22nd field, behind a name in parentheses that may contain spaces.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic() - _IMPORTED_AT


def _oldest_process(environ: Mapping[str, str]) -> int:
    launcher = ParentLauncher.find(environ)
    return launcher.pid if launcher and launcher.is_rank else os.getpid()
