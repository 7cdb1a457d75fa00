# SPDX-License-Identifier: Apache-2.0
"""``training.resume``: which checkpoint a run goes on with, if any.

Every byte of the newest one is read and compared with its manifest. One that does not
hold is renamed to ``<step>.damaged``, which is said loudly, and the one before it is
tried.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
import yaml
from jax.experimental import multihost_utils

from tessera import errors
from tessera.errors import CheckpointNotFoundError, TesseraError
from tessera.training.checkpoints.checkpoint_folder import (
    Checkpoint,
    complete_steps,
    damaged_ones,
    is_complete,
    read_checkpoint,
    set_aside,
)
from tessera.training.checkpoints.manifest import LAST
from tessera.training.checkpoints.metadata import read_metadata
from tessera.training.checkpoints.restoring import Restoration
from tessera.training.data import Corpus
from tessera.training.outputs import CHECKPOINTS, check_inside
from tessera.training.run import Run

NONE: Final = "none"
AUTO: Final = "auto"


@dataclass(frozen=True)
class Choice:
    """What a run begins with.

    Attributes:
      output_dir: The folder of the run.
      checkpoint: What it goes on from; None begins anew.
      warnings: What a person has to know of how it was found.
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
        """The step to go on from where it is in the run's own folder."""
        if self.checkpoint is None:
            return None
        # Resolved: a link to the run's own folder is its own folder.
        if self.checkpoint.path.parent.resolve() != self.root.resolve():
            return None
        return self.checkpoint.metadata.step

    def check(self, job: Run, corpus: Corpus, config: str) -> list[str]:
        """See that a run can go on from the checkpoint, before anything is compiled.

        Args:
          job: The run.
          corpus: Its data.
          config: Its configuration, YAML.

        Returns:
          What a person should know of it, one sentence each.

        Raises:
          CheckpointMismatchError: [T802] the checkpoint holds other arrays.
          DataChangedError: [T803] the checkpoint is of other data.
        """
        if self.checkpoint is None:
            return []
        metadata, training = self.checkpoint.metadata, job.config.training
        restoration = Restoration(metadata, job)
        restoration.check()
        cursor = metadata.cursor.resumed(corpus, training.resume_data)
        said = [f"going on from {self.checkpoint.path}, at row {cursor.rows:,}"]
        if changed := list(changed_settings(metadata.config, config)):
            said.append("with other settings: " + "; ".join(changed))
        if metadata.step >= training.steps:
            said.append(
                f"all {training.steps} steps are done; more training.steps go on"
            )
        return said + restoration.notes()


def choose_start(resume: str, output_dir: Path, attempt: int) -> Choice:
    """What ``choose`` finds; what the run left itself, when the launcher restarts it.

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
    """Find the checkpoint that ``training.resume`` means, and see that it holds.

    Of several processes the first one looks, and all go by what it found.

    Args:
      resume: ``none``; ``auto``, which is the newest one in ``output_dir`` if there is
        any; or the folder of a run, of its checkpoints, or of one of them.
      output_dir: The folder of this run, the same one in every process.

    Raises:
      CheckpointNotFoundError: [T801] there is none, or none that holds.
      CheckpointMismatchError: [T802] a newer Tessera wrote it.
      OutputPathError: [T504] the run's own checkpoints are outside of its folder.
    """
    output_dir = output_dir.absolute()

    def find() -> dict[str, Any]:
        try:
            found, warnings = _find(resume, output_dir)
        except OSError as error:  # a name that is too long, a folder without leave
            raise CheckpointNotFoundError(
                "it cannot be seen whether there is a checkpoint",
                got=f"{error.filename}: {error.strerror}",
                fix="give leave to read there, or name another folder: "
                "training.resume=<folder>, hydra.run.dir=<folder>",
            ) from error
        return {"path": str(found.path) if found else None, "warnings": warnings}

    said = _of_first_process(find)
    path = Path(said["path"]) if said["path"] else None
    checkpoint = None if path is None else Checkpoint(path, _metadata(path))
    return Choice(output_dir, checkpoint, tuple(said["warnings"]))


def changed_settings(before: str, now: str) -> Iterator[str]:
    """Settings whose values differ between two configurations, YAML, as ``a: 1 -> 2``.

    Those that are meant to differ, how to resume and where, are left out.
    """
    try:
        old, new = (dict(_flat(yaml.safe_load(text))) for text in (before, now))
    except yaml.YAMLError:
        yield "what the checkpoint has as its configuration is none"
        return
    for name in sorted(old.keys() | new.keys()):
        if name.startswith("training.resume") or old.get(name) == new.get(name):
            continue
        yield f"{name}: {old.get(name)} -> {new.get(name)}"


def _flat(node: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _flat(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, node


def _find(resume: str, output_dir: Path) -> tuple[Checkpoint | None, list[str]]:
    warnings: list[str] = []
    if resume == NONE:
        return None, warnings
    if resume == AUTO:
        check_inside(output_dir)
        root = output_dir / CHECKPOINTS
        found = _newest(root, warnings)
        if found is None and (damaged := damaged_ones(root)):
            raise _none_holds(root, [*warnings, *map(str, damaged)])
        if found is None:
            warnings.append(
                f"training.resume=auto: there is no checkpoint in {output_dir}, and "
                "the run begins at step 0; hydra.run.dir=<folder> says where to look"
            )
        return found, warnings
    path = Path(resume).absolute()
    if is_complete(path):
        checkpoint = read_checkpoint(path)
        if isinstance(checkpoint, str):
            raise _none_holds(path, [checkpoint])
        return checkpoint, warnings
    root = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    # In the folder of another run, which may be going on there, nothing is renamed.
    is_own = root.resolve() == (output_dir / CHECKPOINTS).resolve()
    found = _newest(root, warnings, is_own=is_own)
    if found is None:
        raise _none_holds(root, [*warnings, *map(str, damaged_ones(root))])
    return found, warnings


def _newest(
    root: Path, warnings: list[str], *, is_own: bool = True
) -> Checkpoint | None:
    """The newest checkpoint that holds; the run's own that do not are set aside."""
    for step in complete_steps(root):
        path = root / str(step)
        checkpoint = read_checkpoint(path)
        if isinstance(checkpoint, Checkpoint):
            return checkpoint
        try:
            kept = f"is kept as {set_aside(path).name}" if is_own else "stays as it is"
        except OSError as error:
            kept = f"cannot be renamed ({error.strerror})"
        warnings.append(
            f"THE CHECKPOINT OF STEP {step} IS DAMAGED: {checkpoint}. It {kept} and "
            "does not count; the one before is tried."
        )
    return None


def _none_holds(place: Path, said: list[str]) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(
        f"there is no intact checkpoint in {place}",
        got="\n".join(said)
        or ("no complete checkpoint" if place.is_dir() else "no such folder"),
        fix="name the folder of a run, of its checkpoints or of one checkpoint: "
        "training.resume=<folder>; or begin anew: training.resume=none",
    )


def _metadata(path: Path) -> Any:
    try:
        return read_metadata(path / LAST)
    except (OSError, ValueError) as error:
        raise CheckpointNotFoundError(
            f"process {jax.process_index()} does not see the checkpoint that process 0 "
            "found",
            got=f"{path}: {getattr(error, 'strerror', error)}",
            fix="put the folder of the run on a file system that all machines share",
        ) from error


def _of_first_process(find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the first process finds, in every process; its error as well."""
    if jax.process_count() == 1:
        return find()
    said: dict[str, Any] = {}
    if jax.process_index() == 0:
        try:
            said = find()
        except TesseraError as error:
            kind = type(error).__name__
            said = {"error": [kind, error.what, error.got, error.fix]}
    content = np.frombuffer(json.dumps(said).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(content.size)))
    padded = np.resize(content, size) if content.size else np.zeros(size, np.uint8)
    content = np.asarray(multihost_utils.broadcast_one_to_all(padded))
    said = json.loads(content.tobytes())
    if "error" in said:
        kind, what, got, fix = said["error"]
        raise getattr(errors, kind)(what, got=got, fix=fix)
    return said
