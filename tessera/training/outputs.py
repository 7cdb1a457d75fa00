# SPDX-License-Identifier: Apache-2.0
"""The folder of one run: what it is called inside, and that it can be written.

``train.log`` is everything that was said, ``metrics.jsonl`` every number,
``tensorboard/`` the same for TensorBoard, ``config.yaml`` the resolved configuration.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tessera.errors import OutputPathError

_NAMES: Final = (
    *("train.log", "metrics.jsonl", "tensorboard", "profile", "config.yaml"),
)


@dataclass(frozen=True)
class RunFolder:
    """A run's output folder.

    Attributes:
      path: The folder.
      kept: What an earlier run in the same folder had written, under the names that it
        has now.
    """

    path: Path
    kept: tuple[Path, ...] = ()

    @property
    def log(self) -> Path:
        """Every line of the log."""
        return self.path / "train.log"

    @property
    def metrics(self) -> Path:
        """One JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """The folder of TensorBoard's event files."""
        return self.path / "tensorboard"

    @property
    def profile(self) -> Path:
        """The folder of ``training.profile_communication``."""
        return self.path / "profile"

    @property
    def config(self) -> Path:
        """The resolved configuration, YAML."""
        return self.path / "config.yaml"


def open_run_folder(path: Path, config_text: str) -> RunFolder:
    """Make a run's folder and write its configuration, before anything is compiled.

    What an earlier run left there is neither overwritten nor added to: it is renamed,
    ``metrics.jsonl`` to ``metrics.1.jsonl``.

    Args:
      path: The folder; its parents are made too.
      config_text: For ``config.yaml``.

    Raises:
      OutputPathError: [T504] the folder cannot be made or written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        folder = RunFolder(path, kept=_set_aside(path))
        folder.config.write_text(config_text, encoding="utf-8")
        folder.log.touch()
        folder.metrics.touch()
        folder.tensorboard.mkdir()
    except (OSError, ValueError) as error:
        raise cannot_write(path, error) from error
    return folder


def cannot_write(path: Path, error: Exception) -> OutputPathError:
    """T504 for what the operating system says of a path.

    Args:
      path: What was to be written.
      error: An ``OSError``, or the ``ValueError`` of a path with a NUL in it.
    """
    said = error.strerror if isinstance(error, OSError) else None
    at = getattr(error, "filename", None) or path
    return OutputPathError(
        "the run cannot write its output",
        got=f"{at}: {said or error}",
        fix="make room or give leave to write there, or take another folder: "
        "hydra.run.dir=<folder>",
    )


def _set_aside(path: Path) -> tuple[Path, ...]:
    """Rename an earlier run's files, all with one number that none of them has."""
    there = [name for name in _NAMES if _exists(path / name)]
    if not there:
        return ()
    number = 1
    while any(_exists(_numbered(path / name, number)) for name in _NAMES):
        number += 1
    return tuple((path / name).rename(_numbered(path / name, number)) for name in there)


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.{number}{path.suffix}")


def _exists(path: Path) -> bool:
    """Whether something has this name, a link that leads nowhere included."""
    return path.exists() or path.is_symlink()
