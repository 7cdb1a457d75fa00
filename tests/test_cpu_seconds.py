# SPDX-License-Identifier: Apache-2.0
"""The limit on the CPU seconds of a fast test, and what a gate leaves to the night."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import cpu_seconds

ROOT = Path(__file__).parents[1]

TESTS = """
import gc
import time

import pytest

def spend(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

@pytest.fixture(scope="module")
def shared():
    spend(0.4)

def test_quick(): pass

def test_that_a_long_collection_interrupts():
    def lasts(phase, info): spend(0.4 * (phase == "start"))
    gc.callbacks.insert(1, lasts)
    gc.collect()
    gc.callbacks.remove(lasts)

def test_with_what_the_module_shares(shared): pass
def test_too_slow(): spend(0.4)
@pytest.mark.slow(reason="so it is")
def test_slow_with_a_reason(): spend(0.4)
@pytest.mark.full
def test_full(): spend(0.4)
"""


@pytest.fixture
def run(tmp_path):
    """A session of pytest whose limits are 0.2 and 60 s, on any processor."""

    def start(*arguments):
        (tmp_path / "test_it.py").write_text(TESTS)
        (tmp_path / "conftest.py").write_text(
            "from tests import cpu_seconds\n"
            "cpu_seconds.LIMIT, cpu_seconds.SLOW_LIMIT = 0.2, 60\n"
            "cpu_seconds.ENFORCED = True\n"
            "cpu_seconds.REFERENCE = 1000.0\n"
        )
        command = [sys.executable, "-m", "pytest", "-n0", "-p", "tests.cpu_seconds"]
        command += ["-o", "markers=full\nslow", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        result = subprocess.run(
            command, cwd=tmp_path, env=environment, text=True, capture_output=True
        )
        return result.stdout

    return start


@pytest.mark.slow(reason="it starts a session of pytest")
def test_a_fast_test_that_takes_too_long_fails(run):
    said = run("-m", "not full")
    assert "1 failed, 4 passed, 1 deselected" in said, said
    assert "test_too_slow: 0.4 CPU seconds; the limit is 0.2" in said


@pytest.mark.full
def test_what_begins_too_late_is_skipped_and_said(run):
    said = run("--stop-after=0")
    assert "6 skipped" in said, said
    assert "left to the nightly run" in run("--stop-after=0", "-rs")


def test_a_slow_processor_is_no_problem_of_the_test(monkeypatch):
    monkeypatch.setattr(cpu_seconds, "reference_seconds", lambda: 2.0)
    monkeypatch.setattr(cpu_seconds, "REFERENCE", 1.0)
    assert cpu_seconds.problem(2.9, 0.0, slow=False) is None
    assert "3.1 CPU seconds" in cpu_seconds.problem(3.1, 0.0, slow=False)


def test_what_a_module_shares_has_a_limit_of_its_own(monkeypatch):
    monkeypatch.setattr(cpu_seconds, "reference_seconds", lambda: 0.0)
    assert cpu_seconds.problem(0.1, 19.9, slow=False) is None
    assert "its module took 20.1" in cpu_seconds.problem(0.1, 20.1, slow=False)
