# SPDX-License-Identifier: Apache-2.0
"""Runs under real engines: skipped unless ``make test-engines`` names their Python."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_launch import descendants

ROOT = Path(__file__).parents[2]
# The environment that has torchrun; Tessera's own has no PyTorch.
ENGINES = os.environ.get("TESSERA_ENGINES_BIN", "")
LIMIT = 400.0
# Long enough for an agent to come back before the end, which takes it ten seconds.
STEPS = 600
# Where nothing has to be waited for but a stop.
FEWER = 300
# Two and three devices share 24 rows; a part has three of them.
SETTINGS = (
    *("model.d_model=32", "model.num_layers=1", "model.num_heads=2"),
    *("model.num_kv_heads=1", "model.head_dim=16", "model.mlp_dim=32"),
    *("data=synthetic", "data.synthetic.tokens=100000", "data.synthetic.vocab_size=64"),
    *("training.sequence_length=16", "training.sample_length=0"),
    *("training.log_every=1", "optimizer.warmup_steps=0"),
    *("training.validate_every=200", "training.validation_sequences=24"),
    *("training.checkpoint_every=20", "training.global_batch_size=24"),
    *("training.numerics=deterministic", "model.mesh_shape=[[-1],[dp]]"),
    *("runtime.platform=cpu", "training.resume=auto"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not ENGINES and "engines" in item.path.parts:
            item.add_marker(pytest.mark.skip(reason="make test-engines runs it"))


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled programs of all runs."""
    return tmp_path_factory.mktemp("compiled", numbered=False)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> list[Any]:
    """The curve of one process of two devices, to which nothing happens."""
    return undisturbed_curve(tmp_path_factory.mktemp("undisturbed"), cache, STEPS)


@pytest.fixture(scope="session")
def undisturbed_fewer(
    tmp_path_factory: pytest.TempPathFactory, cache: Path
) -> list[Any]:
    """The same of a run of FEWER steps."""
    return undisturbed_curve(tmp_path_factory.mktemp("fewer"), cache, FEWER)


def undisturbed_curve(folder: Path, cache: Path, steps: int) -> list[Any]:
    two = "model.mesh_shape=[[2],[dp]]"
    subprocess.run(
        [*command(folder, cache, steps), two],
        env=environment(),
        check=True,
        capture_output=True,
        timeout=LIMIT,
    )
    return curve(folder)


def command(folder: Path, cache: Path, steps: int = STEPS) -> list[str]:
    program = [sys.executable, str(ROOT / "run_training.py")]
    return [*program, *settings(folder, cache, steps)]


def settings(folder: Path, cache: Path, steps: int) -> list[str]:
    places = f"hydra.run.dir={folder}", f"runtime.compile_cache={cache}"
    return [*SETTINGS, *places, f"training.steps={steps}"]


def environment() -> dict[str, str]:
    """The environment of a run, without what tests set for themselves."""
    mine = ("JAX_", "XLA_", "TESSERA_", "SLURM_", "OMPI_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(mine)}
    return {**kept, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


def curve(folder: Path) -> list[dict[str, float]]:
    """What a run learned, without what depends on the clock."""
    names = "step", "loss", "val_loss", "grad_norm", "learning_rate"
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k in names} for line in lines]


def num_lines(folder: Path) -> int:
    """How many lines of metrics a run has written."""
    metrics = folder / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def wait_for(condition: Callable[[], bool], log: Path) -> None:
    until = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < until, log.read_text()[-5000:]
        time.sleep(0.1)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and those that it started, as when their machine fails."""
    for pid in [process.pid, *descendants(process.pid)]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()
