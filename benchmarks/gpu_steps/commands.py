# SPDX-License-Identifier: Apache-2.0
"""Programs of Tessera's own, as a user runs them."""

import json
import os
import subprocess
import sys
import time

from gpu_steps import facts
from gpu_steps.rows import OUT, QUICK, ROOT, WORK, emit


def run(table: str, arguments: list[str], seconds: float, **environment: str) -> None:
    """Run Python with these arguments; its exit code and its last lines are a row."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        text, _ = process.communicate(timeout=600 if QUICK else seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        text, _ = process.communicate()
        emit(table, error=f"not done in {seconds} s", last=text[-600:])
    else:
        spent = round(time.perf_counter() - start, 1)
        emit(table, exit_code=process.returncode, seconds=spent, last=text[-600:])
    print(text[-20_000:], flush=True)


def doctor() -> None:
    """What Tessera says of this machine."""
    facts.machine()
    run("doctor", ["-m", "tessera", "doctor"], 25)


def calibrate() -> None:
    """The machine as a target to plan for, measured: ``measured.toml``."""
    options = ["--cpu-devices=1"] if QUICK else []
    arguments = ["benchmarks/calibrate.py", *options, str(OUT / "measured.toml")]
    run("calibrate", arguments, 55)


def fused_loss() -> None:
    """The fused loss beside full logits in bf16: memory and time."""
    path = WORK / "loss.json"
    path.unlink(missing_ok=True)
    dtype = "f32" if QUICK else "bf16"
    options = ["--quick", "--dtype", dtype, "--json", str(path)]
    run("fused_loss", ["benchmarks/loss.py", *options], 55)
    if path.exists():
        for row in json.loads(path.read_text())["rows"]:
            emit("fused_loss", **row)


def pytest_gpu() -> None:
    """The tests that are marked gpu; without one they skip."""
    options = ["-n0", "--collect-only"] if QUICK else ["-n6", "--dist=load"]
    arguments = ["-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", *options]
    files = sorted((ROOT / "tests").rglob("test_*on_gpu.py"))
    run(
        "pytest_gpu",
        [*arguments, *map(str, files)],
        125,
        JAX_PLATFORMS="cpu" if QUICK else "cuda,cpu",
        XLA_PYTHON_CLIENT_PREALLOCATE="false",
    )
