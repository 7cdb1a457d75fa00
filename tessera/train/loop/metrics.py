# SPDX-License-Identifier: Apache-2.0
"""Writes the metrics of a run to ``metrics.jsonl`` and for TensorBoard.

The JSON lines are what tests and other programs read, so nothing is lost in them: every
float is written so that it reads back as the same number. TensorBoard's file is for the
eye, and a run continues without it.
"""

import json
import logging
import math
import socket
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

import jax
import numpy as np
from tensorboardX.proto import event_pb2, summary_pb2
from tensorboardX.record_writer import masked_crc32c

from tessera.train.loop.run_folder import RunFolder, cannot_write

_log: Final = logging.getLogger("tessera")
_TENSORBOARD_FLUSH_SECONDS: Final = 30.0
# Classes that are made as their modules are imported.
_Event: Final[Any] = vars(event_pb2)["Event"]
_Summary: Final[Any] = vars(summary_pb2)["Summary"]


class MetricWriter:
    """Writes one line for each call, at once; TensorBoard's file twice a minute.

    A line is a JSON object: ``{"step": 10, "loss": 2.5, …}``. JSON has no word for what
    is not a finite number, so that becomes a string that ``float`` reads: ``"NaN"``,
    ``"Infinity"``, ``"-Infinity"``. TensorBoard gets the finite ones only.

    Args:
      folder: Where to; None writes nothing, as every process but the first does.
      track: Gets the step and the finite numbers of each line.

    Raises:
      OutputPathError: [T504] the files cannot be written.
    """

    def __init__(
        self,
        folder: RunFolder | None,
        track: Callable[[int, Mapping[str, float]], None] = lambda step, numbers: None,
    ) -> None:
        self._folder, self._track = folder, track
        if folder is None:
            return
        try:
            # Line by line, so that a run that is killed leaves whole lines.
            self._lines = folder.metrics.open("a", buffering=1, encoding="utf-8")
            self._board = _Board(folder.tensorboard)
        except OSError as error:
            raise cannot_write(folder.metrics, error) from error

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Write the numbers of one step.

        Args:
          step: Optimizer steps done, which the numbers belong to.
          values: Python, NumPy or JAX scalars, by name.

        Raises:
          OutputPathError: [T504] the disk is full, or the folder is not where it was.
        """
        folder = self._folder
        if folder is None:
            return
        folder.check()
        numbers = {name: _number(value) for name, value in values.items()}
        line = {"step": step} | {name: _json(n) for name, n in numbers.items()}
        try:
            self._lines.write(json.dumps(line, allow_nan=False) + "\n")
        except OSError as error:
            self.close(lost=True)
            raise cannot_write(folder.metrics, error) from error
        finite = {n: x for n, x in numbers.items() if math.isfinite(x)}
        self._board.add(step, finite)
        self._track(step, finite)

    def close(self, *, lost: bool = False) -> None:
        """Flush and close both; a second call does nothing.

        Args:
          lost: What is not written yet cannot be.

        Raises:
          OutputPathError: [T504] the last numbers cannot be written.
        """
        folder, self._folder = self._folder, None
        if folder is None:
            return
        self._board.close()
        try:
            self._lines.close()
        except OSError as error:
            if not lost:
                raise cannot_write(folder.metrics, error) from error

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Board:
    """TensorBoard's file of a run, in the thread of the run.

    tensorboardX has a thread for it, which ends when the disk is full; its queue then
    fills up, and the run would wait for ever.
    """

    def __init__(self, folder: Path) -> None:
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}"
        self._file: BinaryIO | None = (folder / name).open("wb")
        self._flush_at = 0.0
        self._write(_Event(wall_time=time.time(), file_version="brain.Event:2"))

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write numbers of one step; where they cannot be, say so once and give up."""
        values = [_Summary.Value(tag=n, simple_value=x) for n, x in numbers.items()]
        summary = _Summary(value=values)
        self._write(_Event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        """Write what is left."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()

    def _write(self, event: Any) -> None:
        if self._file is None:
            return
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        sums = [struct.pack("<I", masked_crc32c(part)) for part in (length, data)]
        try:
            self._file.write(length + sums[0] + data + sums[1])
            if time.monotonic() >= self._flush_at:
                self._file.flush()
                self._flush_at = time.monotonic() + _TENSORBOARD_FLUSH_SECONDS
        except OSError as error:
            self.close()
            _log.warning("TensorBoard gets no more numbers: %s", error)


def _number(value: Any) -> int | float:
    """A scalar as Python's own; float32 and bfloat16 keep their exact value."""
    if isinstance(value, (int, float)):
        return value
    array = np.asarray(value)
    assert array.ndim == 0, f"a metric of shape {array.shape}"
    whole = jax.numpy.issubdtype(array.dtype, np.integer) or array.dtype == bool
    return int(array) if whole else float(array)


def _json(number: int | float) -> int | float | str:
    if math.isfinite(number):
        return number
    return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(float(number))]
