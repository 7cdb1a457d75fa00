# SPDX-License-Identifier: Apache-2.0
"""``training.tracker``: sends a run's numbers to a tracker, and never waits for it.

A thread calls the tracker's library, which may wait minutes for a server. What fails
there is warned of once; ``metrics.jsonl`` has all numbers in any case.
"""

import importlib
import json
import logging
import queue
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeAlias

import yaml

from tessera.errors import MissingLibraryError, printable
from tessera.train.files.untrusted_json import parse_json
from tessera.train.loop.run_folder import TRACKER, RunFolder, write_durably

Outcome: TypeAlias = Literal["finished", "failed", "preempted"]
Log: TypeAlias = Callable[[int, Mapping[str, float]], None]

_log: Final = logging.getLogger("tessera")
# Lines that wait for the tracker; a run of days does not fill its memory with them.
_MOST_WAITING: Final = 10_000
# How long the end of the run waits for the lines that are left. One that is stopped or
# has failed holds up other ranks, or a grace period.
_FINISH_SECONDS: Final[Mapping[Outcome, float]] = {
    "finished": 60.0,
    "failed": 5.0,
    "preempted": 5.0,
}


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker shows of a run.

    Attributes:
      name: Its name.
      folder: Its folder, for files of the tracker.
      settings: Its settings, as ``config.yaml`` has them.
      run_id: The tracker's id of the run that goes on; None for a new one.
    """

    name: str
    folder: Path
    settings: Mapping[str, Any]
    run_id: str | None = None


class Tracker(Protocol):
    """A run of a tracker; all calls come from the thread that opened it.

    Attributes:
      run_id: By which another process can go on with it.
    """

    run_id: str

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send numbers of a step; after a resume a step may come again."""

    def finish(self, outcome: Outcome) -> None:
        """Send what is left, and how the run has ended."""


def check_tracker(tracker: str) -> None:
    """Check that the library of a tracker is installed.

    Raises:
      MissingLibraryError: [T511] it is not.
    """
    if tracker == "none":
        return
    spec = find_spec(tracker)
    # A folder has no origin: W&B makes one of its own name where a run is started.
    if spec is None or spec.origin is None:
        raise MissingLibraryError(
            f"training.tracker={tracker} needs a library that is not installed",
            got=f"there is no module {tracker!r}",
            fix=f"run: pip install 'tessera-spmd[{tracker}]'\n"
            "or use training.tracker=none",
        )


@contextmanager
def tracked(
    folder: RunFolder | None,
    config_text: str,
    is_stopped: Callable[[], bool],
) -> Iterator[Log]:
    """Track a run for the length of a ``with`` block; yields what sends numbers.

    Args:
      folder: The run's; None in processes that send nothing.
      config_text: The run's configuration, YAML; its ``training.tracker`` is used.
      is_stopped: Asked at the end: whether the run was told to stop.
    """
    settings = yaml.safe_load(config_text)
    tracker = settings["training"]["tracker"]
    if tracker == "none" or folder is None:
        yield lambda step, numbers: None
        return
    own = _read_id(folder.path / TRACKER, tracker)
    run = TrackedRun(settings["name"], folder.path, settings, own)
    thread = _TrackerThread(tracker, run)
    try:
        yield thread.log
    except BaseException:
        thread.finish("failed")
        raise
    thread.finish("preempted" if is_stopped() else "finished")


class _TrackerThread:
    """Hands numbers to a tracker in a thread."""

    def __init__(self, name: str, run: TrackedRun) -> None:
        self._name, self._run = name, run
        self._lines = queue.Queue[tuple[int, Mapping[str, float]] | Outcome](
            _MOST_WAITING
        )
        self._is_warned = False
        self._thread = threading.Thread(target=self._work, name="tracker", daemon=True)
        self._thread.start()

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        if not self._thread.is_alive():
            return  # it has warned
        try:
            self._lines.put_nowait((step, numbers))
        except queue.Full:
            self._warn(f"it is {_MOST_WAITING:,} lines behind at step {step}")

    def finish(self, outcome: Outcome) -> None:
        seconds = _FINISH_SECONDS[outcome]
        try:
            self._lines.put_nowait(outcome)
            self._thread.join(seconds)
        except queue.Full:
            pass
        if self._thread.is_alive():
            self._warn(f"it does not finish in {seconds:g} s")

    def _work(self) -> None:
        try:
            tracker = _open(self._name, self._run)
            while not isinstance(line := self._lines.get(), str):
                try:
                    tracker.log(*line)
                except Exception as error:
                    self._warn(str(error))
            tracker.finish(line)
        except Exception as error:
            self._warn(str(error))

    def _warn(self, reason: str) -> None:
        if not self._is_warned:
            self._is_warned = True
            _log.warning(
                "numbers are missing in %s, and the run goes on: %s",
                self._name,
                printable(reason, longest=500),
            )


def _open(name: str, run: TrackedRun) -> Tracker:
    """Open the tracker, and note its id in the run's folder."""
    module = importlib.import_module(f"tessera.train.trackers.{name}_tracker")
    tracker: Tracker = module.open_tracker(run)
    entry = json.dumps({"tracker": name, "id": tracker.run_id})
    write_durably(run.folder / TRACKER, [f"{entry}\n"])
    return tracker


def _read_id(path: Path, tracker: str) -> str | None:
    """The id in a run's folder, if it is one of this tracker."""
    try:
        entry = parse_json(path.read_text(encoding="utf-8"), longest=1000)
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        entry = None
    match entry:
        case {"tracker": str(name), "id": str(run_id)} if re.fullmatch(
            r"[\w-]{1,128}", run_id
        ):
            return run_id if name == tracker else None
    _log.warning("%s has no id of a tracker, and a new run begins there", path)
    return None
