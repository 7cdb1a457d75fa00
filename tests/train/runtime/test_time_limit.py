# SPDX-License-Identifier: Apache-2.0
"""A run that ends before its queue ends it; `tests/faults/test_signals.py` has one."""

import os
import queue

import pytest

from tessera.train.runtime import time_limit as module
from tessera.train.runtime.launcher_protocol import launcher_variables
from tessera.train.runtime.time_limit import time_limit

ALIVE = 240.0


@pytest.fixture
def causes():
    return queue.SimpleQueue()


@pytest.fixture
def ages(monkeypatch):
    """How old each process is, by its number."""
    ages = {os.getpid(): 10.0}
    monkeypatch.setattr(module, "process_age", ages.__getitem__)
    return ages


def test_the_stop_is_requested_when_the_time_is_over(causes, ages):
    with time_limit(10.05, causes.put):
        assert causes.get(timeout=ALIVE) == "runtime.max_run_time=10.05 is over"
    assert causes.empty()


def test_a_process_that_is_too_old_already_is_to_stop_at_once(causes, ages):
    with time_limit(3.0, causes.put):
        assert causes.get(timeout=ALIVE) == "runtime.max_run_time=3 is over"


def test_without_a_limit_nothing_is_requested(causes):
    with time_limit(None, causes.put):
        pass
    assert causes.empty()


def test_a_run_that_is_done_before_requests_nothing(causes, ages):
    with time_limit(3600.0, causes.put):
        (timer,) = [t for t in module.threading.enumerate() if hasattr(t, "interval")]
        assert timer.interval == pytest.approx(3590.0)
    timer.join(ALIVE)
    assert not timer.is_alive()
    assert causes.empty()


def test_all_attempts_of_a_launcher_share_the_time(causes, ages, monkeypatch, tmp_path):
    """The queue knows one job, however often the launcher has started its ranks."""
    variables = {**launcher_variables(tmp_path, 1), "TESSERA_STATUS": "9"}
    for name, value in {**variables, "TESSERA_LAUNCHER": str(os.getppid())}.items():
        monkeypatch.setenv(name, value)
    ages[os.getppid()] = 100.0
    with time_limit(50.0, causes.put):
        assert causes.get(timeout=ALIVE) == "runtime.max_run_time=50 is over"
