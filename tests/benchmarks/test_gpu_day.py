# SPDX-License-Identifier: Apache-2.0
"""``benchmarks/gpu_day.py``: rows are kept, and no step stops the rest."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAKE = """
import time
from gpu_steps.rows import emit, errors_kept

def fails():
    emit("fake", number=1)
    with errors_kept("fake", number=2):
        raise ValueError("within")
    raise SystemExit(3)

def hangs():
    emit("fake", number=3)
    time.sleep(60)

def works():
    emit("fake", number=4)
"""


@pytest.fixture(scope="module")
def gpu_day():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        before = set(sys.modules)
        yield importlib.import_module("gpu_day")
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in ("gpu_day", "gpu_steps"):
                del sys.modules[name]


@pytest.fixture
def day(gpu_day, tmp_path):
    (tmp_path / "fake_steps.py").write_text(FAKE)
    work = tmp_path / "work"
    return gpu_day.Day(tmp_path, work, budget=60, path=(str(tmp_path),))


def step(gpu_day, name, limit=30.0, **options):
    return gpu_day.Step(name, f"fake_steps:{name}", limit, 1, **options)


def test_a_step_that_fails_and_one_that_hangs_keep_their_rows(gpu_day, day):
    steps = [
        step(gpu_day, "fails"),
        step(gpu_day, "hangs", limit=0.5),
        step(gpu_day, "works"),
    ]
    results = gpu_day.run_steps(steps, day)
    assert [r.status for r in results] == ["exit 3", "out of time", "ok"]
    assert [[row["number"] for row in r.rows] for r in results] == [[1, 2], [3], [4]]
    assert results[0].rows[1]["error"] == "ValueError: within"
    kept = json.loads((day.out / "results.json").read_text())
    assert [r["rows"] for r in kept] == [r.rows for r in results]
    log = (day.out / "log.txt").read_text()
    assert log.index("===== fails") < log.index("in fails") < log.index("===== works")
    lines = gpu_day.table(results).splitlines()
    assert lines[0].startswith("fails: exit 3")
    assert lines[-1] == "fake: number=4"


def test_shared_steps_run_at_once_and_only_they_do_not_autotune(gpu_day, day):
    shared = [step(gpu_day, "works", shared=True), step(gpu_day, "fails", shared=True)]
    results = gpu_day.run_steps(shared, day)
    assert {r.name: r.status for r in results} == {"works": "ok", "fails": "exit 3"}
    flags = day.environment(shared[0], day.out / "rows").get("XLA_FLAGS", "")
    assert "--xla_gpu_autotune_level=0" in flags
    alone = day.environment(step(gpu_day, "works", memory=0.5), day.out / "rows")
    assert "autotune_level" not in alone.get("XLA_FLAGS", "")
    assert alone["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.5"
    assert (day.work / "cache").stat().st_mode & 0o777 == 0o700


def test_a_step_without_time_left_is_not_begun(gpu_day, day):
    result = gpu_day.run_step(step(gpu_day, "works"), day, left=0.4)
    assert (result.status, result.rows) == ("no time left", [])


def test_every_step_names_a_function(gpu_day):
    names = [step.name for step in gpu_day.STEPS]
    assert len(set(names)) == len(names)
    for each in gpu_day.STEPS:
        module, _, function = each.target.partition(":")
        path = ROOT / "benchmarks" / f"{module.replace('.', '/')}.py"
        assert f"\ndef {function}(" in path.read_text(), each.target
    options = gpu_day.options_of(["--steps", "trainer", "doctor"])
    assert [each.name for each in gpu_day.chosen(options)] == ["doctor", "trainer"]
    every = gpu_day.chosen(gpu_day.options_of([]))
    assert "predict" not in [each.name for each in every]


@pytest.mark.full
def test_quick_steps_run_on_a_cpu(tmp_path):
    names = ["attention_exact", "grouped_exact", "trainer"]
    command = [sys.executable, "benchmarks/gpu_day.py", "--quick", "--steps", *names]
    folders = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    done = subprocess.run(
        [*command, *folders], cwd=ROOT, capture_output=True, text=True, check=True
    )
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert {r["name"]: r["status"] for r in results} == dict.fromkeys(names, "ok")
    rows = [row for r in results for row in r["rows"]]
    assert {row["table"] for row in rows} == set(names)
    assert not [row for row in rows if "error" in row]
    assert all(row["ok"] for row in rows if row["table"] == "attention_exact")
    assert "attention_exact: ok" in done.stdout
