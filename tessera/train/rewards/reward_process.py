# SPDX-License-Identifier: Apache-2.0
"""A process that calls reward functions, and is started again where it ends."""

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from threading import Timer
from time import monotonic
from typing import Any, Final

from tessera.errors import RewardError
from tessera.train.data import worker_process
from tessera.train.rewards.reward_functions import Arguments, Outcomes, call, load
from tessera.train.rewards.reward_names import RewardName

_START_SECONDS: Final = 120.0  # to import the modules of the functions


class RewardProcess:
    """A process with all functions of a run; at most one thread calls at a time.

    Args:
      names: The functions.
      columns: The columns of the records.
    """

    def __init__(self, names: Sequence[RewardName], columns: Sequence[str]) -> None:
        self._names, self._columns, self._is_closed = names, columns, False
        self._worker: worker_process.WorkerProcess | None = None

    def start(self) -> None:
        """Start the process, and import the functions.

        Raises:
          RewardError: [T720] one of them cannot be used, or imported.
        """
        try:
            self._call(_START_SECONDS, load, self._names, self._columns)
        except RuntimeError as error:
            raise RewardError(
                "the modules of the rewards cannot be imported",
                got=f"{', '.join(name.text for name in self._names)}: Python {error}",
                fix="import within the functions what hangs or ends Python",
            ) from error

    def score(self, index: int, arguments: Arguments, seconds: float) -> Outcomes:
        """Call a function; whatever happens is an outcome, as of ``call``."""
        try:
            if self._worker is None:
                self.start()
            return self._call(seconds, call, index, arguments, seconds)
        except RuntimeError as error:
            return str(error)
        except Exception as error:
            return f"could not be called ({error})"

    def close(self) -> None:
        """End the process, and do not start it again."""
        self._is_closed = True
        worker, self._worker = self._worker, None
        _kill(worker)
        if worker is not None:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(5)

    def _call(self, seconds: float, function: Any, *arguments: Any) -> Any:
        """What a function returns in the process, which any error ends.

        Raises:
          RuntimeError: It took too long, or the process has ended.
        """
        worker = self._worker or worker_process.WorkerProcess(
            worker_process.READER_BYTES
        )
        self._worker, end = worker, monotonic() + seconds
        timer = Timer(seconds, _kill, [worker])
        timer.start()
        try:
            if self._is_closed:
                raise RuntimeError("could not be called (the run has ended)")
            return worker.call(function, *arguments)
        except BaseException as error:
            self._worker = None
            _kill(worker)
            if not isinstance(error, worker_process.WorkerDiedError):
                raise
            if monotonic() < end:
                raise RuntimeError(f"ended its process ({error})") from error
            reason = f"took too long (more than {seconds:.3g} s)"
            raise RuntimeError(reason) from error
        finally:
            timer.cancel()


def _kill(worker: worker_process.WorkerProcess | None) -> None:
    """End a process, and those that it has started, which may have outlived it."""
    if worker is not None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.process.pid, signal.SIGKILL)
