# SPDX-License-Identifier: Apache-2.0
"""The training loop: batches in, steps out, numbers read a few steps behind.

The loop never waits for the step that it has just started. It reads the metrics of the
oldest step in flight, which bounds how far it runs ahead and paces the log.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from tessera.analysis.flops import count
from tessera.analysis.peaks import mfu, peak_flops
from tessera.errors import CheckpointWriteError, LossScaleError, NonFiniteError
from tessera.models.generation import generate
from tessera.models.weights import import_weights
from tessera.training.checkpoints.checkpoint_folder import Checkpoint
from tessera.training.checkpoints.restoring import Restoration
from tessera.training.checkpoints.saving import Checkpoints
from tessera.training.console import Console, Progress, log
from tessera.training.data import Corpus
from tessera.training.data.cursor import Cursor
from tessera.training.interrupts import Shield
from tessera.training.metrics import MetricWriter
from tessera.training.profiling import Window
from tessera.training.run import Run
from tessera.training.step import batch_spec
from tessera.training.train_state import TrainState, init_state

Numbers: TypeAlias = dict[str, float]

# Of the numbers that every step writes, those that the log shows beside the loss.
_SHOWN: Final = (
    "grad_norm",
    "learning_rate",
    "step_seconds",
    "mfu",
    "loss_scale",
    "router_balance_loss",
    "router_dropped_fraction",
    "router_max_load",
)


@dataclass
class _Flight:
    """A step that was started and whose metrics were not read yet."""

    step: int
    metrics: dict[str, Any]


@dataclass(frozen=True)
class Guard:
    """What a run tells and asks the process that it runs in.

    Attributes:
      enter: Told what begins, ``"step"``, ``"evaluation"``, ``"save"`` or
        ``"compile"``, and the step's number.
      goes_on: Asked before each step and each batch of an evaluation; where it says no
        the run saves, and ``Trainer.train`` returns.
    """

    enter: Callable[[str, int], None] = lambda kind, step: None
    goes_on: Callable[[], bool] = lambda: True


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
    last step that was begun, and another ``train()`` goes on as if nothing had been.

    Args:
      run: What to run.
      corpus: Its data.
      console: Where a person watches.
      writer: Where the numbers go.
      window: Steps to profile, or None.
      checkpoints: Where the state is kept, or None.
      resumed: The checkpoint to go on from; None begins anew.
      guard: What the run tells and asks its process.
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
        guard: Guard | None = None,
    ) -> None:
        self.run, self.corpus = run, corpus
        self._console, self._writer, self._window = console, writer, window
        self._checkpoints, self._resumed = checkpoints, resumed
        guard = guard or Guard()
        self._enter, self._goes_on = guard.enter, guard.goes_on
        self._shield = Shield()
        self.position: Position | None = None
        """Where the run is; None before ``train`` has made or read a state."""
        # The last steps that were evaluated and saved, here or before a resume.
        self._validated = self._saved = 0
        self._flights: deque[_Flight] = deque()
        self._read_at = 0.0
        self._skipped_in_a_row = 0

    def train(self) -> TrainState:
        """Train for all steps that are left, validate, and show a sample.

        Raises:
          CheckpointMismatchError: [T802] the checkpoint holds other arrays.
          DataChangedError: [T803] the checkpoint is of other data.
          LossScaleError: [T506] fp16 overflows at the smallest loss scale.
          NonFiniteError: [T508] too many steps in a row were skipped.
          CheckpointWriteError: [T804] a run that is stopped cannot save.
        """
        with self._shield.raised():
            self.position = self.position or self._beginning()
            self._enter("compile", self._at.step)
            self.run.compile_evaluation(self.corpus)
            if self._take_steps() and self._goes_on():
                self._sample(self._at.state)
            else:
                self._stop()
        return self._at.state

    def _take_steps(self) -> bool:
        """Take the steps that are left; False where the run stops before."""
        steps, done = self.run.config.training.steps, self._at.step
        most = self.run.config.runtime.max_steps_in_flight
        flops = count(self.run.compiled.traced.graph.program).total
        self._read_at = time.perf_counter()
        with (
            closing(self._batches(self._at.cursor.rows)) as batches,
            self._console.progress(steps, done=done) as progress,
            nullcontext() if self._window is None else closing(self._window),
        ):
            drain = partial(self._drain, progress, flops)
            # First what the last step left to do, where it was interrupted.
            going = self._settle(drain)
            for batch in islice(batches, max(steps - done, 0)):
                going = going and self._goes_on()
                if not going:
                    break
                self._step(batch, drain)
                if len(self._flights) >= most:
                    self._read_oldest(progress, flops)
                going = self._settle(drain)
            drain()
        return going

    def _step(self, batch: Any, drain: Callable[[], None]) -> None:
        at = self._at
        step = at.step + 1
        self._enter("step", step)
        if self._window is not None:
            self._window.before(step, drain)
        rows = self.run.config.rows_per_step(self.run.mesh)
        with self._shield:
            state, metrics = self.run.step(at.state, batch)
            self.position = Position(step, state, at.cursor.advance(rows))
            self._flights.append(_Flight(step, metrics))

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
        left = ": it keeps no checkpoints to go on from"
        if checkpoints is not None and checkpoints.is_enabled:
            if self._saved < at.step:
                self._save(checkpoints)
            checkpoints.wait()
            left = f": {checkpoints.describe_last()}; training.resume goes on from it"
        # The first process alone knows what is complete.
        left *= jax.process_index() == 0
        steps = self.run.config.training.steps
        log.warning("the run is stopped after step %d of %d%s", at.step, steps, left)

    def _save(self, checkpoints: Checkpoints) -> None:
        at, is_validated = self._at, not self._is_validation_due
        self._enter("save", at.step)
        with self._shield:
            checkpoints.save(at.step, at.state, at.cursor, is_validated=is_validated)
            self._saved = at.step

    @property
    def _at(self) -> Position:
        assert self.position is not None, "a run has a position once it is begun"
        return self.position

    @property
    def _is_validation_due(self) -> bool:
        step = self._at.step
        return self._validates_after(step) and self._validated < step

    def _beginning(self) -> Position:
        """Where the run begins, or goes on."""
        run = self.run
        if self._resumed is not None:
            metadata = self._resumed.metadata
            resume_data = run.config.training.resume_data
            cursor = metadata.cursor.resumed(self.corpus, resume_data)
            state = Restoration(metadata, run).restore(self._resumed)
            self._saved = metadata.step
            self._validated = metadata.step - (not metadata.is_validated)
            return Position(metadata.step, state, cursor)
        state = init_state(
            run.model,
            run.step_config.optimizer,
            jax.random.key(run.config.training.seed),
            run.mesh,
            loss_scale=run.loss_scale,
            zero_stage=run.step_config.zero_stage,
            offload_optimizer=run.step_config.offload_optimizer,
        )
        state = replace(state, residual=run.step_config.exchange.first_residual())
        if (path := run.config.training.init_from) is not None:
            layouts = run.step_config.zero.params
            params = import_weights(path, run.model, run.mesh, layouts=layouts)
            state = replace(state, params=params)
        return Position(0, state, Cursor.start(self.corpus))

    def _batches(self, start_row: int) -> Generator[Any, None, None]:
        """One step's batch after the other, on its devices."""
        training = self.run.config.training
        spec = batch_spec(self.run.step_config)
        rows = self.run.config.rows_per_step(self.run.mesh)
        steps = training.gradient_accumulation_steps
        feed = self.run.feed
        with closing(
            self.corpus.train(
                rows, feed.index, feed.count, start_row, microbatches=steps
            )
        ) as batches:
            for batch in batches:
                folded = {
                    name: array.reshape(steps, -1, array.shape[-1])
                    for name, array in batch.items()
                }
                yield feed.placed(folded, spec, dim=1)

    def _drain(self, progress: Progress, flops: int) -> None:
        while self._flights:
            self._read_oldest(progress, flops)

    def _read_oldest(self, progress: Progress, flops: int) -> None:
        flight = self._flights[0]
        numbers = {name: float(value) for name, value in flight.metrics.items()}
        with self._shield:
            self._flights.popleft()
            self._take_in(flight.step, numbers, progress, flops)

    def _take_in(
        self, step: int, numbers: Numbers, progress: Progress, flops: int
    ) -> None:
        """Write and show the numbers of a step, which is done."""
        now = time.perf_counter()
        seconds, self._read_at = now - self._read_at, now
        self._check_scale(step, numbers)
        self._count_skipped(step, numbers)
        training, mesh = self.run.config.training, self.run.mesh
        numbers["tokens_per_second"] = numbers.pop("tokens") / seconds
        numbers["step_seconds"] = seconds
        kind = mesh.jax.devices.flat[0].device_kind
        dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(
            training.mixed_precision, "float32"
        )
        share = mfu(flops, seconds, mesh.size, peak_flops(kind, dtype))
        if share is not None:
            numbers["mfu"] = share
        if (memory := self._peak_memory()) is not None:
            numbers["peak_memory_bytes"] = memory
        self._writer.write(step, numbers)
        progress.advance(step)
        if step % training.log_every == 0 or step in (1, training.steps):
            progress.update(
                step,
                loss=numbers["loss"],
                tokens_per_second=numbers["tokens_per_second"],
                others={name: numbers[name] for name in _SHOWN if name in numbers},
            )

    def _check_scale(self, step: int, numbers: Numbers) -> None:
        """Stop where no loss scale is small enough: every step would be skipped."""
        scale = self.run.loss_scale
        if scale is None or numbers["stalled_overflows"] < scale.patience:
            return
        raise LossScaleError(
            f"fp16 gradients overflow at step {step} with the smallest loss scale",
            got=f"loss scale {numbers['loss_scale']:g}, loss {numbers['loss']:g}",
            fix="use training.mixed_precision=bf16, or a lower optimizer.learning_rate",
        )

    def _count_skipped(self, step: int, numbers: Numbers) -> None:
        """Add to the numbers whether the step was skipped; stop at one too many.

        The step itself has decided it by the same two numbers. Those that were started
        since change nothing that is kept: no checkpoint is begun with steps unread.
        """
        loss, norm = numbers["loss"], numbers["grad_norm"]
        skipped = not (math.isfinite(loss) and math.isfinite(norm))
        in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        self._skipped_in_a_row = in_a_row
        numbers |= {"skipped": float(skipped), "skipped_in_a_row": float(in_a_row)}
        if not skipped or self.run.loss_scale is not None:
            return
        log.warning(
            "step %d is skipped, the parameters stay as they are: loss %g, norm of the "
            "gradients %g",
            *(step, loss, norm),
        )
        most = self.run.config.training.max_skipped_steps
        if in_a_row <= most:
            return
        last = "the run keeps no checkpoints"
        if self._checkpoints is not None:
            with suppress(CheckpointWriteError):  # which the log has said
                self._checkpoints.wait()
            last = self._checkpoints.describe_last()
        raise NonFiniteError(
            f"no finite loss and gradients at step {step}, and so {in_a_row} times in "
            f"a row, of which training.max_skipped_steps={most} may be skipped",
            got=f"loss {loss:g}, norm of the gradients {norm:g}",
            fix="look for the cause in the data or in a learning rate that is too "
            f"high; {last}",
        )

    def _peak_memory(self) -> int | None:
        """Most bytes that the fullest of this process's devices held, if it counts."""
        stats = [d.memory_stats() for d in self.run.mesh.jax.local_devices]
        peaks = [each["peak_bytes_in_use"] for each in stats if each]
        return max(peaks) if peaks else None

    def _validates_after(self, step: int) -> bool:
        training = self.run.config.training
        if step == training.steps:
            return True
        return bool(training.validate_every) and step % training.validate_every == 0

    def _validate(self, step: int, state: TrainState) -> bool:
        """Evaluate and show the loss; False where the run stops meanwhile."""
        self._enter("evaluation", step)
        run, feed = self.run, self.run.feed
        rows = run.config.rows_per_microbatch(run.mesh)
        limit = run.config.training.validation_batches
        sums, flights = np.zeros(2), deque[Any]()
        with closing(self.corpus.validation(rows, feed.index, feed.count)) as batches:
            for batch in islice(batches, limit):
                if not self._goes_on():
                    return False
                placed = feed.placed(batch, run.validation_spec, dim=0)
                flights.append(run.evaluate(state.params, placed))
                # Read behind, as the numbers of steps are.
                if len(flights) >= run.config.runtime.max_steps_in_flight:
                    sums += np.asarray(flights.popleft(), np.float64)
        for numbers in flights:
            sums += np.asarray(numbers, np.float64)
        total, tokens = sums.tolist()
        with self._shield:
            if tokens:
                self._writer.write(step, {"val_loss": total / tokens})
                self._console.show_validation(step, total / tokens)
            self._validated = step
        # Validation is not part of any step's time.
        self._read_at = time.perf_counter()
        return True

    def _sample(self, state: TrainState) -> None:
        training, tokenizer = self.run.config.training, self.corpus.tokenizer
        if not training.sample_length:
            return
        self._enter("evaluation", training.steps)
        prompt, shown = self._prompt()
        key = jax.random.fold_in(jax.random.key(training.seed), training.steps)
        ids = generate(
            self.run.model,
            state.params,
            jnp.asarray(prompt, jnp.int32)[None],
            training.sample_length,
            key,
            temperature=0.8,
        )
        added = np.asarray(ids)[0, len(prompt) :]
        self._console.show_sample(shown, tokenizer.decode(added))

    def _prompt(self) -> tuple[np.ndarray, str]:
        """What the sample continues: the separator alone where the data is no text."""
        text, tokenizer = (
            self.run.config.training.sample_prompt,
            self.corpus.tokenizer,
        )
        begin = list[int]() if tokenizer.separator is None else [tokenizer.separator]
        if tokenizer.kind == "synthetic" or not text:
            return np.array(begin or [0], np.int32), ""
        return np.concatenate([np.array(begin, np.int32), tokenizer.encode(text)]), text
