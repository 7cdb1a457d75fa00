# SPDX-License-Identifier: Apache-2.0
"""The folder of one run: what it is called inside, and that it can be written.

``train.log`` is everything that was said, ``metrics.jsonl`` every number,
``tensorboard/`` the same for TensorBoard, ``config.yaml`` the resolved configuration,
``checkpoints/`` what another run can go on from.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tessera.errors import OutputPathError

CHECKPOINTS: Final = "checkpoints"

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


def open_run_folder(
    path: Path, config_text: str, continued_step: int | None = None
) -> RunFolder:
    """Make a run's folder and write its configuration, before anything is compiled.

    What an earlier run left there is neither overwritten nor added to: it is renamed,
    ``metrics.jsonl`` to ``metrics.1.jsonl``.

    Args:
      path: The folder; its parents are made too.
      config_text: For ``config.yaml``.
      continued_step: The step that the run goes on from where that is the folder's own.
        Its checkpoints stay, and ``metrics.jsonl`` begins with the numbers up to that
        step, so that it holds the whole curve.

    Raises:
      OutputPathError: [T504] the folder cannot be made or written, or its checkpoints
        are elsewhere.
    """
    if continued_step is not None:
        check_inside(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        names = _NAMES if continued_step is not None else (*_NAMES, CHECKPOINTS)
        folder = RunFolder(path, kept=_set_aside(path, names))
        folder.config.write_text(config_text, encoding="utf-8")
        folder.log.touch()
        folder.metrics.touch()
        if continued_step is not None:
            _carry_numbers(folder, continued_step)
        folder.tensorboard.mkdir()
    except (OSError, ValueError) as error:
        raise cannot_write(path, error) from error
    return folder


def check_inside(path: Path) -> None:
    """See that a run that goes on in its folder writes nothing outside of it.

    Raises:
      OutputPathError: [T504] its folder of checkpoints is a link.
    """
    checkpoints = path / CHECKPOINTS
    if checkpoints.is_symlink():
        raise OutputPathError(
            "a run that goes on would write outside of its folder",
            got=f"{checkpoints} is a link to {checkpoints.resolve()}",
            fix="put the folder itself there, or take the run's folder to where there "
            "is room: hydra.run.dir=<folder>",
        )


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


def _carry_numbers(folder: RunFolder, step: int) -> None:
    """Begin ``metrics.jsonl`` with the earlier run's numbers up to a step."""
    with folder.metrics.open("w", encoding="utf-8") as lines:
        for earlier in (path for path in folder.kept if path.suffix == ".jsonl"):
            with earlier.open(encoding="utf-8", errors="replace") as written:
                for line in written:
                    # A run that was killed may leave half a line.
                    with suppress(ValueError, TypeError, KeyError):
                        if json.loads(line)["step"] <= step:
                            lines.write(line)


def _set_aside(path: Path, names: Sequence[str]) -> tuple[Path, ...]:
    """Rename an earlier run's files, all with one number that none of them has."""
    there = [name for name in names if _exists(path / name)]
    if not there:
        return ()
    number = 1
    while any(_exists(_numbered(path / name, number)) for name in names):
        number += 1
    return tuple((path / name).rename(_numbered(path / name, number)) for name in there)


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.{number}{path.suffix}")


def _exists(path: Path) -> bool:
    """Whether something has this name, a link that leads nowhere included."""
    return path.exists() or path.is_symlink()
