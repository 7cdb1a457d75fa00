# SPDX-License-Identifier: Apache-2.0
"""The training loop: feeds batches to the step, reads metrics a few steps behind.

The loop never waits for the step that it has just started. It reads the metrics of the
oldest step in flight, which bounds how far it runs ahead and paces the log.
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

import jax
import numpy as np

from tessera.errors import EmptyDataError
from tessera.train.checkpoints.checkpoint_folder import Checkpoint
from tessera.train.checkpoints.restore_arrays import Restoration
from tessera.train.checkpoints.saving import Checkpoints
from tessera.train.config.step_config import batch_spec
from tessera.train.data import Batch, Corpus
from tessera.train.data.cursor import Cursor
from tessera.train.loop.build_run import Run
from tessera.train.loop.console import Console, Progress, log
from tessera.train.loop.deferred_interrupts import Interrupts
from tessera.train.loop.evaluation import sample, validation_losses
from tessera.train.loop.metrics import MetricWriter
from tessera.train.loop.profiling import Window
from tessera.train.loop.run_records import RunRecords
from tessera.train.loop.step_metrics import StepMetrics
from tessera.train.loop.step_verification import StepVerification
from tessera.train.loop.train_state import TrainState, init_state
from tessera.train.models.weights import import_weights

Numbers: TypeAlias = dict[str, float]


@dataclass(frozen=True)
class Callbacks:
    """What the loop calls of the process that it runs in.

    Attributes:
      on_phase: Called with the phase that begins, ``"step"``, ``"evaluation"``,
        ``"save"`` or ``"compile"``, and the step's number.
      should_continue: Asked before each step and each batch of an evaluation; on False
        the run saves, and ``Trainer.train`` returns.
    """

    on_phase: Callable[[str, int], None] = lambda phase, step: None
    should_continue: Callable[[], bool] = lambda: True
    records: RunRecords = field(default_factory=RunRecords)


@dataclass(frozen=True)
class Position:
    """Where a run is.

    Attributes:
      step: Optimizer steps begun.
      state: The state after them, which no other step has taken.
      cursor: How far the data was read for them.
    """

    step: int
    state: TrainState
    cursor: Cursor


class Trainer:
    """One run from its first array to its last line.

    Ctrl-C in a notebook leaves it where it is: ``position`` has the state after the
    last step that was begun, and another ``train()`` resumes from there.

    Args:
      run: What to run.
      corpus: Its data.
      console: Where a person watches.
      writer: Where the numbers go.
      window: Steps to profile, or None.
      checkpoints: Where the state is kept, or None.
      resumed: The checkpoint to resume from; None starts a new run.
      callbacks: What the loop calls of its process.
    """

    def __init__(
        self,
        run: Run,
        corpus: Corpus,
        console: Console,
        writer: MetricWriter,
        window: Window | None = None,
        checkpoints: Checkpoints | None = None,
        resumed: Checkpoint | None = None,
        *,
        callbacks: Callbacks | None = None,
    ) -> None:
        self.run, self.corpus = run, corpus
        self._console, self._writer, self._window = console, writer, window
        self._checkpoints, self._resumed = checkpoints, resumed
        callbacks = callbacks or Callbacks()
        self._on_phase = callbacks.on_phase
        self._should_continue = callbacks.should_continue
        self._interrupts = Interrupts()
        self._records = callbacks.records
        self.position: Position | None = None
        """Where the run is; None before ``train`` has made or read a state."""
        # The last steps that were evaluated and saved, here or before a resume.
        self._validated = self._saved = 0
        # Steps that were started and whose metrics were not read yet.
        self._in_flight: deque[tuple[int, dict[str, jax.Array]]] = deque()
        self._metrics = StepMetrics(run, writer, checkpoints, self._records)
        self._verification = StepVerification(run, self._on_phase, checkpoints)
        self.is_stopped = False
        """Whether ``train`` returned before the last step, as it was asked to."""

    def train(self) -> TrainState:
        """Train for all steps that are left, validate, and show a sample.

        With ``training.eval_only``, validate alone.

        Raises:
          CheckpointMismatchError: [T802] the checkpoint holds other arrays.
          DataChangedError: [T803] the checkpoint is of other data.
          EmptyDataError: [T602] there is nothing to validate with eval_only.
          LossScaleError: [T506] fp16 overflows at the smallest loss scale.
          NonFiniteError: [T508] too many steps in a row were skipped.
          SpikeError: [T510] too many spikes in a row were skipped.
          WrongValuesError: [T716] a step could not be repeated on other devices.
          CheckpointWriteError: [T804] a run that is stopped cannot save.
        """
        with self._interrupts.handled():
            self.position = self.position or self._beginning(self._resumed)
            self._on_phase("compile", self._at.step)
            self.run.compile_evaluation(self.corpus)
            if self._take_steps() and self._should_continue():
                self._sample(self._at.state)
            else:
                self._stop()
        return self._at.state

    @property
    def step(self) -> int:
        """Optimizer steps that were begun, of this run and of those it resumes."""
        return 0 if self.position is None else self.position.step

    def _take_steps(self) -> bool:
        """Take the steps that are left; False where the run stops before."""
        if self.run.config.training.eval_only:
            return self._validate(self._at.step, self._at.state)
        steps = self.run.config.training.steps
        with (
            self._console.progress(steps, done=self._at.step) as progress,
            nullcontext() if self._window is None else closing(self._window),
        ):
            return self._take_steps_left(progress)

    def _take_steps_left(self, progress: Progress) -> bool:
        left = self.run.config.training.steps - self._at.step
        most = self.run.config.runtime.max_steps_in_flight
        self._metrics.restart_clock()
        with closing(self._batches(self._at.cursor.rows)) as batches:
            drain = partial(self._drain, progress)
            # First what the last step left to do, where it was interrupted.
            going = self._settle(drain)
            for batch in islice(batches, max(left, 0)):
                going = going and self._should_continue()
                if not going:
                    break
                self._step(batch, drain)
                if len(self._in_flight) >= most:
                    self._read_oldest(progress)
                going = self._settle(drain)
            drain()
        return going

    def _step(self, batch: Any, drain: Callable[[], None]) -> None:
        at = self._at
        step = at.step + 1
        self._on_phase("step", step)
        if self._window is not None:
            self._window.before(step, drain)
        take = self.run.step
        if self._verification.is_due(step):
            drain()
            take = partial(self._verification.take, step)
        with self._interrupts.deferred():
            state, metrics = take(at.state, batch)
            cursor = at.cursor.advance(self.run.rows_per_step)
            self.position = Position(step, state, cursor)
            self._in_flight.append((step, metrics))

    def _settle(self, drain: Callable[[], None]) -> bool:
        """Do what is due after a step and was not done; False where the run stops."""
        at = self._at
        if self._is_validation_due:
            drain()
            if not self._validate(at.step, at.state):
                return False
        checkpoints = self._checkpoints
        if checkpoints and checkpoints.is_due(at.step) and self._saved < at.step:
            # First the numbers of its steps: none is missing after a resume.
            drain()
            self._save(checkpoints)
        return True

    def _stop(self) -> None:
        """Save what no checkpoint has, at the step where all ranks are."""
        at, checkpoints = self._at, self._checkpoints
        self.is_stopped = True
        left = ": it keeps no checkpoints to go on from"
        if checkpoints is not None and checkpoints.is_enabled:
            if self._saved < at.step:
                self._save(checkpoints)
            checkpoints.wait()
            left = f": {checkpoints.describe_last()}; training.resume goes on from it"
        if jax.process_index():  # the first process alone knows what is complete
            left = ""
        steps = self.run.config.training.steps
        log.warning("the run is stopped after step %d of %d%s", at.step, steps, left)

    def _save(self, checkpoints: Checkpoints) -> None:
        at, is_validated = self._at, not self._is_validation_due
        self._on_phase("save", at.step)
        with self._interrupts.deferred():
            checkpoints.save(at.step, at.state, at.cursor, is_validated=is_validated)
            self._saved = at.step

    @property
    def _at(self) -> Position:
        assert self.position is not None, "a run has a position once it is begun"
        return self.position

    @property
    def _is_validation_due(self) -> bool:
        step, training = self._at.step, self.run.config.training
        every = training.validate_every
        is_regular = bool(every) and step % every == 0
        return self._validated < step and (is_regular or step == training.steps)

    def _beginning(self, checkpoint: Checkpoint | None) -> Position:
        """The position of a checkpoint, or that of a fresh state."""
        run = self.run
        self._saved = self._validated = 0
        if checkpoint is not None:
            metadata = checkpoint.metadata
            restoration = Restoration(metadata, run)
            cursor = restoration.cursor(self.corpus)
            state = restoration.restore(checkpoint)
            self._saved = metadata.step
            self._validated = metadata.step - (not metadata.is_validated)
            return Position(metadata.step, state, cursor)
        key, params = jax.random.key(run.config.training.seed), None
        if (path := run.config.training.init_from) is not None:
            model, layouts = run.model, run.step_config.zero.params
            new = model.init(key, run.mesh, layouts=layouts, only=model.adapters)
            params = import_weights(
                path, model, run.mesh, layouts=layouts, adapters=new
            )
            self._validated = -1  # also before the first step: what the weights are
        state = init_state(
            run.model,
            run.step_config.optimizer,
            key,
            run.mesh,
            params=params,
            zero_stage=run.step_config.zero_stage,
            offload_optimizer=run.step_config.offload_optimizer,
        )
        state = replace(state, **run.fresh_parts())
        return Position(0, state, Cursor.start(self.corpus))

    def _batches(self, start_row: int) -> Generator[Any, None, None]:
        """One step's batch after the other, on its devices."""
        training = self.run.config.training
        spec = batch_spec(self.run.step_config)
        rows = self.run.rows_per_step
        steps = training.gradient_accumulation_steps
        shard = self.run.host_shard
        with closing(
            self.corpus.train(
                rows, shard.index, shard.count, start_row, microbatches=steps
            )
        ) as batches:
            for batch in self._timed(batches):
                folded = {
                    name: array.reshape(steps, -1, array.shape[-1])
                    for name, array in batch.items()
                }
                yield shard.to_global(folded, spec, dim=1)

    def _timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches; the time that the loop waits for each is a metric."""
        while True:
            begin = time.perf_counter()
            batch = next(batches, None)
            self._metrics.add_data_wait(time.perf_counter() - begin)
            if batch is None:
                return
            yield batch

    def _drain(self, progress: Progress) -> None:
        while self._in_flight:
            self._read_oldest(progress)

    def _read_oldest(self, progress: Progress) -> None:
        step, metrics = self._in_flight[0]
        begin = time.perf_counter()
        numbers = {name: float(value) for name, value in metrics.items()}
        self._metrics.add_device_wait(time.perf_counter() - begin)
        with self._interrupts.deferred():
            self._in_flight.popleft()
            self._metrics.take(step, numbers, progress)

    def _validate(self, step: int, state: TrainState) -> bool:
        """Evaluate and show the loss; False where the run stops meanwhile."""
        self._on_phase("evaluation", step)
        losses = validation_losses(self.run, self.corpus, state, self._should_continue)
        if losses is None:
            return False
        if not losses and self.run.config.training.eval_only:
            raise EmptyDataError(
                "there is nothing to evaluate",
                got="no token of the validation data has a loss",
                fix="use a larger data.validation_fraction, or other data",
            )
        with self._interrupts.deferred():
            if losses:
                weights = {s.name: s.weight for s in self.corpus.sources}
                mean = float(
                    np.average([*losses.values()], weights=[weights[n] for n in losses])
                )
                each = losses if len(weights) > 1 else {}
                numbers = {f"val_loss/{name}": loss for name, loss in each.items()}
                self._writer.write(step, {"val_loss": mean} | numbers)
                self._console.show_validation(step, mean, each)
            self._validated = step
        self._metrics.restart_clock()  # validation is not part of any step's time
        return True

    def _sample(self, state: TrainState) -> None:
        training = self.run.config.training
        if training.sample_length and not training.eval_only:
            self._on_phase("evaluation", training.steps)
            prompt, text = sample(self.run, self.corpus, state)
            self._console.show_sample(prompt, text)
            self._records.write("sample", step=training.steps, prompt=prompt, text=text)
