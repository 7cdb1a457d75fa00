# SPDX-License-Identifier: Apache-2.0
"""What ``benchmarks/peer_pipelines.py`` compares; how long steps take is not tested."""

import importlib
import io
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def modules():
    """The program, and the setting of its contestants."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        before, path = set(sys.modules), list(sys.path)
        program = importlib.import_module("peer_pipelines")
        yield program, importlib.import_module("pipeline_setting")
        sys.path[:] = path
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None) or ""
            if FOLDER in Path(file).parents:
                del sys.modules[name]


@pytest.fixture
def small(modules, tmp_path):
    """A small model, with its reference."""
    _, setting = modules
    found = setting.Setting(f"{tmp_path}/reference.npz", rows=8, width=4, hidden=8)
    setting.write_reference(found)
    return found


def test_stages_have_equal_layers(modules):
    program, setting = modules
    for schedule, chunks in program.CHUNKS.items():
        each = setting.Setting("").layers_of_stage(schedule)
        assert each * chunks * 4 == 8


def answers(setting, small, monkeypatch, step):
    """What a contestant answers to two questions."""
    questions = [["1f1b", "none", 1], ["1f1b", "none", 2]]
    lines = "\n".join(json.dumps(each) for each in questions)
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    out, made = io.StringIO(), []

    def make(*case):
        made.append(case)
        return lambda: step(*small.arrays()), 7

    setting.serve(out, small, "1.0", make)
    assert made == [("1f1b", "none")], "compiled once"
    version, *found = map(json.loads, out.getvalue().splitlines())
    assert version == {"version": "1.0"}
    return found


def test_a_contestant_says_what_its_steps_took(modules, small, monkeypatch):
    _, setting = modules
    step = jax.value_and_grad(setting.loss_of)
    first, second = answers(setting, small, monkeypatch, step)
    assert len(first["seconds"]) == 1
    assert len(second["seconds"]) == 2
    assert first["temporaries"] == 7
    assert max(first["apart"] + second["apart"]) < 1e-6


def test_a_contestant_that_computes_something_else_ends_the_run(
    modules, small, monkeypatch
):
    program, setting = modules

    def step(*arrays):
        loss, gradients = jax.value_and_grad(setting.loss_of)(*arrays)
        gradients[3]["up"] = np.float32(1.001) * gradients[3]["up"]
        return loss, gradients

    first, _ = answers(setting, small, monkeypatch, step)
    assert first["apart"][1] == pytest.approx(1e-3, rel=1e-3)

    class Process:
        def ask(self, request):
            assert request == ["1f1b", "none", 1]
            return first

    with pytest.raises(SystemExit, match="peer, 1f1b: not what plain JAX computes"):
        program.Case("peer", Process(), "1f1b", "none")
