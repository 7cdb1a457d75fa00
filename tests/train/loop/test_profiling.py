# SPDX-License-Identifier: Apache-2.0
"""Which steps are measured, and what is written of them."""

import logging
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tessera.debug.profile_report import of_program
from tessera.errors import OutputPathError
from tessera.graph.jit import function
from tessera.train.loop import profiling
from tessera.train.loop.profiling import Window, write_profile

SQUARE = function(lambda x: x @ x)
X = jnp.ones((8, 8))


def report():
    return of_program(SQUARE.compile(X))


def window_of(folder, wait=1, warmup=1, active=3):
    return Window(folder, report, wait=wait, warmup=warmup, active=active)


def run(window, steps, first=1, said=None):
    """A loop of steps, as the trainer has it."""
    for step in range(first, first + steps):
        window.before(step, lambda: None if said is None else said.append("drain"))
        if said is not None:
            said.append(step)
        SQUARE(X).block_until_ready()
    window.close()


@pytest.fixture
def said(monkeypatch):
    """The calls of JAX's profiler, which is not started, among the steps."""
    said = []
    monkeypatch.setattr(
        jax.profiler, "start_trace", lambda folder, **_: said.append(str(folder))
    )
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: said.append("stop"))
    return said


@pytest.fixture
def heard():
    """What the log of a run says."""
    heard = []

    class Hearing(logging.Handler):
        def emit(self, record):
            heard.append(record.getMessage())

    logger, handler = logging.getLogger("tessera"), Hearing()
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield heard
    logger.removeHandler(handler)
    logger.setLevel(before)


def steps_of(said, folder):
    """The steps during the trace in a folder."""
    begin = said.index(str(folder))
    end = said.index("stop", begin)
    return [each for each in said[begin:end] if isinstance(each, int)]


@pytest.mark.parametrize(
    ("steps", "schedule", "inside"),
    [
        (100, (1, 1, 3), [3, 4, 5]),
        (5, (1, 1, 3), [3, 4, 5]),
        (4, (1, 1, 3), [3, 4]),
        (100, (0, 0, 1), [1]),
        (100, (5, 0, 2), [6, 7]),
        (100, (0, 4, 2), [5, 6]),
    ],
)
def test_the_steps_of_the_schedule_are_traced(steps, schedule, inside, said, tmp_path):
    run(window_of(tmp_path, *schedule), steps, said=said)
    assert steps_of(said, tmp_path) == inside


def test_the_steps_of_a_run_that_goes_on_are_counted_from_its_first(said, tmp_path):
    run(window_of(tmp_path), 10, first=701, said=said)
    assert steps_of(said, tmp_path) == [703, 704, 705]


def test_the_warm_up_is_traced_elsewhere_and_steps_in_flight_are_waited_for(
    said, tmp_path
):
    run(window_of(tmp_path, wait=1, warmup=2, active=1), 6, said=said)
    assert said[:3] == [1, "drain", said[2]]
    elsewhere = said[2]
    assert elsewhere != str(tmp_path)
    assert said[3:] == [2, 3, "drain", "stop", str(tmp_path), 4, "drain", "stop", 5, 6]


@pytest.mark.slow(reason="a trace holds every program of the process")
def test_the_measured_steps_are_reported_once(tmp_path, heard):
    run(window_of(tmp_path), 8)
    text = (tmp_path / "communication.txt").read_text()
    assert "measured on cpu, per device and execution: mean of 3 executions" in text
    assert "FLOPs: 1.02 k in matmuls" in text
    first, second = heard
    assert first == text.removesuffix("\n")
    assert second == (
        f"the trace is in {tmp_path}: xprof and TensorBoard open the folder, Perfetto "
        "the file perfetto_trace.json.gz"
    )
    # For xprof and TensorBoard, and for Perfetto; of the measured steps alone.
    assert len(list(tmp_path.rglob("plugins/profile/*/*.xplane.pb"))) == 1
    assert len(list(tmp_path.rglob("perfetto_trace.json.gz"))) == 1


@pytest.mark.slow(reason="a trace holds every program of the process")
def test_a_run_that_ends_in_the_window_reports_the_steps_that_it_had(tmp_path):
    run(window_of(tmp_path), 3)
    text = (tmp_path / "communication.txt").read_text()
    assert "mean of 1 executions" in text


def test_a_run_that_ends_before_it_says_so(said, tmp_path, heard):
    run(window_of(tmp_path / "profile"), 2, said=said)
    assert str(tmp_path / "profile") not in said
    assert heard == [
        "nothing was profiled: the run had 2 steps and lets the first 2 pass"
    ]
    assert not (tmp_path / "profile").exists()


def test_a_window_that_never_began_ends_in_silence(said, tmp_path, heard):
    window_of(tmp_path).close()
    assert said == []
    assert heard == []


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "profile").write_text("")
    with pytest.raises(OutputPathError) as caught:
        write_profile(tmp_path / "profile", report())
    assert str(caught.value) == (
        "[T504] the profile cannot be written\n"
        f"  got: {tmp_path}/profile: File exists\n"
        "  fix: make room there, or set training.profile_communication=false\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T504.html"
    )


def test_measured_seconds_are_at_the_last_step_that_was_profiled(tmp_path, monkeypatch):
    spent = {("fsdp", "tp"): SimpleNamespace(seconds=0.5)}
    measured: Any = SimpleNamespace(communication=spent)
    report: Any = SimpleNamespace(measured=measured, as_text=lambda: "")
    report.from_trace = lambda *_: report
    monkeypatch.setattr(profiling, "write_profile", lambda *_: None)
    monkeypatch.setattr(profiling.jax.profiler, "start_trace", lambda *_, **__: None)
    monkeypatch.setattr(profiling.jax.profiler, "stop_trace", lambda: None)
    written = []
    window = Window(
        tmp_path,
        lambda: report,
        wait=1,
        warmup=0,
        active=2,
        write=lambda *line: written.append(line),
    )
    for step in range(11, 20):
        window.before(step, lambda: None)
    window.close()
    assert written == [(13, {"communication_seconds/fsdp-tp": 0.5})]
