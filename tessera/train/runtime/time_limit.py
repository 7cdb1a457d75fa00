# SPDX-License-Identifier: Apache-2.0
"""``runtime.max_run_time``: ends a run before the time limit of its queue does.

The queue counts from the start of its job, so what counts here is the age of the
launcher, which all attempts of a run share, or that of the process without one.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from tessera.train.runtime.launcher_protocol import ParentLauncher
from tessera.train.runtime.process_age import process_age


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


def _oldest_process(environ: Mapping[str, str]) -> int:
    launcher = ParentLauncher.find(environ)
    return launcher.pid if launcher and launcher.is_rank else os.getpid()
