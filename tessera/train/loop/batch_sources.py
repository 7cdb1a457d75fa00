# SPDX-License-Identifier: Apache-2.0
"""Where the batches of a run come from: for texts and pairs, from its data alone."""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Protocol

from tessera.train.data import Batch, Corpus
from tessera.train.loop.build_run import Run
from tessera.train.loop.evaluation import validation_means
from tessera.train.loop.position import Position, StepInput
from tessera.train.loop.reference_scores import step_batch, with_reference
from tessera.train.loop.train_state import TrainState


class BatchSource(Protocol):
    """What a training loop takes batches from."""

    def batches(
        self,
        position: Callable[[], Position],
        drain: Callable[[], None],
        should_continue: Callable[[], bool],
    ) -> Generator[StepInput]:
        """The batches of one step after the other, from where the run is.

        Args:
          position: Where the run is whenever a batch is asked for.
          drain: Waits for the steps that were begun, and reads their metrics.
          should_continue: Asked while a batch is made that takes long.

        Raises:
          RolloutStopped: ``should_continue`` said no; the run is where it was.
        """
        ...

    def validate(
        self, step: int, state: TrainState, should_continue: Callable[[], bool]
    ) -> dict[str, dict[str, float]] | None:
        """Means over the validation data, as ``validation_means`` gives them."""
        ...


class CorpusBatches:
    """Reads rows of a corpus, and adds what a reference model says of them.

    Args:
      run: The run.
      corpus: Its data.
      add_wait: Takes the seconds that the loop waited for a batch.

    Attributes:
      corpus: Its data, of which rows that were scored have ``reference``.
    """

    def __init__(
        self, run: Run, corpus: Corpus, add_wait: Callable[[float], None]
    ) -> None:
        self._run, self._add_wait = run, add_wait
        self.corpus = corpus

    def batches(
        self,
        position: Callable[[], Position],
        drain: Callable[[], None],
        should_continue: Callable[[], bool],
    ) -> Generator[StepInput]:
        """See ``BatchSource``."""
        del drain, should_continue
        run, cursor = self._run, position().cursor
        shard = run.host_shard
        with closing(
            self.corpus.train(
                run.rows_per_step,
                shard.index,
                shard.count,
                cursor.rows,
                microbatches=run.config.training.gradient_accumulation_steps,
            )
        ) as batches:
            for batch in self._timed(batches):
                placed = step_batch(run, batch)
                placed = with_reference(run, position().state, placed)
                cursor = cursor.advance(run.rows_per_step)
                yield StepInput(placed, cursor)

    def validate(
        self, step: int, state: TrainState, should_continue: Callable[[], bool]
    ) -> dict[str, dict[str, float]] | None:
        """See ``BatchSource``."""
        del step
        return validation_means(self._run, self.corpus, state, should_continue)

    def _timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches; the time that the loop waits for each is a metric."""
        while True:
            begin = time.perf_counter()
            batch = next(batches, None)
            self._add_wait(time.perf_counter() - begin)
            if batch is None:
                return
            yield batch
