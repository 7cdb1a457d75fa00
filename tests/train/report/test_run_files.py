# SPDX-License-Identifier: Apache-2.0
"""What is read of a run's folder, also of one that was killed or changed by hand."""

import math
import os

import pytest

from tessera.errors import OutputPathError
from tessera.train.report.run_files import read_run
from tests.train.report.run_folders import make_run


def test_a_metric_is_read_by_step(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2.0, "mfu": 0.5}\n'
    )
    run = read_run(tmp_path)
    assert run.series == {"loss": {1: 2.5, 2: 2.0}, "mfu": {2: 0.5}}
    assert run.problems == ()


def test_the_last_value_of_a_step_that_was_repeated_counts(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        "".join(
            f'{{"step": {step}, "loss": {loss}}}\n'
            for step, loss in ((1, 9), (2, 8), (3, 7), (2, 5), (1, 6))
        )
    )
    assert [*read_run(tmp_path).series["loss"].items()] == [(1, 6), (2, 5), (3, 7)]


def test_numbers_that_are_not_finite_are_read_as_such(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": "NaN"}\n{"step": 2, "loss": "-Infinity"}\n'
    )
    loss = read_run(tmp_path).series["loss"]
    assert math.isnan(loss[1])
    assert loss[2] == -math.inf


@pytest.mark.parametrize(
    "line",
    [
        b'{"step": 2, "lo',
        b"[1]",
        b'{"loss": 1.0}',
        b'{"step": "2", "loss": 1}',
        b'{"step": true, "loss": 1}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_a_line_that_is_no_metric_is_counted_and_left_out(tmp_path, line):
    good = b'{"step": 1, "loss": 2.0}\n'
    (tmp_path / "metrics.jsonl").write_bytes(good + line + b"\n")
    run = read_run(tmp_path)
    assert run.series == {"loss": {1: 2.0}}
    assert run.problems == ("metrics.jsonl: 1 lines that are cut or not numbers",)


@pytest.mark.parametrize("content", [b"[1, 2", b"3", b"\xff", b"a: b: c"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, content):
    folder = make_run(tmp_path / "a")
    (folder / "config.yaml").write_bytes(content)
    (problem,) = read_run(folder).problems
    assert problem.startswith("config.yaml: ")


def test_a_run_of_before_these_files_is_read(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    run = read_run(tmp_path)
    assert (run.events, run.settings) == ((), {})


def test_a_pipe_does_not_block_the_report(tmp_path):
    for name in ("metrics.jsonl", "events.jsonl", "config.yaml", "samples.jsonl"):
        os.mkfifo(tmp_path / name)
    assert len(read_run(tmp_path).problems) == 4


def test_a_folder_without_a_run_is_an_error(tmp_path):
    with pytest.raises(OutputPathError, match=r"T504.*no run to report on"):
        read_run(tmp_path)


def test_a_metric_of_400_digits_is_a_line_that_cannot_be_read(tmp_path):
    digits = "9" * 400
    lines = f'{{"step": 1, "loss": {digits}}}\n{{"step": 2, "loss": 1.0}}\n'
    (tmp_path / "metrics.jsonl").write_text(lines)
    run = read_run(tmp_path)
    assert run.series["loss"] == {2: 1.0}
    assert run.problems == ("metrics.jsonl: 1 lines that are cut or not numbers",)
