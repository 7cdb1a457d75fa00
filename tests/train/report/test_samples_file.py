# SPDX-License-Identifier: Apache-2.0
"""Completions that a run kept: those of steps that counted, and a bounded number."""

import json
import math

import pytest

from tessera.train.report import samples_file
from tessera.train.report.run_files import read_run
from tessera.train.report.samples_file import evenly, read_samples
from tests.train.report.run_folders import completion, make_run


@pytest.fixture
def read(tmp_path):
    """Reads lines as of a file: mappings, or bytes; what could not be read, beside."""

    def read_lines(*lines):
        path = tmp_path / "samples.jsonl"
        path.write_bytes(
            b"".join(
                line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n"
                for line in lines
            )
        )
        problems = []
        return read_samples(path, problems), problems

    return read_lines


def test_a_line_is_a_completion_with_its_rewards(read):
    samples, problems = read(completion(3, ended=False))
    (sample,) = samples.chosen
    assert (sample.step, sample.prompt) == (3, "What is 2 + 2?")
    assert (sample.completion, sample.reward, sample.is_cut) == ("It is 4.", 0.5, True)
    assert sample.numbers == [
        *(("correct", 1.0), ("format", None), ("advantage", -0.25), ("tokens", 37.0)),
    ]
    assert problems == []


def test_a_line_needs_no_more_than_step_prompt_and_completion(read):
    samples, _ = read({"step": 1, "prompt": "a", "completion": ""})
    (sample,) = samples.chosen
    assert (sample.completion, sample.reward, sample.is_cut) == ("", None, False)
    assert sample.numbers == [("advantage", None), ("tokens", None)]


def test_messages_are_read_in_their_order_with_calls_of_tools(read):
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    messages = [{"role": "user", "content": "2 + 2"}, call]
    samples, _ = read(completion(1, messages))
    assert samples.chosen[0].completion == (
        'user: 2 + 2\nassistant: null {"tool_calls": [{"name": "add"}]}'
    )


def test_numbers_that_are_not_finite_are_read_as_such(read):
    samples, problems = read(completion(1, reward="NaN", rewards={"a": "-Infinity"}))
    (sample,) = samples.chosen
    assert math.isnan(sample.reward)
    assert sample.numbers[0] == ("a", -math.inf)
    assert problems == []


@pytest.mark.parametrize(
    "line",
    [
        b'{"step": 2, "prompt": "a", "comp',
        b"[1]\n",
        b"\xff\xfe\n",
        b"[" * 100_000 + b"\n",
        b'{"step": 1, "prompt": "a"}\n',
        completion(-1),
        completion(2**60),
        completion(True),
        completion("2"),
        completion(2, None),
        completion(2, 3),
        completion(2, {"role": "user", "content": "a"}),
        completion(2, [{"content": "a"}]),
        completion(2, ["a"]),
        completion(2, reward=[1]),
        completion(2, rewards=[1]),
        completion(2, reward=10**400),
        completion(2, tokens="many"),
    ],
    ids=lambda line: (line if isinstance(line, bytes) else json.dumps(line))[-40:],
)
def test_a_line_that_is_no_completion_is_counted_and_left_out(read, line):
    samples, problems = read(completion(1), line)
    assert [sample.step for sample in samples.chosen] == [1]
    assert samples.total == 1
    assert problems == ["samples.jsonl: 1 lines that are cut or no completions"]


def test_lines_after_a_damaged_one_are_those_that_are_read(read):
    samples, _ = read(completion(1), b"\xff\n", completion(2, "the second"))
    assert samples.chosen[-1].completion == "the second"


# Attempts that go on from a checkpoint


def test_steps_that_a_later_attempt_repeats_did_not_count(read):
    first = [completion(step, "first") for step in (1, 1, 3, 3, 5, 5)]
    again = [completion(step, "again") for step in (3, 3)]
    samples, problems = read(*first, *again)
    found = [(sample.step, sample.completion) for sample in samples.chosen]
    assert found == [(1, "first"), (1, "first"), (3, "again"), (3, "again")]
    assert (samples.total, samples.repeated, problems) == (4, 4, [])


def test_the_same_step_is_repeated_where_its_completions_are_numbered_anew(read):
    first = [completion(1, "first", index=index) for index in range(4)]
    again = [completion(1, "again", index=index) for index in range(2)]
    samples, _ = read(*first, *again)
    assert [sample.completion for sample in samples.chosen] == ["again", "again"]
    assert samples.repeated == 4


# Bounds


def test_a_long_text_is_cut_in_its_middle(read):
    text = "a" * 3000 + "b" * 3000
    samples, _ = read(completion(1, text))
    assert samples.chosen[0].completion == (
        "a" * 2000 + "\n[… 2,000 characters …]\n" + "b" * 2000
    )


def test_some_of_many_completions_are_chosen_over_all_steps(read, monkeypatch):
    monkeypatch.setattr(samples_file, "_MOST_SAMPLES", 10)
    samples, _ = read(*(completion(step) for step in range(100) for _ in range(4)))
    steps = [sample.step for sample in samples.chosen]
    assert steps == [0, 11, 22, 33, 44, 55, 66, 77, 88, 99]
    assert samples.total == 400


@pytest.mark.parametrize("most", [0, 1, 2, 5, 7, 9])
def test_items_are_chosen_at_even_distances(most):
    chosen = [*evenly(range(7), most)]
    assert len(chosen) == min(most, 7)
    assert chosen == sorted(set(chosen))
    assert most < 2 or (chosen[0], chosen[-1]) == (0, 6)


def test_a_run_of_before_this_file_has_no_samples(tmp_path):
    folder = make_run(tmp_path / "a")
    (folder / "samples.jsonl").unlink()
    run = read_run(folder)
    assert (run.samples.total, run.problems) == (0, ())
