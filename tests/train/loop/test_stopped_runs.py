# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C, and a run that is told to stop: nothing is lost, and going on is exact."""

import dataclasses
import io
import json
import os
import queue
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from tessera.foundations.config_files import configs_dir
from tessera.train.config.command_line import compose
from tessera.train.loop import train
from tessera.train.loop.console import Console
from tessera.train.loop.metrics import MetricWriter
from tessera.train.loop.run_folder import open_run_folder
from tessera.train.loop.train_state import TrainState
from tessera.train.loop.training_loop import Callbacks, Trainer
from tests.train.loop.short_runs import (
    STEPS,
    Ran,
    short_run,
    with_program_of,
)


@pytest.fixture
def ran() -> Ran:
    return short_run()


class Interrupted:
    """A compiled function, with Ctrl-C in the middle of some of its calls."""

    def __init__(self, function: Any, *calls: int) -> None:
        self.function, self.calls, self.count = function, calls, 0
        self.compile = function.compile

    def __call__(self, *args: Any) -> Any:
        self.count += 1
        results = self.function(*args)
        if self.count in self.calls:
            os.kill(os.getpid(), signal.SIGINT)
        return results


class InterruptedWriter(MetricWriter):
    """Has Ctrl-C come while the numbers of step 8 are written."""

    def write(self, step: int, values: Any) -> None:
        if step == 8:
            os.kill(os.getpid(), signal.SIGINT)
        super().write(step, values)


@pytest.mark.full
def test_ctrl_c_leaves_the_state_and_going_on_is_exact(ran, tmp_path):
    """In a step, in an evaluation, where numbers are written, in the last step."""
    run = with_program_of(ran, ran.run.config)
    vars(run)["step"] = Interrupted(ran.run.step, 3, STEPS)
    vars(run)["evaluate"] = Interrupted(ran.run.evaluate, 2)
    folder, left = open_run_folder(tmp_path, ""), list[int]()
    with (
        InterruptedWriter(folder) as writer,
        Console(None, stream=io.StringIO(), terminal=False) as console,
    ):
        trainer = Trainer(run, run.load_data(), console, writer)
        while True:
            try:
                state = trainer.train()
                break
            except KeyboardInterrupt:
                at = trainer.position
                assert at is not None
                assert int(at.state.step) == at.step  # none of it was donated
                left.append(at.step)
    assert left == [3, 5, left[2], STEPS]
    assert left[2] in (8, 9, 10)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_same(state, tmp_path, ran)


@pytest.mark.full
def test_a_run_that_is_told_to_stop_ends_where_it_is_and_can_go_on(ran, tmp_path):
    answers = iter([True] * 6 + [False] + [True] * 100)
    run, folder = with_program_of(ran, ran.run.config), open_run_folder(tmp_path, "")
    with (
        MetricWriter(folder) as writer,
        Console(folder.log, stream=io.StringIO(), terminal=False) as console,
    ):
        trainer = Trainer(
            *(run, run.load_data(), console, writer),
            callbacks=Callbacks(should_continue=lambda: next(answers)),
        )
        # Five steps, and one of two batches of the evaluation after them.
        assert int(trainer.train().step) == 5
        state = trainer.train()
    assert_same(state, tmp_path, ran)
    assert (
        "the run is stopped after step 5 of 12: it keeps no" in folder.log.read_text()
    )


@pytest.mark.parametrize(
    ("override", "cause"),
    [
        ("runtime.max_run_time=0.001", "runtime.max_run_time=0.001 is over"),
        ("runtime.preemption_notice=aws", "it ends"),
    ],
)
def test_settings_stop_a_run_as_sigterm_does(monkeypatch, override, cause):
    causes = queue.SimpleQueue[str]()
    watchdog = SimpleNamespace(subscribe=lambda _: None)
    here = SimpleNamespace(request_stop=causes.put, watchdog=watchdog)
    monkeypatch.setattr(train, "join", lambda *_: nullcontext(here))
    stopped = lambda *_: causes.get(timeout=240)  # noqa: E731
    monkeypatch.setattr(train, "train", lambda *_: causes.put(f"first: {stopped()}"))
    monkeypatch.setitem(train.CLOUDS, "aws", lambda: "it ends")
    train.run(compose([override], configs_dir()))
    assert causes.get(timeout=240) == f"first: {cause}"


def assert_same(state: TrainState, folder: Path, ran: Ran) -> None:
    """Bit for bit, without what depends on the clock."""
    for one, two in zip(
        jax.tree.leaves(state), jax.tree.leaves(ran.state), strict=True
    ):
        assert np.asarray(one).tobytes() == np.asarray(two).tobytes()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    other = dataclasses.replace(ran, lines=[*map(json.loads, lines)])
    assert other.numbers == ran.numbers
