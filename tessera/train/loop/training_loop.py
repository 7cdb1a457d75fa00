# SPDX-License-Identifier: Apache-2.0
"""The training loop: feeds batches to the step, reads metrics a few steps behind.

The loop never waits for the step that it has just started. It reads the metrics of the
oldest step in flight, which bounds how far it runs ahead and paces the log.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

import jax

from tessera.errors import EmptyDataError
from tessera.train.checkpoints.checkpoint_folder import Checkpoint
from tessera.train.checkpoints.restore_arrays import Restoration
from tessera.train.checkpoints.saving import Checkpoints
from tessera.train.data import Corpus
from tessera.train.data.cursor import Cursor
from tessera.train.loop.batch_sources import BatchSource, CorpusBatches
from tessera.train.loop.build_run import Run
from tessera.train.loop.console import Console, Progress, log
from tessera.train.loop.deferred_interrupts import Interrupts
from tessera.train.loop.evaluation import sample, weighted_means
from tessera.train.loop.metrics import MetricWriter
from tessera.train.loop.position import Position, StepInput
from tessera.train.loop.profiling import Window
from tessera.train.loop.reference_scores import scored_data
from tessera.train.loop.run_objective import PRECOMPUTED
from tessera.train.loop.run_records import RunRecords
from tessera.train.loop.step_metrics import StepMetrics
from tessera.train.loop.step_verification import StepVerification
from tessera.train.loop.train_state import TrainState, init_state
from tessera.train.models.weights import import_weights
from tessera.train.rollouts.completions import RolloutStopped

Numbers: TypeAlias = dict[str, float]


@dataclass(frozen=True)
class Callbacks:
    """What the loop calls of the process that it runs in.

    Attributes:
      on_phase: Called with the phase that begins, ``"step"``, ``"evaluation"``,
        ``"save"``, ``"compile"``, ``"rollout"`` or ``"reward"``, and the step's number.
      should_continue: Asked before each step and each batch of an evaluation; on False
        the run saves, and ``Trainer.train`` returns.
      records: What the run writes of its phases.
      source: Where batches come from; None reads the corpus.
    """

    on_phase: Callable[[str, int], None] = lambda phase, step: None
    should_continue: Callable[[], bool] = lambda: True
    records: RunRecords = field(default_factory=RunRecords)
    source: BatchSource | None = None


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
        self._in_flight = deque[tuple[int, dict[str, jax.Array | float]]]()
        self._metrics = StepMetrics(run, writer, checkpoints, self._records)
        add_wait = self._metrics.add_data_wait
        self._source = callbacks.source or CorpusBatches(run, corpus, add_wait)
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
            self.run.compile_others(self.corpus)
            if self._score() and self._take_steps() and self._should_continue():
                self._sample(self._at.state)
            else:
                self._stop()
        return self._at.state

    @property
    def step(self) -> int:
        """Optimizer steps that were begun, of this run and of those it resumes."""
        return 0 if self.position is None else self.position.step

    def _score(self) -> bool:
        """Have what a reference model says of the data; False where the run stops."""
        run, at, source = self.run, self._at, self._source
        if isinstance(source, CorpusBatches) and source.corpus is self.corpus:
            resumed = None if self._resumed is None else self._resumed.path
            on_phase = partial(self._on_phase, "evaluation", at.step)
            given = run, self.corpus, at.state, resumed, self._should_continue
            if (scored := scored_data(*given, on_phase)) is None:
                return False
            source.corpus = scored
            if self._checkpoints is not None and run.reference == PRECOMPUTED:
                self._checkpoints.scored = scored
        return True

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
        drain = partial(self._drain, progress)
        where = self._source.batches(lambda: self._at, drain, self._should_continue)
        with closing(where) as batches:
            # First what the last step left to do, where it was interrupted.
            going = self._settle(drain)
            for _ in range(left):
                # Before a batch is made: that of a policy may take minutes.
                going = going and self._should_continue()
                if not going:
                    break
                try:
                    given = next(batches)
                except RolloutStopped:
                    going = False
                    break
                self._step(given, drain)
                if len(self._in_flight) >= most:
                    self._read_oldest(progress)
                going = self._settle(drain)
            drain()
        return going

    def _step(self, given: StepInput, drain: Callable[[], None]) -> None:
        at = self._at
        step = at.step + 1
        self._on_phase("step", step)
        if given.numbers:  # what took other time than the step's
            self._metrics.restart_clock()
        if self._window is not None:
            self._window.before(step, drain)
        take = self.run.step
        if self._verification.is_due(step):
            drain()
            take = partial(self._verification.take, step)
        with self._interrupts.deferred():
            state, metrics = take(at.state, given.batch)
            self.position = Position(step, state, given.cursor, given.rollout)
            self._in_flight.append((step, {**metrics, **given.numbers}))

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
            checkpoints.save(
                at.step,
                at.state,
                at.cursor,
                is_validated=is_validated,
                rollout=at.rollout,
            )
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
            rollout = checkpoint.read_rollout() if run.rollout_form else None
            if rollout is not None and rollout.form != run.rollout_form:
                rollout = None
                log.warning(
                    "the checkpoint's completions are of other settings of grpo or of "
                    "another batch: none of them is learned, new ones are sampled"
                )
            return Position(metadata.step, state, cursor, rollout)
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
            keeps_reference=run.step_config.keeps_reference,
        )
        state = replace(state, **run.fresh_parts())
        return Position(0, state, Cursor.start(self.corpus))

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
        means = self._source.validate(step, state, self._should_continue)
        if means is None:
            return False
        if not means and self.run.config.training.eval_only:
            raise EmptyDataError(
                "there is nothing to evaluate",
                got="no token of the validation data has a loss",
                fix="use a larger data.validation_fraction, or other data",
            )
        with self._interrupts.deferred():
            if means:
                weights = {s.name: s.weight for s in self.corpus.sources}
                numbers = weighted_means(means, weights)
                self._writer.write(step, numbers)
                self._console.show_validation(step, numbers)
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
