# SPDX-License-Identifier: Apache-2.0
"""Layouts that the compiler of the target has seen, in processes of their own."""

import json
import sys

import pytest

from tessera.train.planner import verify as verify_module
from tessera.train.planner.layout import Layout
from tessera.train.planner.search import Candidate
from tessera.train.planner.step_time import Prediction
from tessera.train.planner.verify import verify

CAPACITY = 1000
WORDS = [
    "data=synthetic",
    "training.sequence_length=32",
    "training.global_batch_size=8",
    "runtime.target=cpu:2",
    "training.dry_run=true",
]


def candidate(seconds: float, axis: str = "fsdp") -> Candidate:
    found = Prediction(seconds, 0.0, 0.0, 0.0, 500, 1e9)
    return Candidate(Layout(((axis, 2),), int(seconds), 1), found, True)


def answers(monkeypatch, *figures):
    """Compilers that say so, in the order in which layouts are fast."""
    by_size = {f"training.micro_batch_size={n + 1}": f for n, f in enumerate(figures)}

    def compile_(words):
        return next(figure for word, figure in by_size.items() if word in words)

    monkeypatch.setattr(verify_module, "_compile", compile_)


def figures(memory: int, compute: float):
    return {"memory": memory, "compute": compute, "exposed": 0.0, "idle": 0.0}


def run(count: int, wanted: int = 2):
    candidates = [candidate(n + 1.0) for n in range(count)]
    return verify(candidates, [], CAPACITY, wanted=wanted, processes=1)


def test_what_the_compiler_says_orders_the_answer(monkeypatch):
    answers(monkeypatch, figures(900, 7.0), figures(800, 3.0))
    first, second = run(2)
    assert first.prediction.seconds == 3.0
    assert first.prediction.memory_bytes == 800
    assert first.prediction.compiled
    assert second.prediction.seconds == 7.0


def test_a_layout_that_does_not_fit_makes_room_for_the_next(monkeypatch):
    answers(monkeypatch, figures(2000, 1.0), figures(900, 2.0), figures(900, 3.0))
    found = run(3)
    assert [each.is_safe for each in found] == [True, True, False]
    assert found[2].prediction.memory_bytes == 2000


def test_not_more_are_compiled_than_are_wanted(monkeypatch):
    answers(monkeypatch, *[figures(900, 1.0)] * 5)
    assert len(run(5, wanted=2)) == 2


def test_an_error_is_a_reason_and_no_end(monkeypatch):
    refused = {"code": "T509", "error": "the program does not fit", "got": ""}
    answers(monkeypatch, refused, {"error": "exit code -9"}, figures(900, 1.0))
    found = run(3, wanted=1)
    assert found[0].is_safe
    assert {each.problem for each in found[1:]} == {
        *("[T509] the program does not fit", "exit code -9")
    }


def test_a_process_that_dies_is_reported(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    (found,) = run(1, wanted=1)
    assert not found.is_safe
    assert found.problem == "the compiler ended without an answer: exit code 1"


@pytest.mark.full
def test_a_process_compiles_a_step():
    found = verify([candidate(4.0)], WORDS, 10**9, wanted=1, processes=1)
    (each,) = found
    assert each.problem == ""
    assert each.is_safe
    assert 10**5 < each.prediction.memory_bytes < 10**8
    assert each.prediction.compute > 0


@pytest.mark.full
def test_a_refused_layout_says_its_code():
    words = [*WORDS, "training.sequence_length=33"]
    cp = candidate(4.0, "cp")
    (each,) = verify([cp], words, 10**9, wanted=1, processes=1)
    assert each.problem.startswith("[T503] ")
    assert json.dumps(each.problem)
