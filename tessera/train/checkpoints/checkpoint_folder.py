# SPDX-License-Identifier: Apache-2.0
"""Lists, reads, quarantines and removes the checkpoints of a run on disk.

    checkpoints/100/state/            the arrays, by Orbax
    checkpoints/100/rollout.npz       of a policy, what its next steps learn from
    checkpoints/100/reference.npz     of preferences, what precomputed scores there are
    checkpoints/100/metadata.json     their description
    checkpoints/100/manifest.sha256   checksums of both; written last
    checkpoints/80.damaged            quarantined: its checksums did not match

A checkpoint with a manifest is *complete*. One without was not fully written and never
counts; the next run that writes here removes it, or renames it if it has arrays.

Orbax's ``CheckpointManager`` has no checksums and no quarantine: it counts a step once
its folder is renamed, and deletes incomplete folders without looking at them.
"""

import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import Final

import jax

from tessera.analysis.memory import format_bytes
from tessera.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointWriteError,
)
from tessera.train.checkpoints import manifest
from tessera.train.checkpoints.metadata import Metadata, Stored, read_metadata
from tessera.train.loop.run_folder import CHECKPOINTS, write_durably
from tessera.train.rollouts.rollout import Rollout

STATE: Final = "state"
ROLLOUT: Final = "rollout.npz"

_DESCRIPTORS: Final = Path("/proc/self/fd")
# Suffixes of renamed checkpoints, which do not count.
_DAMAGED: Final = "damaged"
_REPLACED: Final = "replaced"
_UNFINISHED: Final = "unfinished"
_REMOVED: Final = "removed"
_VERIFIED: Final = "verified"
_LONGEST_NUMBER: Final = 20


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint whose checksums match.

    Attributes:
      path: Its folder.
      metadata: Its description.
    """

    path: Path
    metadata: Metadata

    @property
    def state(self) -> Path:
        """The folder of its arrays."""
        return self.path / STATE

    def read_rollout(self) -> Rollout | None:
        """What the next steps learn from, if it is of a policy."""
        path = self.path / ROLLOUT
        return Rollout.read(path) if path.exists() else None


def complete_steps(root: Path) -> list[int]:
    """The steps of the complete checkpoints in a folder, newest first."""
    return sorted(
        (step for step in _steps(root) if is_complete(root / str(step))), reverse=True
    )


def checkpoints_in(path: Path) -> Path:
    """The checkpoint folder of a run's folder, or the path itself if it is that."""
    return path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path


def find_newest(path: Path) -> Path:
    """The newest complete checkpoint, found without reading any of it.

    Args:
      path: The folder of a run, of its checkpoints, or of one of them.

    Raises:
      CheckpointNotFoundError: [T801] there is none.
    """
    if is_complete(path):
        return path
    root = checkpoints_in(path)
    for step in complete_steps(root):
        return root / str(step)
    raise CheckpointNotFoundError(
        f"there is no complete checkpoint in {root}",
        got="none is complete" if root.is_dir() else "no such folder",
        fix="name the folder of a run, of its checkpoints or of one of them",
    )


def is_complete(path: Path) -> bool:
    """Whether a folder is a fully written checkpoint."""
    return (path / manifest.NAME).is_file()


def read_checkpoint(path: Path) -> Checkpoint | str:
    """Verify a complete checkpoint by reading every byte of it.

    Returns:
      The checkpoint, or what is wrong with it.

    Raises:
      CheckpointMismatchError: [T802] a newer Tessera wrote it.
    """
    damage = manifest.find_damage(path)
    if damage is not None:
        return damage
    try:
        metadata = read_metadata(path / manifest.LAST)
        _check_arrays(path / STATE, metadata.arrays)
        return Checkpoint(path, metadata)
    except CheckpointMismatchError:
        raise
    except (OSError, ValueError) as error:
        return f"{manifest.LAST} is not usable: {error}"


def newest_intact(
    root: Path, warnings: list[str], *, is_own: bool
) -> Checkpoint | None:
    """The newest intact checkpoint; damaged ones of this run are quarantined."""
    for step in complete_steps(root):
        path = root / str(step)
        checkpoint = read_checkpoint(path)
        if isinstance(checkpoint, Checkpoint):
            return checkpoint
        try:
            action = f"was renamed to {quarantine(path).name}" if is_own else "stays"
        except OSError as error:
            action = f"cannot be renamed ({error.strerror})"
        warnings.append(
            f"THE CHECKPOINT OF STEP {step} IS DAMAGED: {checkpoint}. It {action} and "
            "does not count; the one before it is tried."
        )
    return None


def read_found(path: Path) -> Checkpoint:
    """A checkpoint that the first process has verified.

    Raises:
      CheckpointNotFoundError: [T801] this process cannot read it.
    """
    try:
        return Checkpoint(path, read_metadata(path / manifest.LAST))
    except (OSError, ValueError) as error:
        raise CheckpointNotFoundError(
            f"process {jax.process_index()} cannot read the checkpoint that process 0 "
            "found",
            got=f"{path}: {getattr(error, 'strerror', error)}",
            fix="put the run's folder on a file system that all machines share",
        ) from error


def _check_arrays(state: Path, arrays: Mapping[str, Stored]) -> None:
    """Raise ValueError if arrays are not as they are described: Orbax would cast."""
    if not arrays:
        return
    # Here, because it imports Orbax, which takes seconds.
    from tessera.train.checkpoints import storage

    layouts = storage.layouts(state)
    for name, array in arrays.items():
        if layouts.get(name) != (array.dtype, array.shape):
            dtype, shape = layouts.get(name, ("", ()))
            stored = f"{dtype}{[*shape]}" if dtype else "nothing"
            raise ValueError(
                f"{name} is {array.dtype}{[*array.shape]}, but {stored} is stored"
            )


def quarantine(path: Path, suffix: str = _DAMAGED) -> Path:
    """Rename a checkpoint so that it no longer counts; returns its new path."""
    target, number = path.with_name(f"{path.name}.{suffix}"), 1
    while target.exists():
        target = path.with_name(f"{path.name}.{suffix}.{number}")
        number += 1
    return path.rename(target)


def damaged_checkpoints(root: Path) -> list[Path]:
    """Checkpoints that were renamed because their checksums did not match."""
    return sorted(root.glob(f"[0-9]*.{_DAMAGED}*"))


def remove(path: Path) -> None:
    """Remove a checkpoint; if interrupted, no partial checkpoint counts."""
    if path.exists():
        _delete(quarantine(path, _REMOVED))


def _delete(path: Path) -> None:
    """Delete a folder; of a symbolic link only the link, not its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def remove_failed(path: Path) -> None:
    """Remove the files of a failed save.

    When one array cannot be written, Orbax's other writes are still running and
    recreate their folders. What they write after this returns is removed by the next
    ``prepare_root``.
    """
    absent = 0
    for _ in range(50):
        shutil.rmtree(path, ignore_errors=True)
        sleep(0.1)
        absent = 0 if path.exists() else absent + 1
        if absent == 5:
            return


def open_by_descriptor(root: Path) -> Path:
    """A path through an open file descriptor, which stays valid if a folder is renamed.

    A save in progress then does not recreate the folder under its old name.
    ``close_descriptor`` closes it. Where the system has no such paths, this is the
    ordinary path.
    """
    try:
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # the save will fail with a message about it
        return root
    path = _DESCRIPTORS / str(descriptor)
    if path.is_dir():
        return path
    os.close(descriptor)
    return root


def close_descriptor(path: Path) -> None:
    """Close the descriptor of ``open_by_descriptor``, if the path is one."""
    if path.parent == _DESCRIPTORS:
        os.close(int(path.name))


def prepare_root(root: Path, resumed_step: int | None, nbytes: int) -> list[str]:
    """Prepare a folder for the checkpoints that a run will write.

    Args:
      root: The folder; created if it does not exist.
      resumed_step: The step that the run resumes from in this folder, or None. Later
        checkpoints are renamed.
      nbytes: Size of one checkpoint.

    Returns:
      Warnings for the log, one sentence each.

    Raises:
      CheckpointWriteError: [T804] it cannot be written, or has no room for one.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        warnings = clean_up(root, resumed_step)
        with tempfile.NamedTemporaryFile(dir=root, prefix="probe.") as file:
            file.write(b"can this be written?")
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(root).free
    except OSError as error:
        raise cannot_write(root, error) from error
    if free < nbytes:
        raise CheckpointWriteError(
            f"there is no room for a checkpoint in {root}",
            got=f"a checkpoint takes {format_bytes(nbytes)}, and "
            f"{format_bytes(free)} are free",
            fix="make room, use another folder (hydra.run.dir=<folder>), or write no "
            "checkpoints: training.checkpoint_every=null",
        )
    return warnings


def cannot_write(
    path: Path, error: Exception, message: str | None = None
) -> CheckpointWriteError:
    """T804 for an exception, with another message in place of the exception's own."""
    why = getattr(error, "strerror", None) or message or str(error)
    return CheckpointWriteError(
        "a checkpoint cannot be written",
        got=f"{path}: {(why or type(error).__name__).splitlines()[0]}",
        fix="make room or allow writing there, or use another folder: "
        "hydra.run.dir=<folder>",
    )


def _steps(root: Path) -> list[int]:
    if not root.is_dir():
        return []
    names = [path.name for path in root.iterdir() if path.is_dir()]
    # A name such as 007, which int() accepts too, is not one of ours.
    return [int(name) for name in names if name.isdecimal() and str(int(name)) == name]


def clean_up(root: Path, resumed_step: int | None) -> list[str]:
    """Remove or rename what does not belong to a run that goes on from a step.

    The newest checkpoint comes first: a kill in between leaves a run without gaps.

    Args:
      root: The folder of the checkpoints.
      resumed_step: The step; None or 0 for the beginning.

    Returns:
      What was done, one sentence each, by step.

    Raises:
      OSError: A checkpoint cannot be removed or renamed.
    """
    actions: list[str] = []
    for path in root.glob(f"*.{_REMOVED}*"):
        _delete(path)
    for step in sorted(_steps(root), reverse=True):
        path = root / str(step)
        if is_complete(path):
            if step > (resumed_step or 0):
                renamed = quarantine(path, _REPLACED)
                actions.append(
                    f"the checkpoint of step {step} is later than step "
                    f"{resumed_step or 0} and was renamed to {renamed.name}"
                )
        elif _has_no_arrays(path):
            _delete(path)
            actions.append(f"removed the unfinished checkpoint of step {step}")
        else:
            renamed = quarantine(path, _UNFINISHED)
            actions.append(
                f"the checkpoint of step {step} has no {manifest.NAME}; it does not "
                f"count and was renamed to {renamed.name}"
            )
    return actions[::-1]


def _has_no_arrays(path: Path) -> bool:
    """Whether a folder holds only what an interrupted save leaves before the arrays."""
    ours = f"{STATE}.", manifest.LAST, manifest.NAME
    return all(child.name.startswith(ours) for child in path.iterdir())


def read_verified_step(root: Path) -> int:
    """The last verified step of a folder of checkpoints; 0 without a record.

    A checkpoint is verified if a step after it was repeated on other devices with the
    same result (``runtime.verify_every``). The number stands in a file of its own, as
    checksums of checkpoints are written once. What is not a number counts as no record.
    """
    with suppress(OSError, ValueError):
        with (root / _VERIFIED).open("rb") as file:
            text = file.read(_LONGEST_NUMBER).decode("ascii").strip()
        if text.isdecimal():
            return int(text)
    return 0


def write_verified_step(root: Path, step: int) -> None:
    """Record the last verified step.

    Raises:
      OSError: It cannot be written.
    """
    write_durably(root / _VERIFIED, (f"{step}\n",))
