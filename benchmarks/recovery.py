# SPDX-License-Identifier: Apache-2.0
"""How long a run takes from a killed rank to its next step, by phases, and its goodput.

A run of ``tiny`` in two processes, under ``tessera launch --max-restarts``. One rank
after another is killed by SIGKILL at a step in the middle of two checkpoints. Each
recovery has these phases:

- detect: from the kill until the launcher has seen it;
- restart: until the first process of the next attempt begins;
- start: imports, rendezvous, data;
- compile: tracing, and what the persistent cache does not have;
- restore: reading the checkpoint, and placing it;
- first step: until the metrics of the first step after the checkpoint are written.

    python benchmarks/recovery.py [--quick] [--json PATH] [--kills N]
"""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import report

from tessera.train.records.events import Event, read_events
from tessera.train.records.goodput import goodput_of

ROOT = Path(__file__).parents[1]
KILLS, QUICK_KILLS = 6, 1
EVERY, STEPS_BETWEEN_KILLS = 20, 50
LIMIT_S = 600.0
PHASES = ("detect", "restart", "start", "compile", "restore", "first step")


class Launched:
    """A run under its launcher; what it says is kept with the time of each line."""

    def __init__(self, folder: Path, cache: Path, kills: int) -> None:
        steps = STEPS_BETWEEN_KILLS * (kills + 1)
        self.lines: list[tuple[float, str]] = []
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tessera.train.commands.launch", "--nprocs=2"),
                *(f"--max-restarts={kills}", str(ROOT / "run_training.py")),
                *("model=tiny", "model.mesh_shape=[[2,1],[fsdp,tp]]"),
                *("runtime.platform=cpu", f"runtime.compile_cache={cache}"),
                *("data=synthetic", "data.synthetic.tokens=200000"),
                *("training.log_every=1", f"training.checkpoint_every={EVERY}"),
                *("training.resume=auto", "training.validate_every=0"),
                *(f"training.steps={steps}", "training.sample_length=0"),
                f"hydra.run.dir={folder}",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder.parent,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)},
        )
        self._said = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._said:
                self.lines.append((time.time(), line))
                self._said.notify_all()

    def wait_for(self, pattern: str, after: int = 0) -> tuple[int, float]:
        """The number of the first line that has a pattern, and when it was said."""

        def find() -> tuple[int, float] | None:
            for number, (at, line) in enumerate(self.lines[after:], after):
                if re.search(pattern, line):
                    return number, at
            return None

        with self._said:
            self._said.wait_for(lambda: find() is not None, LIMIT_S)
            found = find()
        if found is None:
            self.process.kill()
            raise SystemExit("".join(line for _, line in self.lines))
        return found

    def rank(self, number: int) -> int:
        """The process of a rank."""
        mine = {f"TESSERA_LAUNCHER={self.process.pid}".encode()}
        mine.add(f"RANK={number}".encode())
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mine <= {*environ.read_bytes().split(b"\0")}:
                    return int(environ.parent.name)
            except OSError:
                continue
        raise SystemExit(f"rank {number} is not there")


def kill_and_recover(run: Launched, number: int, after: int) -> tuple[int, float]:
    """Kill a rank between two checkpoints; where the log is then, and when it was."""
    step = STEPS_BETWEEN_KILLS * (number + 1) - EVERY // 2
    at, _ = run.wait_for(rf"\] .*step {step}/", after)
    victim = run.rank(number % 2)
    killed = time.time()
    os.kill(victim, signal.SIGKILL)
    return at, killed


def recovery(
    run: Launched, events: Sequence[Event], attempt: int, after: int, killed: float
) -> dict[str, float]:
    """The seconds of each phase of one recovery."""
    own = [event for event in events if event["attempt"] == attempt]
    seen = run.wait_for(r"\[launch\] rank \d.*killed by SIGKILL", after)
    (start,) = (event for event in own if event["event"] == "start")
    begun = start["process_start"]
    phases = [event for event in own if event["event"] == "phase"]
    compiled = next(e for e in phases if e["phase"] == "compile")
    last = next(e for e in phases if e["phase"] == "step")
    _, first_step = run.wait_for(
        rf"step {start['resumed_step'] + 1}/", run.wait_for(r"restart \d", seen[0])[0]
    )
    compiling = sum(
        event["seconds"]
        for event in phases
        if event["phase"] == "compile" and event["time"] < last["time"]
    )
    seconds = {
        "detect": seen[1] - killed,
        "restart": begun - seen[1],
        "start": compiled["time"] - begun,
        "compile": compiling,
        "restore": last["time"] - compiled["time"] - compiling,
        "first step": first_step - last["time"],
    }
    return seconds | {"all": first_step - killed}


def measure(kills: int) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The tables: recoveries by phases, and the goodput of the run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        run = Launched(folder, Path(name) / "cache", kills)
        marks, after = [], 0
        for number in range(kills):
            report.progress(f"kill {number + 1} of {kills}")
            after, killed = kill_and_recover(run, number, after)
            marks.append((after, killed))
            after, _ = run.wait_for(r"restart \d", after)
        if code := run.process.wait(LIMIT_S):
            raise SystemExit(f"{code}: " + "".join(line for _, line in run.lines))
        events = [*read_events(folder / "events.jsonl")]
        losses = (folder / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line)["step"] for line in losses if '"loss"' in line]
        assert steps == [*range(1, STEPS_BETWEEN_KILLS * (kills + 1) + 1)]
    found = [recovery(run, events, i + 1, *mark) for i, mark in enumerate(marks)]
    rows = [
        {
            "phase": phase,
            "median s": round(statistics.median(each[phase] for each in found), 2),
            "most s": round(max(each[phase] for each in found), 2),
        }
        for phase in (*PHASES, "all")
    ]
    yield f"recoveries from {kills} kills", rows
    goodput = goodput_of(events)
    yield (
        f"wall time of {goodput.total_seconds:.0f} s, {len(steps)} steps",
        [
            {"cause": c, "s": round(s, 2), "share": round(goodput.shares[c], 3)}
            for c, s in goodput.seconds.items()
        ],
    )


def main() -> None:
    """Measure, and show the tables."""
    parser = report.parser(__doc__)
    parser.add_argument("--kills", type=int)
    options = parser.parse_args()
    kills = options.kills or (QUICK_KILLS if options.quick else KILLS)
    report.show_all(dict(measure(kills)), options.json)


if __name__ == "__main__":
    main()
