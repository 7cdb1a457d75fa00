# SPDX-License-Identifier: Apache-2.0
"""Selects the checkpoint that a run resumes from (``training.resume``).

Every byte of the newest one is read and compared with its manifest. If they differ, it
is renamed to ``<step>.damaged``, with a warning in capitals, and the one before it is
tried.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from tessera.errors import CheckpointNotFoundError, OutputPathError
from tessera.train.checkpoints.checkpoint_folder import (
    Checkpoint,
    checkpoints_in,
    damaged_checkpoints,
    is_complete,
    newest_intact,
    read_checkpoint,
    read_found,
)
from tessera.train.checkpoints.first_process import broadcast_from_first
from tessera.train.checkpoints.restore_arrays import Restoration
from tessera.train.config.setting_fields import walk
from tessera.train.data import Corpus
from tessera.train.files.bounded_yaml import parse_yaml
from tessera.train.loop.build_run import Run
from tessera.train.loop.reference_scores import read_scores
from tessera.train.loop.run_folder import CHECKPOINTS, check_inside
from tessera.train.loop.run_objective import PRECOMPUTED

NONE: Final = "none"
AUTO: Final = "auto"


@dataclass(frozen=True)
class Choice:
    """What a run starts from.

    Attributes:
      output_dir: The folder of the run.
      checkpoint: What it resumes from; None starts at step 0.
      warnings: Warnings for the log.
    """

    output_dir: Path
    checkpoint: Checkpoint | None = None
    warnings: tuple[str, ...] = ()

    @property
    def root(self) -> Path:
        """The folder of the checkpoints that the run writes."""
        return self.output_dir / CHECKPOINTS

    @property
    def own_step(self) -> int | None:
        """The step to resume from, if its checkpoint is in the run's own folder."""
        if self.checkpoint is None:
            return None
        # Resolved, because the path may contain symbolic links.
        if self.checkpoint.path.parent.resolve() != self.root.resolve():
            return None
        return self.checkpoint.metadata.step

    def check(self, run: Run, corpus: Corpus, config: str) -> list[str]:
        """Check that a run can resume from the checkpoint, before compiling anything.

        Args:
          run: The run.
          corpus: Its data.
          config: Its configuration, YAML.

        Returns:
          Lines for the log.

        Raises:
          CheckpointMismatchError: [T802] the checkpoint holds other arrays.
          DataChangedError: [T803] the run that saved it was reading other data, or
            what its reference model says is of other data.
          OutputPathError: [T504] an evaluation would write into that run.
        """
        if self.checkpoint is None:
            return []
        metadata, training = self.checkpoint.metadata, run.config.training
        restoration = Restoration(metadata, run)
        restoration.check()
        if run.reference == PRECOMPUTED:
            read_scores(self.checkpoint.path, run, corpus)
        cursor = restoration.cursor(corpus)
        if training.eval_only:
            if self.own_step is not None:
                raise OutputPathError(
                    "an evaluation does not write into the run that it evaluates",
                    got=f"{self.output_dir}",
                    fix="leave out hydra.run.dir, or name another folder",
                )
            return [f"evaluating {self.checkpoint.path}", *restoration.notes()]
        lines = [f"resuming from {self.checkpoint.path}, at row {cursor.rows:,}"]
        if changed := list(changed_settings(metadata.config, config)):
            lines.append("changed settings: " + "; ".join(changed))
        if metadata.step >= training.steps:
            lines.append(
                f"all {training.steps} steps are done; raise training.steps to continue"
            )
        return lines + restoration.notes()


def choose_start(resume: str, output_dir: Path, attempt: int) -> Choice:
    """Like ``choose``; a run that was restarted prefers its own checkpoints.

    Args:
      resume: As for ``choose``.
      output_dir: As for ``choose``.
      attempt: How many times the launcher has restarted the run.

    Raises:
      TesseraError: [T504], [T801], [T802] as ``choose`` does.
    """
    own = choose(AUTO, output_dir) if attempt else None
    return own if own and own.checkpoint else choose(resume, output_dir)


def choose(resume: str, output_dir: Path) -> Choice:
    """Find the checkpoint that ``training.resume`` names, and verify its checksums.

    With several processes, the first one searches, and all use what it found.

    Args:
      resume: ``none``; ``auto``, the newest one in ``output_dir`` if there is any; or
        the folder of a run, of its checkpoints, or of one of them.
      output_dir: The folder of this run, the same one in every process.

    Raises:
      CheckpointNotFoundError: [T801] there is none, or all are damaged.
      CheckpointMismatchError: [T802] a newer Tessera wrote it.
      OutputPathError: [T504] the run's checkpoints are outside of its folder.
    """
    output_dir = output_dir.absolute()

    checkpoint, warnings = _everywhere(partial(_find, resume, output_dir))
    return Choice(output_dir, checkpoint, warnings)


def changed_settings(before: str, now: str) -> Iterator[str]:
    """Settings whose values differ between two YAML configurations, as ``a: 1 -> 2``.

    The settings of resuming itself are expected to differ and are left out.
    """
    try:
        old, new = (dict(walk(parse_yaml(text))) for text in (before, now))
    except ValueError:
        yield "the configuration in the checkpoint is malformed"
        return
    for name in sorted(old.keys() | new.keys()):
        if name.startswith("training.resume") or old.get(name) == new.get(name):
            continue
        yield f"{name}: {old.get(name)} -> {new.get(name)}"


def _everywhere(
    find: Callable[[], tuple[Checkpoint | None, list[str]]],
) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """What the first process finds, in every process."""

    def found() -> dict[str, Any]:
        try:
            checkpoint, warnings = find()
        except OSError as error:  # a name that is too long, an unreadable folder
            raise CheckpointNotFoundError(
                "cannot find out whether there is a checkpoint",
                got=f"{error.filename}: {error.strerror}",
                fix="allow reading there, or name another folder: "
                "training.resume=<folder>, hydra.run.dir=<folder>",
            ) from error
        return {"path": str(checkpoint.path) if checkpoint else "", "notes": warnings}

    result = broadcast_from_first(found)
    path = Path(result["path"])
    checkpoint = read_found(path) if result["path"] else None
    return checkpoint, tuple(result["notes"])


def _find(resume: str, output_dir: Path) -> tuple[Checkpoint | None, list[str]]:
    warnings: list[str] = []
    if resume == NONE:
        return None, warnings
    if resume == AUTO:
        check_inside(output_dir)
        root = output_dir / CHECKPOINTS
    else:
        root = Path(resume).absolute()
        if is_complete(root):
            checkpoint = read_checkpoint(root)
            if isinstance(checkpoint, str):
                raise _no_intact(root, [checkpoint])
            return checkpoint, warnings
        root = checkpoints_in(root)
    # Another run's checkpoints are not renamed: it may be running.
    is_own = root.resolve() == (output_dir / CHECKPOINTS).resolve()
    checkpoint = newest_intact(root, warnings, is_own=is_own)
    damaged = damaged_checkpoints(root)
    if checkpoint is None and (damaged or resume != AUTO):
        raise _no_intact(root, [*warnings, *map(str, damaged)])
    if checkpoint is None:
        warnings.append(
            f"training.resume=auto: there is no checkpoint in {output_dir}, and the "
            "run starts at step 0; hydra.run.dir=<folder> names the folder to search"
        )
    return checkpoint, warnings


def _no_intact(path: Path, damages: list[str]) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(
        f"there is no intact checkpoint in {path}",
        got="\n".join(damages)
        or ("no complete checkpoint" if path.is_dir() else "no such folder"),
        fix="name the folder of a run, of its checkpoints or of one checkpoint: "
        "training.resume=<folder>; or start at step 0: training.resume=none",
    )
