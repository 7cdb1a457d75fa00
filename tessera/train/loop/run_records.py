# SPDX-License-Identifier: Apache-2.0
"""Records a run while it goes on: its attempts, phases, warnings, and goodput.

When it ends, however it ends, a report shows them.
"""

import logging
import platform
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, Final

from tessera.mesh import Mesh
from tessera.train.loop.run_folder import RunFolder
from tessera.train.records.events import EventLog, WarningEvents
from tessera.train.records.goodput import goodput_of
from tessera.train.records.phases import PhaseClock
from tessera.version import __version__

_log: Final = logging.getLogger("tessera")
_VERSIONED: Final = ("jax", "jaxlib")


class RunRecords:
    """Records events of a run, and counts its goodput.

    Args:
      events: The file; None, as outside of ``train``, records nothing.
      clock: Tells how long phases take.
    """

    def __init__(
        self, events: EventLog | None = None, clock: PhaseClock | None = None
    ) -> None:
        self._events, self._clock = events or EventLog(None), clock
        self._goodput = goodput_of(self._events.earlier)

    def write(self, event: str, *, at: float | None = None, **fields: Any) -> None:
        """Record an event, from any thread; see ``tessera.train.records.events``."""
        self._goodput.add(self._events.write(event, at=at, **fields))

    def add_data_wait(self, seconds: float) -> None:
        """Count time in which the loop waited for a batch."""
        if self._clock is not None:
            self._clock.add_data_wait(seconds)

    def goodput(self) -> dict[str, float]:
        """Goodput and what the rest went into, as shares of the run's wall time.

        Returns:
          ``goodput``, and ``badput/<cause>`` for each cause that took time; nothing
          where no file is written.
        """
        if self._clock is None:
            return {}
        shares = self._goodput.shares
        goodput = {"goodput": shares.pop("step")}
        return goodput | {f"badput/{cause}": x for cause, x in shares.items() if x}


@contextmanager
def recorded(
    folder: RunFolder | None, clock: PhaseClock, **start: Any
) -> Iterator[RunRecords]:
    """Record an attempt of a run for the length of a ``with`` block.

    Args:
      folder: The run's; None records nothing, as every process but the first does.
      clock: Tells how long phases take, since the beginning of the process.
      start: What the attempt begins with, see ``description_of``.
    """
    if folder is None:
        yield RunRecords()
        return
    events = EventLog(folder.events)
    records, warnings = RunRecords(events, clock), WarningEvents(events)
    records.write("start", process_start=clock.process_start, **start)
    clock.attach(records.write)
    _log.addHandler(warnings)
    try:
        yield records
    except BaseException as error:
        clock.finish()
        records.write("failure", message=f"{type(error).__name__}: {error}")
        raise
    finally:
        clock.finish()
        _log.removeHandler(warnings)
        events.close()


@contextmanager
def reported(folder: RunFolder | None) -> Iterator[None]:
    """Write ``report.html`` after a ``with`` block, also one that raises.

    A report that cannot be written is a warning: it is no reason for a run to fail, nor
    to hide why it did.

    Args:
      folder: The run's; None writes nothing.
    """
    try:
        yield
    finally:
        if folder is not None:
            try:
                # Here, as only a run that ends needs it.
                from tessera.train.report.page import write_report

                folder.check()
                write_report([folder.path], folder.report)
            except Exception as error:
                _log.warning("the report was not written: %s", error)


def description_of(mesh: Mesh, num_processes: int) -> dict[str, Any]:
    """What an attempt runs on, for its first event.

    Args:
      mesh: Where it runs.
      num_processes: Processes of the run.
    """
    return {
        "mesh": dict(mesh.shape),
        "num_devices": mesh.size,
        "device_kind": mesh.jax.devices.flat[0].device_kind,
        "num_processes": num_processes,
        "host": socket.gethostname(),
        "versions": {"python": platform.python_version(), "tessera": __version__}
        | {name: version(name) for name in _VERSIONED},
    }
