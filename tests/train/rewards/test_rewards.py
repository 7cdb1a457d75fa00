# SPDX-License-Identifier: Apache-2.0
"""Rewards are those of their completions, and a bad function costs its own alone."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tessera.errors import RewardError, SettingValueError
from tessera.train.config.overrides import parse
from tessera.train.rewards import Rewards
from tests.train.rewards.functions import VALUES

MODULE = "tests.train.rewards.functions"
NAN = float("nan")


def own(*names: str) -> list[str]:
    return [f"{MODULE}:{name}" for name in names]


def scored(names, completions, weights=None, time_limit=20.0, processes=2, **columns):
    with Rewards(
        names,
        weights,
        columns=tuple(columns),
        time_limit=time_limit,
        processes=processes,
    ) as rewards:
        prompts = [str(i // 16) for i in range(len(completions))]
        return rewards.score(prompts, completions, columns)


def column_of(name, completions, **options):
    return scored([*own(name)], completions, **options).by_name[:, 0].tolist()


# --- values


def test_rewards_are_in_the_order_of_their_completions():
    texts = [str(i) for i in range(75)]
    scores = scored(own("shaky", "number"), texts, processes=3)
    assert scores.names == ("shaky", "number")
    np.testing.assert_array_equal(scores.by_name, np.stack([np.arange(75)] * 2, 1))
    assert scores.by_name.dtype == scores.total.dtype == np.float64
    assert scores.notes == ()


def test_no_completions_have_no_rewards():
    scores = scored(own("number", "shaky"), [])
    assert scores.by_name.shape == (0, 2)
    assert scores.total.shape == scores.is_missing.shape == (0,)


def test_the_total_is_weighted_over_what_is_not_missing():
    names = own("number", "judges_digits")
    scores = scored(names, ["2", "-1", "0.5"], weights=[10, 0.5])
    np.testing.assert_array_equal(scores.by_name, [[2, 2], [-1, NAN], [0.5, NAN]])
    np.testing.assert_array_equal(scores.total, [21, -10, 5])
    assert not scores.is_missing.any()
    assert scores.notes == ()  # None is no failure


def test_what_only_a_weight_of_zero_judges_is_missing():
    scores = scored(own("number", "judges_digits"), ["2", "-1"], weights=[0, 1])
    np.testing.assert_array_equal(scores.total, [2, NAN])
    assert scores.is_missing.tolist() == [False, True]


def test_numbers_are_of_any_type_and_what_is_none_is_missing():
    found = scored(own("values"), list(VALUES))
    expected = [1, 3, 0.5, 2, 0.25] + [NAN] * 9
    np.testing.assert_array_equal(found.by_name[:, 0], expected)
    assert found.is_missing.tolist() == [False] * 5 + [True] * 9
    assert found.notes == (
        "the reward 'values' did not return a list with a number for each completion "
        "(nan): missing for 8 of 14",
    )


@pytest.mark.parametrize("name", ["array", "generator"])
def test_a_sequence_in_order_is_as_good_as_a_list(name):
    assert column_of(name, ["3", "1", "2"]) == [3, 1, 2]


@pytest.mark.parametrize("name", ["as_set", "as_dict", "as_text"])
def test_what_has_no_order_is_missing(name):
    found = scored(own(name), ["3", "1"])
    assert found.is_missing.all()
    assert f"{name!r} did not return a list" in found.notes[0]


def test_a_list_of_another_length_is_never_shifted():
    found = scored(own("short"), ["a", "skip", "b"])
    np.testing.assert_array_equal(found.total, [1, NAN, 1])
    assert "(list, 2 of 3): missing for 1 of 3" in found.notes[0]


def test_a_function_that_writes_in_its_arguments_changes_nothing():
    texts, answers = ["a", "b"], ["a", "c"]
    found = scored(own("writes", "correct"), texts, answer=answers)
    np.testing.assert_array_equal(found.by_name, [[1, 1], [0, 0]])
    assert (texts, answers) == (["a", "b"], ["a", "c"])


# --- models


def test_models_and_functions_have_their_own_columns_in_any_order():
    def model(number):
        def score(prompts, completions):
            assert prompts == ["0", "0", "0"]
            return [number + len(text) for text in completions]

        return score

    names = ["./first", *own("number"), "org/second", *own("judges_digits")]
    models = {"org/second": model(20.0), "./first": model(10.0)}
    weights, given = [1, 10, 100, 1000], models.__getitem__
    with Rewards(names, weights, open_model=given, processes=2) as rewards:
        found = rewards.score(["0"] * 3, ["1", "-2", "30"], {})
    assert found.names == ("first", "number", "second", "judges_digits")
    expected = [[11, 1, 21, 1], [12, -2, 22, NAN], [12, 30, 22, 30]]
    np.testing.assert_array_equal(found.by_name, expected)
    np.testing.assert_array_equal(found.total, [3121, 2192, 32512])
    assert found.notes == ()


def test_a_model_alone_starts_no_process_and_says_what_it_cannot_score():
    def model(prompts, completions):
        return [0.5, None, "gave no number (nan)", "gave no number (inf)"]

    with Rewards(["./rm"], open_model={"./rm": model}.__getitem__) as rewards:
        found = rewards.score([""] * 4, [""] * 4, {})
        assert rewards._all[0]._worker is None
    np.testing.assert_array_equal(found.total, [0.5, NAN, NAN, NAN])
    note = "the reward 'rm' gave no number (nan): missing for 2 of 4"
    assert found.notes == (note,)


def test_a_model_is_opened_last_and_what_was_started_before_ends():
    opened = []

    def open_model(name):
        opened.append(name)
        raise RewardError("no", got="no", fix="no")

    with pytest.raises(RewardError, match="each reward needs a weight"):
        Rewards(["./rm"], [1, 2], open_model=open_model)
    with pytest.raises(RewardError, match="'exact' cannot be used"):
        Rewards(["./rm", "exact"], open_model=open_model)
    assert opened == []
    with pytest.raises(RewardError, match="no"):
        Rewards(["./rm", *own("process")], open_model=open_model, processes=1)
    assert opened == ["./rm"]


def test_a_model_needs_a_run():
    assert "a reward by a model needs the mesh of a run" in refusal("exact", "./rm")


# --- how functions are called


def test_a_function_of_trl_works_unchanged():
    messages = [[{"role": "assistant", "content": text}] for text in ("is 4", "is 5")]
    found = scored(own("trl"), messages, answer=["4", "4"], completion_ids=[[1], [2]])
    assert found.total.tolist() == [1, 0]


def test_a_function_may_be_async():
    assert column_of("judge", ["a", "bbb"]) == [1, 3]


def test_a_setting_is_not_replaced_by_a_column_of_its_name():
    names = [f"{MODULE}:near(tolerance=0.5)", f"{MODULE}:near"]
    columns = {"answer": ["1", "1"], "tolerance": [9, 9]}
    with Rewards(names[:1], columns=tuple(columns)) as rewards:
        found = rewards.score(["", ""], ["1.4", "2"], columns)
    assert found.total.tolist() == [1, 0]
    found = scored(names, ["1.4", "2"], answer=["1", "1"])
    assert found.names == ("near", "near_2")
    np.testing.assert_array_equal(found.by_name, [[1, 0], [0, 0]])


def test_a_process_has_no_jax_and_no_signals_of_the_run():
    assert column_of("surroundings", ["", "", ""]) == [0, 0, 0]


# --- functions that fail


@pytest.mark.parametrize(
    ("action", "note"),
    [
        ("raise", "raised ZeroDivisionError (division by zero, "),
        ("exit", "raised SystemExit"),
        ("end", "ended its process (exit code 0)"),
        ("segfault", "ended its process (exit code -11)"),
        ("killed", "ended its process (exit code -9)"),
        ("memory", "raised MemoryError"),
    ],
)
def test_a_failure_costs_one_completion(action, note):
    texts = ["1"] * 20
    texts[3] = action
    found = scored(own("acts", "late"), texts)
    assert np.flatnonzero(found.is_missing).tolist() == []
    assert np.flatnonzero(np.isnan(found.by_name[:, 0])).tolist() == [3]
    assert found.total[[2, 3]].tolist() == [2, 1]
    (line,) = found.notes
    assert line.startswith(f"the reward 'acts' {note}")
    assert line.endswith(": missing for 1 of 20")


@pytest.mark.parametrize("action", ["print", "input"])
def test_output_and_input_are_not_those_of_the_run(action, capfd):
    assert column_of("acts", ["1", action]) == [1, 1]
    assert capfd.readouterr().out == ""


def test_a_function_that_hangs_costs_the_completions_on_which_it_does():
    texts = ["1", "hang", "1", "1"]
    start = time.monotonic()
    with Rewards(own("acts"), time_limit=2, processes=1) as rewards:
        found = rewards.score([""] * 4, texts, {})
        np.testing.assert_array_equal(found.total, [1, NAN, 1, 1])
        assert found.notes == (
            "the reward 'acts' took too long (more than 2 s): missing for 1 of 4",
        )
        assert rewards.score([""], ["1"], {}).total.tolist() == [1]
    assert time.monotonic() - start < 60


def test_a_function_that_always_hangs_ends_in_three_limits():
    with Rewards(own("acts"), time_limit=0.4, processes=1) as rewards:
        start = time.monotonic()
        found = rewards.score([""] * 5, ["hang"] * 5, {})
    assert time.monotonic() - start < 30  # 600 each without limits
    assert found.is_missing.all()
    assert found.notes[0].endswith("missing for 5 of 5")


def test_what_returns_after_its_limit_is_missing_and_not_the_next_ones_reward():
    with Rewards(own("late"), time_limit=1, processes=1) as rewards:
        assert rewards.score([""], ["slow"], {}).is_missing.all()
        assert rewards.score([""], ["1"], {}).total.tolist() == [1]


@pytest.mark.slow(reason="it computes until it is stopped")
def test_a_pattern_that_backtracks_without_end_is_stopped():
    pattern = ['regex(pattern="^(a+)+$")']
    found = scored(pattern, ["aaa", "a" * 50 + "b", "b"], time_limit=1)
    np.testing.assert_array_equal(found.total, [1, NAN, 0])


def test_a_process_that_dies_between_two_calls_is_started_again():
    with Rewards(own("process"), processes=1) as rewards:
        first = int(rewards.score([""], [""], {}).total[0])
        os.kill(first, signal.SIGKILL)
        found = rewards.score(["", ""], ["", ""], {})
    assert not found.is_missing.any()
    assert first not in found.total
    assert "ended its process (exit code -9): missing for 0 of 2" in found.notes[0]
    assert ends(int(found.total[0]))


def ends(process: int) -> bool:
    """Whether a process that was killed is gone within ten seconds."""
    for _ in range(200):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


ORPHAN = f"""
import sys, threading, time
from tessera.train.rewards import Rewards

rewards = Rewards(
    ["{MODULE}:process", 'regex(pattern="^(a+)+$")'], time_limit=2, processes=1
)
import os
print(rewards._all[0]._worker.process.pid, flush=True)
rewards.score([""], ["a" * 60 + "b"], {{}})
"""


def test_a_process_ends_with_the_run_even_in_the_middle_of_a_pattern():
    run = subprocess.Popen(
        [sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    child = int(run.stdout.readline())
    time.sleep(1.5)  # the import of JAX
    run.kill()
    run.wait()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{child}/stat").exists() and time.monotonic() < deadline:
        if Path(f"/proc/{child}/stat").read_text().split()[2] == "Z":
            break
        time.sleep(0.05)
    assert time.monotonic() < deadline
    run.stdout.close()


# --- T720


def refusal(*names, weights=None, columns=("answer",)) -> str:
    with pytest.raises(RewardError) as raised:
        Rewards(names, weights, columns=columns, processes=1)
    return str(raised.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no_such_module:f", "No module named 'no_such_module'"),
        (
            f"{MODULE}:corect",
            f"{MODULE} has no corect: did you mean 'correct'? Known: ",
        ),
        (f"{MODULE}:no_function", "is not a callable object"),
        (f"{MODULE}:trl", "it takes completions, answer, completion_ids, and the"),
        (
            f"{MODULE}:near(tolerence=1)",
            "it takes no 'tolerence', but completions, answer, t",
        ),
        (f"{MODULE}:number(scale=1)", "it takes no 'scale', but completions"),
        ("builtins:print", "it does not take the completions"),
        ("exakt", "did you mean 'exact'?"),
        ("exact(column='solution')", "the records have no 'solution'"),
        ("regex", "argument: 'pattern'"),
        ("regex(pattern='(')", "unterminated subpattern"),
        ("length(maximum=5)", "no 'completion_ids'"),
        ("length(maximum=5, cache=9, unit='characters')", "0 <= minimum <= maximum"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused(name, text):
    found = refusal(name)
    assert found.startswith(f"[T720] the reward {name!r} cannot be used")
    assert text in found


def test_the_message_says_what_is_there_and_what_to_write():
    assert refusal("exact", columns=("solution",)) == (
        "[T720] the reward 'exact' cannot be used\n"
        "  got: it takes answer, completions, and the records have no 'answer': Known: "
        "'prompts', 'completions', 'solution'\n"
        "  fix: write my_module:function, a function of prompts, completions and "
        "columns of the records, in the current folder or in PYTHONPATH\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T720.html"
    )


def test_a_name_of_a_folder_says_how_to_write_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rm").mkdir()
    assert "write ./rm for the model" in refusal("rm")


def test_the_rewards_that_the_guide_writes_can_be_used():
    guide = (Path(__file__).parents[3] / "docs/guides/own-rewards.md").read_text()
    (text,) = re.findall(r"`'(rewards=\[.*?\])'`", guide)
    with pytest.raises(SettingValueError) as caught:
        parse(text.replace('"', ""))
    assert text in caught.value.fix
    columns = "answer", "schema", "completion_ids"
    with Rewards(parse(text).value(), columns=columns, processes=1) as rewards:
        assert rewards.names == ("exact", "length")


def test_a_column_cannot_be_what_is_sampled():
    text = "the records have a column 'completions': rename it"
    assert text in refusal(*own("number"), columns=("completions",))


@pytest.mark.parametrize("weights", [[1], [1, 2, 3], [1, NAN], [0, 0]])
def test_each_reward_needs_a_finite_weight(weights):
    assert "each reward needs a weight" in refusal(*own("a", "b"), weights=weights)


def test_there_is_at_least_one_reward():
    assert "rewards=[]" in refusal()


@pytest.mark.parametrize("body", ["import os; os._exit(7)", "raise KeyError('x')"])
def test_a_module_that_cannot_be_imported_is_refused(body, tmp_path, monkeypatch):
    (tmp_path / "broken_rewards.py").write_text(body)
    monkeypatch.chdir(tmp_path)
    found = refusal("broken_rewards:f")
    assert ("exit code 7" in found) or ("KeyError ('x', " in found)
