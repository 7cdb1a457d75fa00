# SPDX-License-Identifier: Apache-2.0
"""Clocks that are set during a run change neither its curve nor its goodput."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tessera.records.events import read_events
from tessera.records.goodput import goodput_of
from tests.curves import curve

ROOT = Path(__file__).parents[2]
SETTINGS = (
    *("model.d_model=32", "model.num_layers=1", "model.num_heads=2"),
    *("model.num_kv_heads=1", "model.head_dim=16", "model.mlp_dim=64"),
    *("model.mesh_shape=[[2],[fsdp]]", "runtime.platform=cpu"),
    *("runtime.max_run_time=3600", "runtime.step_deadline=600"),
    *("data=synthetic", "data.synthetic.tokens=20000", "data.synthetic.vocab_size=64"),
    *("training.sequence_length=16", "training.micro_batch_size=2"),
    *("training.steps=8", "training.sample_length=0", "training.report=false"),
    *("training.validate_every=4", "training.validation_batches=1"),
    *("training.checkpoint_every=2", "training.log_every=1"),
    "optimizer.warmup_steps=2",
)


@pytest.mark.full
def test_clocks_that_are_set_change_no_number(tmp_path):
    def train(program: str) -> None:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "tessera.launch", "--nprocs=2", program),
                *(*SETTINGS, f"hydra.run.dir={tmp_path / Path(program).stem}"),
                f"runtime.compile_cache={tmp_path / 'compiled'}",
            ],
            cwd=ROOT,
            env={k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
            | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stdout

    train("run_training.py")
    begin = time.monotonic()
    train("tests/faults/clock_run.py")
    seconds = time.monotonic() - begin
    assert curve(tmp_path / "clock_run") == curve(tmp_path / "run_training")
    events = [*read_events(tmp_path / "clock_run/events.jsonl")]
    times = [event["time"] for event in events]
    assert max(times) - min(times) > 290, "the clock was set"
    goodput = goodput_of(events)
    assert 0 < goodput.total_seconds < seconds
    assert min(goodput.seconds.values()) >= 0
    assert goodput.seconds["step"] > 0
