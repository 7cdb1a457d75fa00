# SPDX-License-Identifier: Apache-2.0
"""What becomes of the metrics of a finished step: checked, written, shown."""

import logging
import math
import time
from contextlib import suppress
from typing import Final, TypeAlias

import jax

from tessera.analysis.device_peaks import mfu, peak_flops
from tessera.errors import (
    CheckpointWriteError,
    LossScaleError,
    NonFiniteError,
    SpikeError,
)
from tessera.train.checkpoints.saving import Checkpoints
from tessera.train.loop.build_run import Run
from tessera.train.loop.console import Progress
from tessera.train.loop.metrics import MetricWriter
from tessera.train.loop.rank_times import RankTimes
from tessera.train.loop.run_records import RunRecords

Numbers: TypeAlias = dict[str, float]

_log: Final = logging.getLogger("tessera")

# Of the numbers that every step writes, those that are shown beside the loss, and those
# that train.log has as well.
_SHOWN: Final = (
    *("reward", "kl", "reward_margin", "accuracy"),
    "grad_norm",
    "learning_rate",
    "learned_fraction",
    "mfu",
    "loss_scale",
    "loss_z",
    "grad_norm_z",
    "router_balance_loss",
    "router_max_load",
)
_LOGGED: Final = ("step_seconds", "data_wait_fraction")


class StepMetrics:
    """Takes the metrics of one step after the other, and stops a run that diverges.

    Args:
      run: The run.
      writer: Where the numbers go.
      checkpoints: Named where the run is stopped, or None.
      records: What counts the goodput.
    """

    def __init__(
        self,
        run: Run,
        writer: MetricWriter,
        checkpoints: Checkpoints | None,
        records: RunRecords,
    ) -> None:
        self._run, self._writer, self._checkpoints = run, writer, checkpoints
        self._records = records
        self._read_at, self._flops = 0.0, 0
        self._data_wait = self._device_wait = 0.0
        mesh = run.mesh.jax
        self._rank_times = RankTimes(
            mesh.local_devices, jax.process_index(), jax.process_count(), records
        )
        self._skipped_in_a_row = self._spikes_in_a_row = 0

    def restart_clock(self) -> None:
        """Begin the time of the next step now: what came before belongs to none."""
        self._flops = self._run.flops  # counted outside of any step's time
        self._read_at = time.perf_counter()
        self._data_wait = self._device_wait = 0.0

    def add_data_wait(self, seconds: float) -> None:
        """Count time in which the loop waited for a batch, towards the next step."""
        self._data_wait += seconds
        self._records.add_data_wait(seconds)

    def add_device_wait(self, seconds: float) -> None:
        """Count time in which the loop waited for devices, towards the next step."""
        self._device_wait += seconds

    def take(self, step: int, numbers: Numbers, progress: Progress) -> None:
        """Check, write and show the metrics of a step.

        Args:
          step: Its number, from 1.
          numbers: What ``make_train_step`` returned, read.
          progress: Where a person watches.

        Raises:
          LossScaleError: [T506] fp16 overflows at the smallest loss scale.
          NonFiniteError: [T508] too many steps in a row were skipped.
          SpikeError: [T510] too many spikes in a row were skipped.
        """
        now = time.perf_counter()
        seconds, self._read_at = now - self._read_at, now
        self._check_scale(step, numbers)
        is_spike = self._check_spike(step, numbers)
        self._count_skipped(step, numbers, skips=is_spike)
        training = self._run.config.training
        # All that are read. Of conversations, the loss is that of a part of them.
        rows = self._run.config.rows_per_step(self._run.mesh.shape)
        tokens = rows * training.sequence_length
        numbers["tokens_per_second"] = tokens / seconds
        if (learned := numbers.pop("tokens") / tokens) < 0.995:
            numbers["learned_fraction"] = learned
        numbers["step_seconds"] = seconds
        numbers["data_wait_fraction"] = self._data_wait / seconds
        self._rank_times.take(step, seconds, self._device_wait)
        self._data_wait = self._device_wait = 0.0
        if (share := self._mfu(seconds)) is not None:
            numbers["mfu"] = share
        if (memory := self._peak_memory()) is not None:
            numbers["peak_memory_bytes"] = memory
        is_logged = step % training.log_every == 0 or step in (1, training.steps)
        if is_logged:
            numbers |= self._records.goodput()
        self._writer.write(step, numbers)
        progress.advance(step)
        if is_logged:
            # A run that waits for its data should be seen to.
            waits = numbers["data_wait_fraction"] >= 0.1
            shown = (*_SHOWN, "data_wait_fraction") if waits else _SHOWN
            progress.update(
                step,
                loss=numbers["loss"],
                tokens_per_second=numbers["tokens_per_second"],
                others={name: numbers[name] for name in shown if name in numbers},
                details={name: numbers[name] for name in _LOGGED if name not in shown},
            )

    def _mfu(self, seconds: float) -> float | None:
        """Model FLOPs utilization, where the peak of the devices is known."""
        mesh = self._run.mesh
        kind = mesh.jax.devices.flat[0].device_kind
        dtype = self._run.config.training.precision.computation
        return mfu(self._flops, seconds, mesh.size, peak_flops(kind, dtype))

    def _check_scale(self, step: int, numbers: Numbers) -> None:
        """Stop where no loss scale is small enough: every step would be skipped."""
        scale = self._run.loss_scale
        if scale is None or numbers["stalled_overflows"] < scale.patience:
            return
        raise LossScaleError(
            f"fp16 gradients overflow at step {step} with the smallest loss scale",
            got=f"loss scale {numbers['loss_scale']:g}, loss {numbers['loss']:g}",
            fix="use training.mixed_precision=bf16, or a lower optimizer.learning_rate",
        )

    def _check_spike(self, step: int, numbers: Numbers) -> bool:
        """Report a spike; whether it was skipped, as the step itself has decided."""
        is_spike = numbers.get("spike") == 1.0
        self._spikes_in_a_row = self._spikes_in_a_row + 1 if is_spike else 0
        if not is_spike:
            return False
        found = (
            f"a spike: loss {numbers['loss']:g} (z-score {numbers['loss_z']:.3g}), "
            f"norm of the gradients {numbers['grad_norm']:g} "
            f"({numbers['grad_norm_z']:.3g})"
        )
        training = self._run.config.training
        is_skipped = training.on_spike == "skip"
        end = "; it is skipped, the parameters stay as they are" if is_skipped else ""
        _log.warning("step %d: %s%s", step, found, end)
        most, in_a_row = training.max_skipped_steps, self._spikes_in_a_row
        if is_skipped and in_a_row > most:
            raise SpikeError(
                f"{in_a_row} spikes in a row at step {step}, of which "
                f"training.max_skipped_steps={most} may be skipped",
                got=found,
                fix="raise training.spike_threshold if the loss has come to stay, "
                f"or lower the learning rate; {self._last_checkpoint()}",
            )
        return is_skipped

    def _count_skipped(self, step: int, numbers: Numbers, *, skips: bool) -> None:
        """Add to the numbers whether the step was skipped; stop at one too many.

        The step itself has decided it by the same two numbers. Those that were started
        since change nothing that is kept: no checkpoint is begun with steps unread.
        """
        loss, norm = numbers["loss"], numbers["grad_norm"]
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        skipped = skips or not is_finite
        in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        self._skipped_in_a_row = in_a_row
        numbers |= {"skipped": float(skipped), "skipped_in_a_row": float(in_a_row)}
        if is_finite or self._run.loss_scale is not None:
            return
        _log.warning(
            "step %d is skipped, the parameters stay as they are: loss %g, norm of the "
            "gradients %g",
            step,
            loss,
            norm,
        )
        most = self._run.config.training.max_skipped_steps
        if in_a_row <= most:
            return
        raise NonFiniteError(
            f"no finite loss and gradients at step {step}, and so {in_a_row} times in "
            f"a row, of which training.max_skipped_steps={most} may be skipped",
            got=f"loss {loss:g}, norm of the gradients {norm:g}",
            fix="look for the cause in the data or in a learning rate that is too "
            f"high; {self._last_checkpoint()}",
        )

    def _last_checkpoint(self) -> str:
        if self._checkpoints is None:
            return "the run keeps no checkpoints"
        with suppress(CheckpointWriteError):  # which the log has said
            self._checkpoints.wait()
        return self._checkpoints.describe_last()

    def _peak_memory(self) -> int | None:
        """Most bytes that the fullest of this process's devices held, if it counts."""
        stats = [d.memory_stats() for d in self._run.mesh.jax.local_devices]
        peaks = [each["peak_bytes_in_use"] for each in stats if each]
        return max(peaks) if peaks else None
