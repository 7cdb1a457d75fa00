# SPDX-License-Identifier: Apache-2.0
"""Clocks that are set during a run change neither its curve nor its goodput."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tessera.train.records.events import read_events
from tessera.train.records.goodput import goodput_of
from tests.curves import curve
from tests.faults.trainer import ROOT, SMALL, environ, train_here

LIMIT = 240.0
LIBFAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
SETTINGS = (
    *(*SMALL, "model.mesh_shape=[[2],[fsdp]]"),
    *("runtime.max_run_time=3600", "runtime.step_deadline=600"),
)


class Training:
    """A run: a program, which may be that of the launcher, and its settings."""

    def __init__(self, folder: Path, *command: str, **variables: str):
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, *command, f"hydra.run.dir={folder}"],
            cwd=ROOT,
            env=environ(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._begin = time.monotonic()

    def finish(self) -> None:
        """Wait for its end, and see that its times are those of its own clock."""
        try:
            said, _ = self.process.communicate(timeout=LIMIT)
        finally:
            self.process.kill()  # its ranks end with it
        seconds = time.monotonic() - self._begin
        assert self.process.returncode == 0, said
        goodput = goodput_of(read_events(self.folder / "events.jsonl"))
        assert 0 < goodput.total_seconds < seconds
        assert min(goodput.seconds.values()) >= 0
        assert goodput.seconds["step"] > 0

    def times(self) -> list[float]:
        """The times of its events, in seconds after the first."""
        times = [e["time"] for e in read_events(self.folder / "events.jsonl")]
        return [one - times[0] for one in times]


@pytest.mark.full
def test_clocks_that_are_set_change_no_number(tmp_path):
    short = (*SETTINGS, "training.steps=6", "training.checkpoint_every=2")
    launcher = ("-m", "tessera.train.commands.launch", "--nprocs=2")
    assert train_here(*short, f"hydra.run.dir={tmp_path / 'whole'}") == 0
    jumping = (*launcher, "tests/faults/clock_run.py", *short)
    jumps = Training(tmp_path / "jumps", *jumping)
    jumps.finish()
    assert curve(jumps.folder) == curve(tmp_path / "whole")
    assert max(jumps.times()) > 290, "the clock was set"


@pytest.mark.full
@pytest.mark.skipif(LIBFAKETIME is None, reason="there is no libfaketime")
def test_clocks_of_compiled_code_may_be_set_too(tmp_path):
    long = ("run_training.py", *SETTINGS, "training.steps=400")
    long = (*long, "training.checkpoint_every=100")
    Training(tmp_path / "whole", *long).finish()
    offset = tmp_path / "offset"
    offset.write_text("+0")
    jumps = Training(
        *(tmp_path / "jumps", *long),
        LD_PRELOAD=str(LIBFAKETIME),
        FAKETIME_TIMESTAMP_FILE=str(offset),
        FAKETIME_CACHE_DURATION="1",
        # As setting a clock does: only its time of day is another one.
        FAKETIME_DONT_FAKE_MONOTONIC="1",
    )

    def set_at(step: int, seconds: str) -> None:
        metrics = jumps.folder / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= step)
        partial = tmp_path / "partial"
        partial.write_text(seconds)
        partial.replace(offset)

    set_at(100, "+300")
    set_at(200, "-300")
    jumps.finish()
    assert curve(jumps.folder) == curve(tmp_path / "whole")
    assert max(jumps.times()) > 290, "the clock was set"
    assert min(jumps.times()) < -200, "and back"


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)
