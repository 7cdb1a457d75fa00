# SPDX-License-Identifier: Apache-2.0
"""Sets a running run back to one of its checkpoints, or to where it began.

After a step that could not be repeated, the checkpoint is the last verified one, and
the same data follow. After a spike it is the last one before the spike, and the data
after the spike follow, as in PaLM (Chowdhery et al., arXiv 2204.02311, section 5.1).

Whatever is taken back is renamed and not lost: ``checkpoints/<step>.replaced`` and
``metrics.<n>.jsonl``. Later checkpoints are renamed first, the newest before the
others. A kill at any moment leaves what a kill at one of these checkpoints would have
left.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Final

from tessera.errors import SpikeError, WrongValuesError
from tessera.train.checkpoints.checkpoint_folder import Checkpoint
from tessera.train.checkpoints.choose_checkpoint import choose_until
from tessera.train.checkpoints.saving import Checkpoints
from tessera.train.loop.console import log
from tessera.train.loop.metrics import MetricWriter
from tessera.train.loop.run_records import RunRecords

# Spikes after one checkpoint: more than this are no accident of the data.
_MOST_SPIKES: Final = 3


@dataclass(eq=False)
class SetBack(Exception):
    """Ends the steps of the loop, which goes on from an earlier checkpoint.

    Attributes:
      step: The step that is the reason.
      found: What was found, a sentence.
    """

    step: int
    found: str


class StepDiffers(SetBack):
    """A step that was repeated on other devices had another result."""


class Spike(SetBack):
    """A step was a spike, with ``training.on_spike=rollback``."""


class Rollback:
    """Decides where a run goes back to, and takes back what came after.

    Args:
      checkpoints: Of the run; None goes back to where it began.
      writer: Of its metrics.
      records: Of its events.
      first_step: The step of the checkpoint that the run began with, or 0.
    """

    def __init__(
        self,
        checkpoints: Checkpoints | None,
        writer: MetricWriter,
        records: RunRecords,
        first_step: int,
    ) -> None:
        self._checkpoints, self._writer = checkpoints, writer
        self._records, self._first_step = records, first_step
        self._differences = 0
        self._spikes = Counter[int]()

    def apply(self, cause: SetBack) -> Checkpoint | None:
        """Take back the steps after a checkpoint; every process calls this.

        Args:
          cause: Why. All processes have the same.

        Returns:
          The checkpoint to go on from; None for where the run began.

        Raises:
          WrongValuesError: [T716] it is the second step that could not be repeated, or
            there is no verified checkpoint. Those after it, or after the one that the
            run began with, are renamed.
          SpikeError: [T510] spikes went on after the last times, or there is no
            checkpoint.
        """
        log.warning("step %d: %s", cause.step, cause.found)
        checkpoint = self._newest(cause)
        step = self._first_step if checkpoint is None else checkpoint.metadata.step
        if self._checkpoints is not None:
            self._checkpoints.set_back(step)
        if isinstance(cause, StepDiffers):
            self._count_difference(cause, checkpoint)
        elif isinstance(cause, Spike):
            self._count_spike(cause, checkpoint, step)
        self._writer.set_back(step)
        self._writer.write(step, {"set_back_from": cause.step})
        self._records.write("rollback", step=cause.step, to_step=step)
        log.warning(
            "the run is set back from step %d to %s",
            cause.step,
            f"the checkpoint of step {step}" if checkpoint else "where it began",
        )
        return checkpoint

    @property
    def _resumes_own(self) -> bool:
        checkpoints = self._checkpoints
        return checkpoints is not None and checkpoints.resumed_step is not None

    def _newest(self, cause: SetBack) -> Checkpoint | None:
        checkpoints = self._checkpoints
        if checkpoints is None or not checkpoints.is_enabled:
            return None
        checkpoints.settle()
        most = cause.step - 1
        if isinstance(cause, StepDiffers):
            most = min(most, checkpoints.verified_step)
        checkpoint, warnings = choose_until(checkpoints.root, most)
        for line in warnings:
            log.warning("%s", line)
        return checkpoint

    def _count_difference(
        self, cause: StepDiffers, checkpoint: Checkpoint | None
    ) -> None:
        self._differences += 1
        if self._differences > 1:
            what = "again a step had another result when it was repeated"
        elif checkpoint is None and self._resumes_own:
            what = "a step cannot be repeated, and no checkpoint of the run is verified"
        else:
            return
        raise WrongValuesError(
            f"{what}: a device computes wrong values",
            got=f"step {cause.step}: {cause.found}",
            fix="take the device out, or its machine, and start the same command with "
            "training.resume=auto: it goes on from the last verified checkpoint",
        )

    def _count_spike(
        self, cause: Spike, checkpoint: Checkpoint | None, step: int
    ) -> None:
        self._spikes[step] += 1
        if self._spikes[step] > _MOST_SPIKES:
            what = f"{_MOST_SPIKES + 1} spikes after the checkpoint of step {step}"
        elif checkpoint is None and self._resumes_own:
            what = "a spike, and no intact checkpoint before it"
        else:
            return
        raise SpikeError(
            f"{what}: other data does not help",
            got=f"step {cause.step}: {cause.found}",
            fix="use a lower optimizer.learning_rate or training.clip_norm, or go back "
            "further: training.resume=<run>/checkpoints/<step>; or raise "
            "training.spike_threshold",
        )
