# SPDX-License-Identifier: Apache-2.0
"""``events.jsonl``: what happened to a run, over all of its attempts.

One JSON object a line, with ``time`` (seconds since 1970), ``attempt`` (from 0) and
``event``. Every attempt appends to the file, so that it holds the whole history where
``metrics.jsonl`` holds the curve alone.

| event | further fields |
| --- | --- |
| start | process_start, resumed_step, mesh, num_devices, device_kind, versions, … |
| phase | phase, seconds; of steps and their parts first_step, last_step, data_seconds |
| program | run: what was set, rows: what was compiled; both as pairs of texts |
| ranks | step, seconds: own work of a step, by rank; waiting_seconds |
| sample | step, prompt, text |
| warning | message |
| stop, end | step |
| failure | message |
"""

import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TextIO, TypeAlias

from tessera.train.files.untrusted_json import parse_json

Event: TypeAlias = Mapping[str, Any]

_log: Final = logging.getLogger("tessera")
# Of a sample or a traceback, with the rest of its line.
_LONGEST_TEXT: Final = 2**16
_LONGEST_LINE: Final = 2**20


class EventLog:
    """Appends events to the file of a run; a handler of its warnings.

    A run goes on without the file: where it cannot be written, that is logged once.

    Args:
      path: ``events.jsonl``, of which this is another attempt; None writes nothing, as
        every process but the first does.
    """

    def __init__(self, path: Path | None) -> None:
        # Giving up logs a warning, which may be an event in turn.
        self._lock = threading.RLock()
        self._file: TextIO | None = None
        self.earlier: tuple[Event, ...] = ()
        """What earlier attempts recorded."""
        self.attempt = 0
        """The number of this attempt, from 0."""
        if path is None:
            return
        try:
            self.earlier = tuple(read_events(path))
            self.attempt = sum(event["event"] == "start" for event in self.earlier)
            self._file = path.open("a+", buffering=1, encoding="utf-8")
            if path.stat().st_size and not _ends_a_line(path):
                self._file.write("\n")  # a kill cut the last one
        except OSError as error:
            self._give_up(error)

    def write(self, event: str, *, at: float | None = None, **fields: Any) -> Event:
        """Append an event, from any thread.

        Args:
          event: What happened.
          at: When, in seconds since 1970; None is now.
          fields: More of it, as JSON has it. Long texts are cut.

        Returns:
          The event, whether it could be written or not.
        """
        line = {"time": time.time() if at is None else at, "attempt": self.attempt}
        line |= {"event": event} | {name: _cut(value) for name, value in fields.items()}
        with self._lock:
            if self._file is not None:
                try:
                    self._file.write(json.dumps(line, allow_nan=False) + "\n")
                except OSError as error:
                    self._give_up(error)
        return line

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        with self._lock, suppress(OSError):
            file, self._file = self._file, None
            if file is not None:
                file.close()

    def _give_up(self, error: OSError) -> None:
        self.close()
        _log.warning("events.jsonl gets no more events: %s", error.strerror or error)


class WarningEvents(logging.Handler):
    """Records what the log warns of.

    Args:
      events: Where to.
    """

    def __init__(self, events: EventLog) -> None:
        super().__init__(logging.WARNING)
        self._events = events

    def emit(self, record: logging.LogRecord) -> None:
        """Record a line of the log."""
        self._events.write("warning", message=self.format(record))


def read_events(path: Path) -> Iterator[Event]:
    """The events of a run, in the order in which they were written.

    Args:
      path: ``events.jsonl``; one that does not exist has none. What is no event, as
        half a line that a kill left, is passed over.
    """
    with suppress(FileNotFoundError), path.open("rb") as lines:
        while line := lines.readline(_LONGEST_LINE):
            with suppress(ValueError):
                event = parse_json(line, longest=_LONGEST_LINE)
                if isinstance(event, dict) and isinstance(event.get("event"), str):
                    yield event


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read() == b"\n"


def _cut(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _LONGEST_TEXT:
        return f"{value[:_LONGEST_TEXT]}…"
    return value
