# SPDX-License-Identifier: Apache-2.0
"""Writes checkpoints in the background of the training loop.

The loop waits while the arrays are copied. Other threads do the rest: Orbax writes and
commits the arrays, then all files are read for their checksums, and the manifest is
written. Only then does the checkpoint count.

Orbax's ``AsyncCheckpointer`` copies and writes. Its ``CheckpointManager`` is not used
for retention and asynchrony: it deletes old steps as soon as its own commit is done,
while no checksum of the new one exists; ``latest_step`` counts steps that are still
being written; and it recreates the folder of a run that was renamed or taken over.
"""

import errno
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread
from time import perf_counter
from types import MappingProxyType
from typing import Any

import jax

from tessera.analysis.memory import format_bytes
from tessera.errors import CheckpointWriteError, TesseraError
from tessera.foundations.tree import named_leaves
from tessera.train.checkpoints import checkpoint_folder, manifest, storage
from tessera.train.checkpoints.metadata import (
    Metadata,
    Stored,
    library_versions,
    write_metadata,
)
from tessera.train.data import Corpus
from tessera.train.data.cursor import Cursor
from tessera.train.loop.build_run import Run
from tessera.train.loop.console import log
from tessera.train.loop.reference_scores import write_scores
from tessera.train.loop.train_state import TrainState
from tessera.train.rollouts.rollout import Rollout


class Checkpoints:
    """The checkpoints that a run writes; a context manager around its training.

    Every process creates one and calls the same methods; the first process writes
    everything that is not an array.

    Args:
      run: The run.
      root: The folder of its checkpoints, the same in every process.
      config: The run's configuration, YAML.
      resumed_step: The step that it resumes from in this folder, or None.
      check: Raises if the run's folder was moved, or belongs to another run now.
      published: The text of the files of the folder that the model came from, by name.

    Raises:
      CheckpointWriteError: [T804] nothing can be written there, or there is no room.
    """

    def __init__(
        self,
        run: Run,
        root: Path,
        config: str,
        resumed_step: int | None = None,
        check: Callable[[], None] = lambda: None,
        published: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._run, self._root, self._config = run, root, config
        self._published = dict(published)
        self._check_folder = check
        self._open_root = root
        self._is_first = jax.process_index() == 0
        self._resumed_step = resumed_step
        self._last_step = self._verified_step = resumed_step or 0
        self.scored: Corpus | None = None
        """The data with what a reference model says of it, which checkpoints keep."""
        self._thread: Thread | None = None
        self._failure: TesseraError | None = None
        self._nbytes = sum(
            leaf.size * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(run.abstract_state)
        )
        if self._is_first and self.is_enabled:
            check()
            for line in checkpoint_folder.prepare_root(
                root, resumed_step, self._nbytes
            ):
                log.warning("%s", line)
            self._set_verified(
                min(checkpoint_folder.read_verified_step(root), resumed_step or 0)
            )

    def mark_verified(self, step: int) -> None:
        """Record that a step was repeated on other devices with the same result."""
        if self._is_first and self.is_enabled:
            self._set_verified(step)

    def _set_verified(self, step: int) -> None:
        self._check_folder()
        self._verified_step = step
        try:
            if step != checkpoint_folder.read_verified_step(self._root):
                checkpoint_folder.write_verified_step(self._root, step)
        except OSError as error:
            log.warning("that step %d is verified cannot be recorded: %s", step, error)

    def discard_unverified(self) -> None:
        """Rename what is later than the last verified step: no run resumes from it.

        What the run began with stays where nothing is verified.

        Raises:
          CheckpointWriteError: [T804] one cannot be renamed.
        """
        self._join()
        if not (self._is_first and self.is_enabled):
            return
        self._check_folder()
        verified = self._newest_verified()
        try:
            lines = checkpoint_folder.clean_up(
                self._root, self._resumed_step if verified is None else verified
            )
        except OSError as error:
            raise checkpoint_folder.cannot_write(self._root, error) from error
        for line in lines:
            log.warning("%s", line)

    def _newest_verified(self) -> int | None:
        steps = checkpoint_folder.complete_steps(self._open_root)
        return next((step for step in steps if step <= self._verified_step), None)

    @property
    def durable_step(self) -> int | None:
        """The newest step whose checkpoint is complete on the disk, or None."""
        return next(iter(checkpoint_folder.complete_steps(self._open_root)), None)

    @property
    def is_enabled(self) -> bool:
        """Whether the run writes checkpoints at all."""
        training = self._run.config.training
        return training.checkpoint_every is not None and not training.eval_only

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is to be saved after this step."""
        training = self._run.config.training
        if not self.is_enabled or step <= self._last_step:
            return False
        every = training.checkpoint_every
        return step == training.steps or (bool(every) and step % every == 0)

    def save(
        self,
        step: int,
        state: TrainState,
        cursor: Cursor,
        *,
        is_validated: bool = True,
        rollout: Rollout | None = None,
    ) -> None:
        """Start saving a checkpoint; the state may be donated when this returns.

        If it cannot be written, that is logged, its files are removed, and training
        continues: the last complete checkpoint stays.

        Args:
          step: Optimizer steps done; more than at the last call.
          state: The state after them.
          cursor: The position in the data after them.
          is_validated: Whether the evaluation that is due after the step has run.
          rollout: What the next steps learn from, of a policy.

        Raises:
          CheckpointWriteError: [T804] there is one of this step, or of a later one.
          OutputPathError: [T504] the run's folder was moved.
        """
        self._check_folder()
        if self._open_root is self._root:
            # Not earlier: the first process has to create it.
            self._open_root = checkpoint_folder.open_by_descriptor(self._root)
        if step <= self._last_step:
            raise CheckpointWriteError(
                f"a checkpoint of step {step} cannot follow one of step "
                f"{self._last_step}",
                got=f"step {step}, in {self._root}",
                fix="save each step once, in ascending order",
            )
        self._last_step = step
        begun = perf_counter()
        if self._thread is not None and self._thread.is_alive():
            log.warning("step %d waits for the last checkpoint to be written", step)
        self._join()
        path = self._open_root / str(step)
        if self._is_first:
            with suppress(OSError):  # Orbax raises it again, in every process
                path.mkdir()
        try:
            self._check_room()
            write = storage.ArrayWrite(
                path / checkpoint_folder.STATE, named_leaves(state)
            )
        except OSError as error:
            self._abandon(path, error)
            return
        blocked = perf_counter() - begun

        def complete() -> None:
            try:
                write.finish()
                if self._is_first:
                    metadata = metadata_of(self._run, step, cursor, self._config)
                    metadata = replace(
                        metadata,
                        is_validated=is_validated,
                        published=self._published,
                    )
                    if rollout is not None:
                        rollout.write(path / checkpoint_folder.ROLLOUT)
                    if self.scored is not None:
                        write_scores(path, self._run, self.scored)
                    self._complete(path, metadata, begun, blocked)
            except Exception as error:
                self._abandon(path, error)
            else:
                self._failure = None

        self._thread = Thread(target=complete, name="tessera-checkpoint")
        self._thread.start()

    def _check_room(self) -> None:
        """Raise OSError if the disk has no room for a checkpoint.

        Without this, TensorStore was seen to wait for ever for a write to a full disk.
        Processes may see different disks, and either all or none have to write, so with
        several processes it is not checked.
        """
        free = shutil.disk_usage(self._open_root).free
        if free < self._nbytes and jax.process_count() == 1:
            needed = format_bytes(self._nbytes)
            message = f"it takes {needed}, {format_bytes(free)} are free"
            raise OSError(errno.ENOSPC, message)

    def _complete(
        self, path: Path, metadata: Metadata, begun: float, blocked: float
    ) -> None:
        """Write metadata and manifest of what Orbax has committed."""
        self._check_folder()
        write_metadata(path / manifest.LAST, metadata)
        nbytes = manifest.write_manifest(path)
        log.info(
            "the checkpoint of step %d is complete: %s in %.2f s, of which the loop "
            "waited %.3f s",
            metadata.step,
            format_bytes(nbytes),
            perf_counter() - begun,
            blocked,
        )
        self._remove_old()

    def _remove_old(self) -> None:
        keep = self._run.config.training.keep
        steps = checkpoint_folder.complete_steps(self._open_root)
        # What a run resumes from if a later step cannot be repeated stays.
        verified = self._newest_verified()
        for step in steps[keep:] if keep else ():
            if step == verified and self._run.config.runtime.verify_every:
                continue
            try:
                checkpoint_folder.remove(self._open_root / str(step))
            except OSError as error:
                log.warning("the checkpoint of step %d is not removed: %s", step, error)

    def _abandon(self, path: Path, error: Exception) -> None:
        """Log that a checkpoint could not be written, and remove its files."""
        if isinstance(error, TesseraError):
            self._failure = error
        else:
            message = str(error).replace(str(self._open_root), str(self._root))
            self._failure = checkpoint_folder.cannot_write(
                self._root / path.name, error, message
            )
        if self._is_first:
            checkpoint_folder.remove_failed(path)
            storage.collect_failed_writes()
            log.error("%s\n%s", self._failure, self.describe_last())

    def describe_last(self) -> str:
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
          OutputPathError: [T504] nor can any other: the run's folder was moved.
        """
        self._join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            if error is None:
                self.wait()
                return
            self._join()
            if self._is_first:
                log.warning("%s", self.describe_last())
        finally:
            opened, self._open_root = self._open_root, self._root
            checkpoint_folder.close_descriptor(opened)


def metadata_of(run: Run, step: int, cursor: Cursor, config: str) -> Metadata:
    """The description of a run's checkpoint."""
    split = run.model.split
    stages, blocks = None, Metadata.blocks
    if split is not None:
        stages = split.stages, tuple((run.start, run.stop) for run in split.layers)
        blocks = split.blocks
    return Metadata(
        step=step,
        arrays={
            n: Stored.of(leaf) for n, leaf in named_leaves(run.abstract_state).items()
        },
        mesh={axis: run.mesh.shape[axis] for axis in run.mesh.axes},
        processes=jax.process_count(),
        stages=stages,
        blocks=blocks,
        cursor=cursor,
        random={
            "seed": run.config.training.seed,
            "kind": str(jax.config.values["jax_default_prng_impl"]),
        },
        config=config,
        versions=library_versions(),
    )
