# SPDX-License-Identifier: Apache-2.0
"""Checkpoints written behind the training loop, and which of them is safe.

The loop waits while the arrays are copied. Everything else is done by other threads:
Orbax writes and commits, then the files are read once more for their checksums, and the
manifest is written. From then on, and not before, the checkpoint counts.
"""

import errno
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from threading import Thread
from time import perf_counter
from types import TracebackType
from typing import Any

import jax

from tessera.analysis.memory import format_bytes
from tessera.errors import CheckpointWriteError, TesseraError
from tessera.training.checkpoints import checkpoint_folder, manifest, storage
from tessera.training.checkpoints.metadata import Metadata, Stored, write_metadata
from tessera.training.console import log
from tessera.training.data.cursor import Cursor
from tessera.training.run import Run
from tessera.training.train_state import TrainState
from tessera.tree import Tree


@dataclass(frozen=True)
class Saved:
    """What one checkpoint took.

    Attributes:
      step: Optimizer steps done.
      nbytes: Of its files.
      blocked_seconds: How long the training loop waited.
      write_seconds: From the beginning until Orbax had committed.
      checksum_seconds: For the checksums and the manifest.
    """

    step: int
    nbytes: int
    blocked_seconds: float
    write_seconds: float
    checksum_seconds: float


class Checkpoints:
    """The checkpoints that a run writes; a context in which it trains.

    Every process makes one and calls its methods alike; the first one writes what is
    not arrays.

    Args:
      job: The run.
      root: The folder of its checkpoints, the same one in every process.
      config: Its configuration, YAML.
      resumed_step: The step that it goes on from in this very folder, or None.
      check: Raises where the run's folder is not where it was, or another run's.

    Raises:
      CheckpointWriteError: [T804] nothing can be written there, or there is no room.
    """

    def __init__(
        self,
        job: Run,
        root: Path,
        config: str,
        resumed_step: int | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._job, self._root, self._config = job, root, config
        self._check_folder, self._place = check, root
        self._is_first = jax.process_index() == 0
        self._started = resumed_step or 0
        self._thread: Thread | None = None
        self._failure: TesseraError | None = None
        self.saved: Saved | None = None
        """What the last complete one took; None before, and where others write."""
        self._nbytes = sum(
            leaf.size * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(job.abstract_state)
        )
        if self._is_first and self.is_kept:
            check()
            for line in checkpoint_folder.open_root(root, resumed_step, self._nbytes):
                log.warning("%s", line)

    @property
    def durable_step(self) -> int | None:
        """The newest step whose checkpoint is complete on the disk, or None."""
        return next(iter(checkpoint_folder.complete_steps(self._place)), None)

    @property
    def is_kept(self) -> bool:
        """Whether the run keeps checkpoints at all."""
        return self._job.config.training.checkpoint_every is not None

    def is_due(self, step: int) -> bool:
        """Whether there is to be a checkpoint after this step."""
        training = self._job.config.training
        if not self.is_kept or step <= self._started:
            return False
        if step == training.steps:
            return True
        return bool(training.checkpoint_every) and step % training.checkpoint_every == 0

    def save(
        self,
        step: int,
        state: TrainState,
        cursor: Cursor,
        *,
        is_validated: bool = True,
    ) -> None:
        """Begin a checkpoint; the state may be donated when this returns.

        One that cannot be written is said in the log and removed, and training goes on:
        the last complete one stays.

        Args:
          step: Optimizer steps done; more than at the last call.
          state: The state after them.
          cursor: How far the data was read for them.
          is_validated: Whether the evaluation that is due after the step is done.

        Raises:
          CheckpointWriteError: [T804] there is one of this step, or of a later one.
          OutputPathError: [T504] the run's folder is not where it was.
        """
        self._check_folder()
        if self._place is self._root:
            # Not before the first process has made it.
            self._place = checkpoint_folder.anchored(self._root)
        if step <= self._started:
            raise CheckpointWriteError(
                f"a checkpoint of step {step} cannot follow one of step "
                f"{self._started}",
                got=f"step {step}, in {self._root}",
                fix="save each step once, in their order",
            )
        self._started = step
        begun = perf_counter()
        if self._thread is not None and self._thread.is_alive():
            log.warning("step %d waits for the last checkpoint to be written", step)
        self._join()
        path = self._place / str(step)
        if self._is_first:
            with suppress(OSError):  # Orbax finds it out again, on every process
                path.mkdir()
        try:
            self._check_room()
            writing = storage.Writing(path / checkpoint_folder.STATE, named(state))
        except OSError as error:
            self._give_up(path, error)
            return
        blocked = perf_counter() - begun

        def complete() -> None:
            try:
                writing.finish()
                if self._is_first:
                    metadata = replace(
                        metadata_of(self._job, step, cursor, self._config),
                        is_validated=is_validated,
                    )
                    self.saved = self._complete(path, metadata, begun, blocked)
            except Exception as error:
                self._give_up(path, error)
            else:
                self._failure = None

        self._thread = Thread(target=complete, name="tessera-checkpoint")
        self._thread.start()

    def _check_room(self) -> None:
        """Raise OSError if the disk has no room for a checkpoint.

        Tried nevertheless, a write that finds none was seen to be waited for for ever.
        Of several processes each may see another disk, and all have to write or none.
        """
        free = shutil.disk_usage(self._place).free
        if free < self._nbytes and jax.process_count() == 1:
            said = (
                f"it takes {format_bytes(self._nbytes)}, {format_bytes(free)} are free"
            )
            raise OSError(errno.ENOSPC, said)

    def _complete(
        self, path: Path, metadata: Metadata, begun: float, blocked: float
    ) -> Saved:
        """Make what Orbax has committed count."""
        committed = perf_counter()
        self._check_folder()
        write_metadata(path / manifest.LAST, metadata)
        nbytes = manifest.write_manifest(path)
        done = perf_counter()
        log.info(
            "the checkpoint of step %d is complete: %s in %.2f s, %.3f s of it waited",
            metadata.step,
            format_bytes(nbytes),
            done - begun,
            blocked,
        )
        self._remove_old()
        return Saved(
            metadata.step, nbytes, blocked, committed - begun, done - committed
        )

    def _remove_old(self) -> None:
        keep = self._job.config.training.keep
        for step in (
            checkpoint_folder.complete_steps(self._place)[keep:] if keep else ()
        ):
            try:
                checkpoint_folder.remove(self._place / str(step))
            except OSError as error:
                log.warning("the checkpoint of step %d is not removed: %s", step, error)

    def _give_up(self, path: Path, error: Exception) -> None:
        """Say that a checkpoint could not be written, and make room again."""
        if isinstance(error, TesseraError):
            self._failure = error
        else:
            shown = str(error).replace(str(self._place), str(self._root))
            self._failure = checkpoint_folder.cannot_write(
                self._root / path.name, error, shown
            )
        if self._is_first:
            checkpoint_folder.remove_failed(path)
            storage.clear_up()
            log.error("%s\n%s", self._failure, self.last_said())

    def last_said(self) -> str:
        """Which checkpoint is the last complete one, as a sentence."""
        step = self.durable_step
        if step is None:
            return "there is no complete checkpoint of this run yet"
        return f"the last complete checkpoint is {self._root / str(step)}"

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Wait until the last checkpoint is complete.

        Raises:
          CheckpointWriteError: [T804] it could not be written.
          OutputPathError: [T504] nor can any other: the run's folder is not there.
        """
        self._join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.wait()
                return
            self._join()
            if self._is_first:
                log.warning("%s", self.last_said())
        finally:
            place, self._place = self._place, self._root
            checkpoint_folder.give_back(place)


def named(tree: Tree) -> dict[str, Any]:
    """The leaves of a tree by their paths: ``params/decoder/mlp/up/kernel``."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def metadata_of(job: Run, step: int, cursor: Cursor, config: str) -> Metadata:
    """What a checkpoint of a run says of itself."""
    split = job.model.split
    stages = None
    if split is not None:
        stages = split.stages, tuple((run.start, run.stop) for run in split.layers)
    return Metadata(
        step=step,
        arrays={n: Stored.of(leaf) for n, leaf in named(job.abstract_state).items()},
        mesh={axis: job.mesh.shape[axis] for axis in job.mesh.axes},
        processes=jax.process_count(),
        stages=stages,
        cursor=cursor,
        random={
            "seed": job.config.training.seed,
            "kind": str(jax.config.values["jax_default_prng_impl"]),
        },
        config=config,
        versions=_versions(),
    )


def _versions() -> dict[str, str]:
    names = ("tessera", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")
    return {name: version(name) for name in names}
