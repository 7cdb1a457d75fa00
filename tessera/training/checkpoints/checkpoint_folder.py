# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of a run on disk: which there are, and what becomes of bad ones.

    checkpoints/100/state/            the arrays, by Orbax
    checkpoints/100/metadata.json     what they are
    checkpoints/100/manifest.sha256   checksums of the two; written last
    checkpoints/80.damaged            one that did not hold, kept for you to look at

One with a manifest is *complete*. One without was not written to its end and never
counts; when a run writes here again it is removed, or kept under another name if its
arrays are there.
"""

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import Final

from tessera.analysis.memory import format_bytes
from tessera.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointWriteError,
)
from tessera.training.checkpoints import manifest
from tessera.training.checkpoints.metadata import Metadata, read_metadata
from tessera.training.outputs import CHECKPOINTS

STATE: Final = "state"

_HANDLES: Final = Path("/proc/self/fd")
_DAMAGED: Final = "damaged"
_REPLACED: Final = "replaced"
_UNFINISHED: Final = "unfinished"
_REMOVED: Final = "removed"


@dataclass(frozen=True)
class Checkpoint:
    """One that is complete and holds.

    Attributes:
      path: Its folder.
      metadata: What it says of itself.
    """

    path: Path
    metadata: Metadata

    @property
    def state(self) -> Path:
        """The folder of its arrays."""
        return self.path / STATE


def complete_steps(root: Path) -> list[int]:
    """The steps of the complete checkpoints in a folder, the newest first."""
    return sorted(
        (step for step in _steps(root) if is_complete(root / str(step))), reverse=True
    )


def find_newest(path: Path) -> Path:
    """The newest complete checkpoint; none of its bytes is looked at.

    Args:
      path: The folder of a run, of its checkpoints, or of one of them.

    Raises:
      CheckpointNotFoundError: [T801] there is none.
    """
    if is_complete(path):
        return path
    root = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    for step in complete_steps(root):
        return root / str(step)
    raise CheckpointNotFoundError(
        f"there is no complete checkpoint in {root}",
        got="none is complete" if root.is_dir() else "no such folder",
        fix="name the folder of a run, of its checkpoints or of one of them",
    )


def is_complete(path: Path) -> bool:
    """Whether a folder is a checkpoint that was written to its end."""
    return (path / manifest.NAME).is_file()


def read_checkpoint(path: Path) -> Checkpoint | str:
    """A complete checkpoint, or what is wrong with it; reads every byte of it.

    Raises:
      CheckpointMismatchError: [T802] a newer Tessera wrote it.
    """
    damage = manifest.find_damage(path)
    if damage is not None:
        return damage
    try:
        return Checkpoint(path, read_metadata(path / manifest.LAST))
    except CheckpointMismatchError:
        raise
    except (OSError, ValueError) as error:
        return f"{manifest.LAST} says nothing that can be used: {error}"


def set_aside(path: Path, suffix: str = _DAMAGED) -> Path:
    """Rename a checkpoint so that it counts no more; returns its new path."""
    target, number = path.with_name(f"{path.name}.{suffix}"), 1
    while target.exists():
        target = path.with_name(f"{path.name}.{suffix}.{number}")
        number += 1
    return path.rename(target)


def damaged_ones(root: Path) -> list[Path]:
    """Those that were set aside because they did not hold."""
    return sorted(root.glob(f"[0-9]*.{_DAMAGED}*"))


def remove(path: Path) -> None:
    """Remove a checkpoint; wherever this stops, no half of one counts."""
    if path.exists():
        _delete(set_aside(path, _REMOVED))


def _delete(path: Path) -> None:
    """Delete a folder; of a link only the link, and nothing of where it leads."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def remove_failed(path: Path) -> None:
    """Remove what a save has left that failed.

    When one array cannot be written others are still on their way, and make their
    folders again. What comes later than this waits, the next ``open_root`` removes.
    """
    absent = 0
    for _ in range(50):
        shutil.rmtree(path, ignore_errors=True)
        sleep(0.1)
        absent = 0 if path.exists() else absent + 1
        if absent == 5:
            return


def anchored(root: Path) -> Path:
    """A folder by a handle of it, which leads there wherever it is renamed to.

    What is being written then makes no folder anew in the old place. ``give_back``
    closes the handle. Where the system has no such paths, the folder by its name.
    """
    try:
        handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # whoever writes there finds it out
        return root
    path = _HANDLES / str(handle)
    if path.is_dir():
        return path
    os.close(handle)
    return root


def give_back(path: Path) -> None:
    """Close the handle of ``anchored``, if it is one."""
    if path.parent == _HANDLES:
        os.close(int(path.name))


def open_root(root: Path, resumed_step: int | None, nbytes: int) -> list[str]:
    """Make the folder ready for the checkpoints that a run will write.

    Args:
      root: The folder; made if it is not there.
      resumed_step: The step that the run goes on from in this folder, or None. What is
        later was given up and is set aside.
      nbytes: What one checkpoint takes.

    Returns:
      What a person should know of it, one sentence each.

    Raises:
      CheckpointWriteError: [T804] it cannot be written, or one has no room there.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        said = list(_tidied(root, resumed_step))
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
            fix="make room, take another folder (hydra.run.dir=<folder>), or keep no "
            "checkpoints: training.checkpoint_every=null",
        )
    return said


def cannot_write(
    path: Path, error: Exception, shown: str | None = None
) -> CheckpointWriteError:
    """T804 for what was said when a checkpoint was being written, or is to be shown."""
    said = (
        getattr(error, "strerror", None) or shown or str(error) or type(error).__name__
    )
    return CheckpointWriteError(
        "a checkpoint cannot be written",
        got=f"{path}: {said.splitlines()[0]}",
        fix="make room or give leave to write there, or take another folder: "
        "hydra.run.dir=<folder>",
    )


def _steps(root: Path) -> list[int]:
    if not root.is_dir():
        return []
    names = [path.name for path in root.iterdir() if path.is_dir()]
    # A name that int reads in another way, such as 007, is not one of ours.
    return [int(name) for name in names if name.isdecimal() and str(int(name)) == name]


def _tidied(root: Path, resumed_step: int | None) -> list[str]:
    """Clear away what earlier runs left in the way; what was done."""
    said: list[str] = []
    for path in root.glob(f"*.{_REMOVED}*"):
        _delete(path)
    for step in sorted(_steps(root)):
        path = root / str(step)
        if not is_complete(path):
            if not _is_remainder(path):
                kept = set_aside(path, _UNFINISHED)
                said.append(
                    f"the checkpoint of step {step} has no {manifest.NAME}; it does "
                    f"not count and is kept as {kept.name}"
                )
            else:
                _delete(path)
                said.append(f"removed the unfinished checkpoint of step {step}")
        elif step > (resumed_step or 0):
            kept = set_aside(path, _REPLACED)
            said.append(
                f"the checkpoint of step {step} is later than this run's beginning and "
                f"is kept as {kept.name}"
            )
    return said


def _is_remainder(path: Path) -> bool:
    """Whether a folder has nothing but what a save leaves that wrote no arrays."""
    ours = f"{STATE}.", manifest.LAST, manifest.NAME
    return all(child.name.startswith(ours) for child in path.iterdir())
