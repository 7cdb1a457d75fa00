# SPDX-License-Identifier: Apache-2.0
"""``tessera train`` of ``tiny``: settings, resumption, the CPU's losses, a profile."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_steps.rows import OUT, QUICK, WORK, emit

STEPS, HALF = (6, 3) if QUICK else (40, 20)
COMMON = (
    "model=tiny",
    f"training.steps={STEPS}",
    "training.log_every=1",
    "training.report=false",
    "training.validate_every=0",
    "training.validation_sequences=8",
    "training.sample_length=0",
)
RUNS: dict[str, list[str]] = {
    "f32": [f"training.checkpoint_every={HALF}"],
    "f32 again": [],
    "deterministic": [
        "training.numerics=deterministic",
        f"training.checkpoint_every={HALF}",
    ],
    "bf16": ["training.mixed_precision=bf16"],
    "fp8": ["training.mixed_precision=fp8"],
    "offload": ["training.offload_optimizer=true"],
    "CPU": ["runtime.platform=cpu"],
}
# A file of a trace that is larger stays on the machine.
MOST_BYTES = 20_000_000


@dataclass
class Trained:
    """What a run left."""

    name: str
    exit_code: int
    seconds: float
    last: str
    losses: dict[int, float] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)

    def emit(self) -> None:
        """A row."""
        late = self.times[3:]
        emit(
            "tiny",
            run=self.name,
            exit_code=self.exit_code,
            seconds=self.seconds,
            steps=len(self.losses),
            first=next(iter(self.losses.values()), None),
            final=next(reversed(self.losses.values()), None),
            step_ms=round(1e3 * statistics.median(late), 3) if late else None,
            error=self.last if self.exit_code else None,
        )


def train(name: str, settings: list[str]) -> Trained:
    """One run in a process of its own."""
    folder = WORK / f"tiny-{name.replace(' ', '-')}"
    shutil.rmtree(folder, ignore_errors=True)
    words = [*COMMON, "training.checkpoint_every=null", *settings]
    words = list({word.split("=")[0]: word for word in words}.values())
    command = [sys.executable, "-m", "tessera", "train", *words]
    environment = {"JAX_PLATFORMS": "cpu"} if name == "CPU" else {}
    start = time.perf_counter()
    done = subprocess.run(
        [*command, f"hydra.run.dir={folder}"],
        cwd=WORK,
        env=os.environ | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    print(f"===== {name}\n{done.stdout[-4000:]}", flush=True)
    spent = round(time.perf_counter() - start, 1)
    found = Trained(name, done.returncode, spent, done.stdout[-300:])
    path = folder / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        if "loss" in row:
            found.losses[row["step"]] = row["loss"]
            found.times.append(row["step_seconds"])
    found.emit()
    return found


def train_all(runs: dict[str, list[str]]) -> dict[str, Trained]:
    """All runs at once on a GPU; they share it, so their times are no measure."""
    with ThreadPoolExecutor(1 if QUICK else len(runs)) as pool:
        return dict(zip(runs, pool.map(train, runs, runs.values()), strict=True))


def compared(what: str, one: Trained, other: Trained, after: int = 0) -> None:
    """A row: are losses of the same steps equal, and how far apart are they?"""
    both = [s for s in one.losses if s in other.losses and s > after]
    ratios = [abs(one.losses[s] / other.losses[s] - 1) for s in both]
    same = bool(both) and all(one.losses[s] == other.losses[s] for s in both)
    most = max(ratios, default=None)
    emit("tiny", run=what, steps=len(both), same_bits=same, apart=most)


def settings() -> None:
    """Runs of each setting beside f32, and two that resume."""
    names = ("f32", "deterministic") if QUICK else tuple(RUNS)
    found = train_all({name: RUNS[name] for name in names})
    for name in names[1:]:
        compared(f"{name} beside f32", found[name], found["f32"])
    resumed = {
        f"{name} resumed": [*RUNS[name], f"training.resume={checkpoint(name)}"]
        for name in ("f32", "deterministic")
    }
    for name, run in train_all(resumed).items():
        whole = found[name.removesuffix(" resumed")]
        compared(f"{name} beside the whole run", run, whole, HALF)


def checkpoint(name: str) -> Path:
    """The one in the middle of a run."""
    return WORK / f"tiny-{name}/checkpoints/{HALF}"


def profile() -> None:
    """A profiled run; its files come back, to see what a trace of a GPU has."""
    train("profile", ["training.profile_communication=true"])
    folder = WORK / "tiny-profile/profile"
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = str(path.relative_to(folder))
            found[name] = path.stat().st_size
            if found[name] <= MOST_BYTES:
                target = OUT / "profile" / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)
    emit("profile", files=found)
