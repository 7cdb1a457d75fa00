# SPDX-License-Identifier: Apache-2.0
"""Random command lines: a coded error that writes nothing, or a run that starts.

A run *starts* where all is checked and read that can be, so that it would make its
folder next, and where its step can be traced for its arrays and layouts; that of a dry
run, which would compile next, can be lowered as well. Nothing is compiled. What is
drawn is in ``override_lists.py``.
"""

import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, NoReturn

import jax
import pytest

from tessera.train.loop import train
from tests.fuzz.override_lists import draw, fill
from tests.train.config.command_lines import run_from_command_line

ROOT = Path(__file__).parents[2]
# Longer than any case takes on a machine that does ten other things.
PATIENCE_S = 300


class Started(BaseException):
    """A run that would make its folder, or compile, next."""


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer, as far as where a run starts."""
    jobs: list[Any] = []

    class Run(train.Run):
        def check(self) -> None:
            jobs.append(self)
            super().check()

    def start(*_: Any, **__: Any) -> NoReturn:
        job = jobs.pop()
        traced = job.step.trace(job.abstract_state, job.abstract_batch)
        if job.config.training.dry_run:
            traced.lower()
        raise Started

    monkeypatch.setattr(train, "Run", Run)
    monkeypatch.setattr(train, "open_run_folder", start)
    monkeypatch.setattr(train, "run_rows", start)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator["Counter[str]"]:
    """How many command lines ended how; shown at the end."""
    found: Counter[str] = Counter()
    yield found
    if reporter := request.config.pluginmanager.get_plugin("terminalreporter"):
        reporter.write_line(f" {sum(found.values())} command lines: {dict(found)}")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    fill(tmp_path)
    return tmp_path


@contextmanager
def patience(arguments: list[str]) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> NoReturn:
        del number, frame
        raise AssertionError(f"no end after {PATIENCE_S} s: {arguments!r}")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(PATIENCE_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(arguments: list[str], capsys: Any) -> str:
    """``starts``, ``shown``, or the code of the error."""
    try:
        with patience(arguments):
            code = run_from_command_line(train.run, arguments)
    except Started:
        return "starts"
    except BaseException as error:
        raise AssertionError(f"{error!r} of {arguments!r}") from error
    seen = capsys.readouterr()
    if code == 0 and not seen.err:
        return "shown"
    assert (code, seen.out) == (2, ""), (arguments, code, seen)
    assert seen.err[:2] == "[T", (arguments, seen.err)
    assert len(seen.err) < 40_000, (arguments, len(seen.err))
    assert "Traceback" not in seen.err, (arguments, seen.err)
    return seen.err[1:5]


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Everything below a folder, with its size and the time of its last change."""
    found = {}
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(place, name)
            found[path] = (os.lstat(path).st_size, os.lstat(path).st_mtime_ns)
    return found


@pytest.mark.fuzz(sample=12, whole=2000)
def test_a_command_line_is_a_coded_error_or_a_run_that_starts(
    seed, trainer, folder, capsys, outcomes
):
    arguments = draw(Random(f"settings/{seed}"))
    before, settings = contents(folder), dict(jax.config.values)
    found = outcome(arguments, capsys)
    assert contents(folder) == before, arguments
    outcomes[found] += 1
    for name, value in settings.items():
        if jax.config.values[name] != value:
            jax.config.update(name, value)
