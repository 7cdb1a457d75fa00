# SPDX-License-Identifier: Apache-2.0
"""The numbers of a run: ``metrics.jsonl``, and the same for TensorBoard.

The JSON lines are what tests and other programs read, so nothing is lost in them: every
float is written so that it reads back as the same number.
"""

import json
import math
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import jax
import numpy as np
from tensorboardX import SummaryWriter

from tessera.training.outputs import RunFolder, cannot_write

_TENSORBOARD_FLUSH_SECONDS = 30


class MetricWriter:
    """Writes one line for each call, at once; TensorBoard's file twice a minute.

    A line is a JSON object: ``{"step": 10, "loss": 2.5, …}``. JSON has no word for what
    is not a finite number, so that becomes a string that ``float`` reads: ``"NaN"``,
    ``"Infinity"``, ``"-Infinity"``. TensorBoard gets the finite ones only.

    Args:
      folder: Where to; None writes nothing, as every process but the first does.

    Raises:
      OutputPathError: [T504] the files cannot be written.
    """

    def __init__(self, folder: RunFolder | None) -> None:
        self._folder = folder
        if folder is None:
            return
        try:
            # Line by line, so that a run that is killed leaves whole lines.
            self._lines = folder.metrics.open("a", buffering=1, encoding="utf-8")
            self._board = SummaryWriter(
                str(folder.tensorboard), flush_secs=_TENSORBOARD_FLUSH_SECONDS
            )
        except OSError as error:
            raise cannot_write(folder.metrics, error) from error

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Write the numbers of one step.

        Args:
          step: Optimizer steps done, which the numbers belong to.
          values: Python, NumPy or JAX scalars, by name.

        Raises:
          OutputPathError: [T504] the disk is full, or the file is gone.
        """
        folder = self._folder
        if folder is None:
            return
        numbers = {name: _number(value) for name, value in values.items()}
        line = {"step": step} | {name: _json(n) for name, n in numbers.items()}
        try:
            self._lines.write(json.dumps(line, allow_nan=False) + "\n")
            for name, number in numbers.items():
                if math.isfinite(number):
                    self._board.add_scalar(name, number, step)
        except OSError as error:
            self.close(lost=True)
            raise cannot_write(folder.metrics, error) from error

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
        try:
            with self._board:
                self._lines.close()
        except OSError as error:
            if not lost:
                raise cannot_write(folder.metrics, error) from error

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


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
