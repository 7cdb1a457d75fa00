# SPDX-License-Identifier: Apache-2.0
"""Which steps are traced, and what is written of a step's communication."""

import json

import jax
import jax.numpy as jnp
import pytest

from tessera.errors import OutputPathError
from tessera.graph.function import function
from tessera.graph.profile import profile
from tessera.training.profiling import Window, write_profile


@pytest.fixture
def calls(monkeypatch):
    """The calls of JAX's profiler, which is not started."""
    made = []
    monkeypatch.setattr(
        jax.profiler, "start_trace", lambda *a, **k: made.append(("start", a, k))
    )
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: made.append("stop"))
    return made


def traced_steps(steps, calls, folder):
    """Which steps begin while the trace runs."""
    window, inside, running = Window(folder, steps), [], False
    for step in range(1, steps + 1):
        window.before(step, lambda: calls.append("drain"))
        running = [c for c in calls if c != "drain"][-1:] not in ([], ["stop"])
        if running:
            inside.append(step)
    window.close()
    return inside


@pytest.mark.parametrize(
    ("steps", "inside"),
    [(100, [3, 4, 5]), (5, [3, 4, 5]), (4, [3, 4]), (3, [3]), (2, [2]), (1, [1])],
)
def test_a_few_early_steps_are_traced(steps, inside, calls, tmp_path):
    assert traced_steps(steps, calls, tmp_path) == inside
    assert calls.count("stop") == 1
    (start,) = [call for call in calls if call[0] == "start"]
    assert start == ("start", (str(tmp_path),), {"create_perfetto_trace": True})


def test_steps_in_flight_are_waited_for_on_both_sides(calls, tmp_path):
    traced_steps(100, calls, tmp_path)
    names = [call if isinstance(call, str) else call[0] for call in calls]
    assert names == ["drain", "start", "drain", "stop"]


def test_a_trace_that_never_began_is_not_stopped(calls, tmp_path):
    Window(tmp_path, 10).close()
    assert calls == []


def test_the_profile_of_a_step_is_written_as_text_and_as_json(tmp_path):
    report = profile(function(lambda x: x @ x), jnp.ones((8, 8)))
    folder = tmp_path / "a" / "profile"
    write_profile(folder, report)
    assert (folder / "collectives.txt").read_text() == f"{report.as_text()}\n"
    figures = json.loads((folder / "collectives.json").read_text())
    assert figures == report.as_json()
    assert figures["matmul_flops"] == 2 * 8**3


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    report = profile(function(lambda x: x + 1), jnp.ones(()))
    (tmp_path / "profile").write_text("")
    with pytest.raises(OutputPathError) as caught:
        write_profile(tmp_path / "profile", report)
    assert str(caught.value) == (
        "[T504] the profile cannot be written\n"
        f"  got: {tmp_path}/profile: File exists\n"
        "  fix: make room there, or set training.profile_communication=false\n"
        "  docs: docs/errors/T504.md"
    )
