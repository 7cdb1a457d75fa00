# SPDX-License-Identifier: Apache-2.0
"""Launchers and ranks that are killed at any time: no orphan, one owner of the folder.

    TESSERA_KILLS=30 python -m pytest tests/faults/test_kills.py -n0 -s -k random_times

is the long form of what the suite does with two kills. Real processes: two ranks of
``run_training.py`` under a launcher that restarts them, or, where the launcher itself
is killed, under the next one, which is started at once.
"""

import json
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tessera.train.checkpoints.checkpoint_folder import complete_steps
from tessera.train.loop import train
from tessera.train.loop.metrics import MetricWriter
from tests.curves import curve
from tests.faults.trainer import PROGRAM, environ, train_here
from tests.faults.trainer import SMALL as SMALLEST

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="what processes hold is read from /proc"
)

KILLS = int(os.environ.get("TESSERA_KILLS", "2"))
# Of waiting for anything: long enough for any machine.
LIMIT = 300.0
STEPS = 12
LOST_PEER = re.compile("Gloo|coordination service")
LAUNCHER = ("--nprocs=2", "--grace=20", "--max-restarts=1000")
SMALL = (
    *(*SMALLEST, "model.mesh_shape=[[2],[fsdp]]", f"training.steps={STEPS}"),
    *("training.checkpoint_every=1", "training.keep=2", "training.resume=auto"),
)


class Run:
    """A launcher, or a single process, and what it says."""

    def __init__(
        self, folder: Path, *settings: str, flags: tuple[str, ...] = ()
    ) -> None:
        launcher = ("-m", "tessera.train.commands.launch", *flags) if flags else ()
        self.folder, self.lines = folder, list[str]()
        self._said = threading.Condition()
        self.process = subprocess.Popen(
            [
                *(sys.executable, *launcher, PROGRAM, *SMALL),
                *(f"hydra.run.dir={folder}", *settings),
            ],
            cwd=folder.parent,
            env=environ(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as said:
            for line in said:
                with self._said:
                    self.lines.append(line)
                    self._said.notify_all()
        with self._said:
            self.lines.append("")
            self._said.notify_all()

    def wait_for(self, pattern: str, after: int = 0) -> int:
        """The place after the first line from ``after`` on that has a pattern; 0 where
        its output ends before."""

        def look() -> int | None:
            for at, line in enumerate(self.lines[after:], after):
                if re.search(pattern, line):
                    return at + 1
                if not line:
                    return 0
            return None

        with self._said:
            assert self._said.wait_for(lambda: look() is not None, LIMIT), self.text
            found = look()
        assert found is not None
        return found

    @property
    def text(self) -> str:
        return "".join(self.lines)

    @property
    def ranks(self) -> list[int]:
        """The processes that this launcher has started, in sessions of their own."""
        mine = f"TESSERA_LAUNCHER={self.process.pid}".encode()
        found = []
        for variables in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if mine in variables.read_bytes().split(b"\0"):
                    found.append(int(variables.parent.name))
        return sorted(found)

    def finish(self, code: int = 0) -> str:
        self.process.wait(timeout=LIMIT)
        self._reader.join(timeout=LIMIT)
        assert self.process.returncode == code, self.text
        return self.text

    def clear_up(self) -> None:
        for pid in [*self.ranks, self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=LIMIT)
        self._reader.join(timeout=LIMIT)


Start = Callable[..., Run]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts runs of two ranks, and kills what is left of them by their numbers."""
    runs: list[Run] = []

    def begin(folder: Path, *settings: str, flags: tuple[str, ...] = LAUNCHER) -> Run:
        runs.append(Run(folder, *settings, flags=flags))
        return runs[-1]

    yield begin
    for run in runs:
        run.clear_up()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The curve of one process with two devices, to which nothing happens."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert train_here(*SMALL, f"hydra.run.dir={folder}") == 0
    found = curve(folder)
    assert [line["step"] for line in found if "loss" in line] == [*range(1, STEPS + 1)]
    return found


class Owners:
    """Looks on without a pause, who writes to the files of a run that only one may."""

    ONES = re.compile(r"/(lock\.\d+|metrics\.jsonl|train\.log)$")

    def __init__(self, *runs: Run) -> None:
        self.runs = [*runs]
        self.most: dict[int, set[str]] = {}
        self.looks = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Owners":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(timeout=LIMIT)

    def _watch(self) -> None:
        while not self._ended.wait(0.05):
            places = {str(run.folder) for run in self.runs}
            for place in places:
                owners = self._owners(place)
                if len(owners) > 1:  # at once, or has the first one ended meanwhile?
                    again = self._owners(place)
                    owners = {pid: owners[pid] for pid in owners.keys() & again.keys()}
                self.most = max(self.most, owners, key=len)
            self.looks += 1

    def _owners(self, place: str) -> dict[int, set[str]]:
        """The processes that have such files open for writing, and which.

        Whoever waits for a lock opens its file as well, to read who holds it.
        """
        found: dict[int, set[str]] = {}
        for pid in {pid for run in self.runs for pid in run.ranks}:
            with suppress(OSError):
                for file in Path(f"/proc/{pid}/fd").iterdir():
                    with suppress(OSError):
                        path, mode = os.readlink(file), file.lstat().st_mode
                        is_one = path.startswith(place) and self.ONES.search(path)
                        if is_one and mode & stat.S_IWUSR:
                            found.setdefault(pid, set()).add(path)
        return found


def wait_until(happened: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LIMIT
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.01)
    return happened()


def assert_nothing_is_lost(folder: Path) -> int:
    """See that the curve has every step up to the newest checkpoint; its step."""
    newest = next(iter(complete_steps(folder / "checkpoints")), 0)
    if newest:
        text = (folder / "metrics.jsonl").read_text()
        steps = {int(step) for step in re.findall(r'(?m)^{"step": (\d+)', text)}
        assert {*range(1, newest + 1)} <= steps
    return newest


class Storm:
    """Kills launchers and ranks, one after the other, at drawn times."""

    def __init__(self, start: Start, folder: Path, seed: int) -> None:
        self._start, self._draw = start, random.Random(seed)
        self.folders = [folder / "run0"]
        self.run = start(self.folders[-1])
        self.runs, self._at = [self.run], 0
        self.victims: list[str] = []
        self.newest: list[int] = []
        self.slowest = 0.0

    def kill(self, number: int) -> None:
        """Kill the launcher, or one of its ranks, when they have begun or later."""
        draw, run = self._draw, self.run
        self._at = run.wait_for("starting ranks", self._at)
        moment = ("first", "step", "import")[number % 3]
        if moment == "first":
            time.sleep(draw.uniform(0, 0.1))
        elif moment == "import":
            time.sleep(draw.uniform(0, 6))
        else:
            at = self._at
            for _ in range(draw.randint(1, 5)):
                at = run.wait_for(r"step \d+/", at) or at
            time.sleep(draw.uniform(0, 0.3))
        is_launcher = number % 2 == 0
        victims = [run.process.pid] if is_launcher else run.ranks
        victim = draw.choice(victims) if victims else run.process.pid
        self.victims.append("launcher" if victim == run.process.pid else "rank")
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        if victim == run.process.pid:
            self._replace_launcher()
        self.newest.append(assert_nothing_is_lost(self.folders[-1]))

    def _replace_launcher(self) -> None:
        """Start the next one at once, and see that the ranks of the last are gone."""
        self.run.process.wait(timeout=LIMIT)
        killed = time.monotonic()
        before, self._at = self.run, 0
        if self.run.process.returncode == 0:
            # There was nothing left to kill: another run, from the beginning.
            self.folders.append(self.folders[0].with_name(f"run{len(self.folders)}"))
        self.run = self._start(self.folders[-1])
        self.runs.append(self.run)
        assert wait_until(lambda: not before.ranks), f"orphans: {before.ranks}"
        self.slowest = max(self.slowest, time.monotonic() - killed)

    def finish(self) -> None:
        self.run.finish()


@pytest.mark.full
def test_kills_at_random_times_leave_no_orphan_and_the_curve(
    start, uninterrupted, tmp_path
):
    """From the first millisecond of launchers and ranks on."""
    storm = Storm(start, tmp_path, seed=KILLS)
    with Owners() as owners:
        owners.runs = storm.runs
        for number in range(KILLS):
            storm.kill(number)
        storm.finish()
    said = "".join(run.text for run in storm.runs)
    sys.stdout.write(
        f"{len(storm.victims)} kills: {storm.victims.count('launcher')} of launchers, "
        f"{storm.victims.count('rank')} of ranks; newest checkpoint after each: "
        f"{storm.newest}; orphans gone within {storm.slowest:.2f} s; most owners of a "
        f"folder at once: {len(owners.most)}, of {owners.looks} looks\n"
    )
    # A rank may say that it has lost the other one, before the launcher ends it.
    errors = re.findall(r"(?m)^\[rank \d\] (\w[\w.]*(?:Error|Exception)\b.*)$", said)
    assert [error for error in errors if not LOST_PEER.search(error)] == []
    assert "[T710]" not in said
    assert owners.looks
    assert len(owners.most) == 1, owners.most
    for folder in storm.folders:
        assert curve(folder) == uninterrupted
        assert [path.name for path in folder.glob("lock*")] == []


@pytest.mark.full
def test_a_second_launcher_in_one_folder_is_refused_and_disturbs_nobody(
    start, tmp_path
):
    first = start(tmp_path / "run", "training.steps=100000")
    first.wait_for("compiling the step")  # so both get on at the same time
    with Owners(first) as owners:
        second = start(first.folder)
        owners.runs.append(second)
        said = second.finish(2)
        first.wait_for(r"step \d+/", after=len(first.lines))
        assert {path.name for path in first.folder.iterdir()} == {
            *("lock", "train.log", "metrics.jsonl", "events.jsonl"),
            *("tensorboard", "config.yaml", "checkpoints"),
        }
        first.process.send_signal(signal.SIGTERM)
        first.finish(75)
    (holder,) = set(re.findall(r"held by process (\d+) on host", said))
    assert f"process {holder} on host {os.uname().nodename}, since 20" in said
    for rank in (0, 1):
        refusal = f"[T710] another run writes to the folder {first.folder}"
        assert f"[rank {rank}] {refusal}\n" in said
    assert "] restart " not in said
    assert len(owners.most) == 1, owners.most
    numbers = [line["step"] for line in curve(first.folder) if "loss" in line]
    assert numbers == [*range(1, len(numbers) + 1)]
    assert complete_steps(first.folder / "checkpoints")[0] == len(numbers)


def assert_is_taken_away(said: str, away: Path) -> None:
    """See that the run says so, and that its folder is whole in the other place."""
    assert "[T504] the folder of the run is not where it was" in said
    assert said.rstrip().endswith(
        "  docs: https://tessera-spmd.github.io/tessera/errors/T504.html"
    )
    # What was there can be gone on from when it is back.
    assert (away / "lock").exists()
    assert [*map(json.loads, (away / "metrics.jsonl").read_text().splitlines())]


@pytest.mark.full
def test_a_folder_that_is_renamed_under_way_ends_the_run_of_two_ranks(start, tmp_path):
    """Also in the middle of a checkpoint; and nothing is written in another place."""
    run = start(tmp_path / "run", "training.steps=100000")
    run.wait_for(r"step 3/")
    run.folder.rename(tmp_path / "away")
    said = run.finish(2)
    assert_is_taken_away(said, tmp_path / "away")
    assert "] restart " not in said
    assert not run.folder.exists()


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Does something in this process when a run writes the numbers of a step."""

    def begin(number: int, action: Callable[[], object]) -> None:
        class Writer(MetricWriter):
            def write(self, step: int, values: Any) -> None:
                super().write(step, values)
                if step == number:
                    action()

        monkeypatch.setattr(train, "MetricWriter", Writer)

    return begin


@pytest.mark.full
@pytest.mark.parametrize("change", ["deleted", "exchanged"])
def test_a_folder_that_is_taken_away_under_way_ends_the_run(
    tmp_path, at_step, capsys, change
):
    """While the checkpoint of the step before is written."""
    folder, away = tmp_path / "run", tmp_path / "away"

    def take_away() -> None:
        folder.rename(away)
        if change == "deleted":
            shutil.rmtree(away, ignore_errors=True)  # it is being written
        else:
            folder.mkdir()
            (folder / "mine.txt").touch()

    at_step(3, take_away)
    assert train_here(*SMALL, f"hydra.run.dir={folder}") == 2
    said = capsys.readouterr().err
    if change == "exchanged":
        assert_is_taken_away(said, away)
        assert [path.name for path in folder.iterdir()] == ["mine.txt"]
    else:
        assert "[T504] the folder of the run is not where it was" in said
        assert said.rstrip().endswith(
            "  docs: https://tessera-spmd.github.io/tessera/errors/T504.html"
        )
        assert not folder.exists()


@pytest.mark.full
def test_a_checkpoint_that_is_deleted_under_way_costs_its_steps_alone(
    tmp_path, at_step
):
    """The run writes the next one, and what resumes takes the newest that is left."""
    folder = tmp_path / "run"
    checkpoints, deleted = folder / "checkpoints", []

    def delete() -> None:
        for step in complete_steps(checkpoints):
            shutil.rmtree(checkpoints / str(step), ignore_errors=True)
            deleted.append(step)

    at_step(4, delete)
    given = (*SMALL, f"hydra.run.dir={folder}")
    assert train_here(*given, "training.steps=6") == 0
    assert deleted
    assert complete_steps(checkpoints) == [6, 5]
    shutil.rmtree(checkpoints / "6")
    assert train_here(*given, "training.steps=7") == 0
    assert [line["step"] for line in curve(folder)] == [*range(1, 8)]
