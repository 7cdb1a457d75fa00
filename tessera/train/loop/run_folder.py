# SPDX-License-Identifier: Apache-2.0
"""Creates the output folder of a run and names the files in it.

``train.log`` is every line of the log, ``metrics.jsonl`` every number,
``events.jsonl`` what happened to the run, over all of its attempts,
``samples.jsonl`` completions of a policy, of all attempts as well,
``tensorboard/`` the same for TensorBoard, ``config.yaml`` the resolved configuration,
``checkpoints/`` the checkpoints to resume from, ``report.html`` the report,
``tracker.json`` the id of the run in ``training.tracker``.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from tessera.errors import OutputPathError
from tessera.train.files.untrusted_json import count_of, parse_json

CHECKPOINTS: Final = "checkpoints"
TRACKER: Final = "tracker.json"
SAMPLES: Final = "samples.jsonl"

_METRICS: Final = "metrics.jsonl"
_NAMES: Final = ("train.log", _METRICS, "tensorboard", "profile", "config.yaml")
# What stays where a run goes on in its folder, whose report is of all attempts.
_KEPT: Final = ("events.jsonl", "report.html", SAMPLES, CHECKPOINTS, TRACKER)
# Of a line of metrics: a few dozen numbers by name.
_LONGEST_LINE: Final = 2**20


class RunFolder:
    """A run's output folder.

    Args:
      path: The folder.
      check: Raises where the folder is not where it was, or another run's.

    Attributes:
      log: Every line of the log.
      metrics: One JSON object a line.
      events: What happened to the run: one JSON object a line, of all attempts.
      tensorboard: The folder of TensorBoard's event files.
      profile: The folder of ``training.profile_communication``.
      report: The report, HTML.
      config: The resolved configuration, YAML.
    """

    def __init__(self, path: Path, check: Callable[[], None]) -> None:
        self.path, self.check = path, check
        self.log = path / "train.log"
        self.metrics = path / _METRICS
        self.events = path / "events.jsonl"
        self.tensorboard = path / "tensorboard"
        self.profile = path / "profile"
        self.report = path / "report.html"
        self.config = path / "config.yaml"


def open_run_folder(
    path: Path,
    config_text: str,
    continued_step: int | None = None,
    check: Callable[[], None] = lambda: None,
) -> RunFolder:
    """Make a run's folder and write its configuration, before anything is compiled.

    What an earlier run left there is neither overwritten nor added to: it is renamed,
    ``metrics.jsonl`` to ``metrics.1.jsonl``. Wherever a kill stops this, the next run
    finds ``metrics.jsonl`` as it was, or as it was to be.

    Args:
      path: The folder; its parents are made too.
      config_text: For ``config.yaml``.
      continued_step: The step that the run resumes from, if it is in this folder.
        Its checkpoints stay, and ``metrics.jsonl`` begins with the numbers up to that
        step, so that it holds the whole curve.
      check: Raises where the folder is not where it was, or another run's.

    Raises:
      OutputPathError: [T504] the folder cannot be made or written, or its checkpoints
        are elsewhere.
    """
    if continued_step is not None:
        check_inside(path)
    try:
        check()
        path.mkdir(parents=True, exist_ok=True)
        names = _NAMES if continued_step is not None else (*_NAMES, *_KEPT)
        _set_aside(path, names, continued_step)
        folder = RunFolder(path, check)
        folder.config.write_text(config_text, encoding="utf-8")
        folder.log.touch()
        folder.metrics.touch()
        folder.tensorboard.mkdir()
    except (OSError, ValueError) as error:
        raise cannot_write(path, error) from error
    return folder


def check_inside(path: Path) -> None:
    """Check that a run that resumes in its folder writes nothing outside of it.

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
    reason = error.strerror if isinstance(error, OSError) else None
    at = getattr(error, "filename", None) or path
    return OutputPathError(
        "the run cannot write its output",
        got=f"{at}: {reason or error}",
        fix="make room or give leave to write there, or take another folder: "
        "hydra.run.dir=<folder>",
    )


def write_durably(path: Path, lines: Iterable[str]) -> None:
    """Write a file so that, after a crash at any moment, it is whole or as before.

    Args:
      path: Where.
      lines: Its text, in parts.
    """
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder survive a crash of the machine."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _numbers_until(path: Path, step: int) -> Iterator[str]:
    """The lines of a run's numbers up to a step; what is none is left out."""
    is_rest = False
    with path.open(encoding="utf-8", errors="replace") as written:
        while line := written.readline(_LONGEST_LINE):
            is_begun, is_rest = not is_rest, line[-1] != "\n"
            # A run that was killed may leave half a line, or one without its end.
            with suppress(ValueError, TypeError, KeyError):
                read = parse_json(line, longest=_LONGEST_LINE)
                if is_begun and count_of(read["step"]) <= step:
                    yield f"{line.rstrip()}\n"


def _set_aside(path: Path, names: Sequence[str], continued_step: int | None) -> None:
    """Rename an earlier run's files, all with one number that none of them has.

    The metrics of a run that is resumed stay where they are, up to its step.
    """
    there = [name for name in names if _exists(path / name)]
    number = 1
    while any(_exists(_numbered(path / name, number)) for name in names):
        number += 1
    for name in there:
        file, target = path / name, _numbered(path / name, number)
        is_file = file.is_file() and not file.is_symlink()
        if name == _METRICS and continued_step is not None and is_file:
            _copy_durably(file, target)
            write_durably(file, _numbers_until(target, continued_step))
        else:
            file.rename(target)


def _copy_durably(file: Path, target: Path) -> None:
    """A second name for a file that is about to be replaced, or a copy of it."""
    try:
        target.hardlink_to(file)
    except OSError:  # a file system without
        shutil.copyfile(file, target)


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.{number}{path.suffix}")


def _exists(path: Path) -> bool:
    """Whether something has this name, a link that leads nowhere included."""
    return path.exists() or path.is_symlink()
