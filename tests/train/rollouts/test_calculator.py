# SPDX-License-Identifier: Apache-2.0
"""The environment of ``examples/environments``, and how environments are named."""

import json
import sys
from pathlib import Path

import pytest

from tessera.errors import SettingValueError
from tessera.train.data.chat_prompts import ChatPrompts
from tessera.train.data.tokenization import load_tokenizer
from tessera.train.rollouts import load_environment
from tests.train.data.chat_folders import turns, write_folder
from tests.train.rollouts.conversations import Script, run

pytest.importorskip("jinja2")
ROOT = Path(__file__).parents[3]
HERE = "tests.train.rollouts.conversations"


@pytest.fixture
def calculator(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples" / "environments")
    yield load_environment("calculator:Calculator", ["answer", "level"])
    del sys.modules["calculator"]


def call(expression):
    made = {"name": "calculator", "arguments": {"expression": expression}}
    return f"<tool_call>{json.dumps(made)}</tool_call>"


def result(calculator, text):
    (message,), reward, done = calculator(answer="1", level=2).step(turns("q", text))
    assert (message["role"], reward, done) == ("user", None, False)
    return message["content"]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12 * 7", "84"),
        ("1234567 + 1", "1234568"),
        ("-(2 + 3) / 4", "-1.25"),
        ("1 / 0", "error: float division by zero"),
        ("2 **", "error: invalid syntax (<unknown>, line 1)"),
        ("2 ** 9999999", "error: not arithmetic: 2 ** 9999999"),
        ("__import__('os')", "error: not arithmetic: __import__('os')"),
        ("'a' * 9", "error: not arithmetic: 'a'"),
    ],
)
def test_it_computes_what_is_called(calculator, expression, value):
    assert result(calculator, call(expression)) == value


def test_a_call_that_is_no_json_is_answered(calculator):
    assert result(calculator, "<tool_call>12 * 7</tool_call>").startswith("error: ")


@pytest.mark.parametrize(
    ("text", "reward"),
    [("It is 84.", 1.0), ("12 * 7 = 1,084", 0.0), ("84.0", 1.0), ("no idea", 0.0)],
)
def test_the_last_number_is_the_answer(calculator, text, reward):
    environment = calculator(answer=84, level=2)
    assert environment.step(turns("q", text)) == ([], reward, True)


def test_several_calls_have_several_results(calculator):
    assert result(calculator, f"{call('1 + 1')} and {call('9 / 2')}") == "2\n4.5"


@pytest.mark.parametrize(
    ("family", "end"), [("gemma", "<end_of_turn>"), ("qwen", "<|im_end|>")]
)
def test_a_model_that_calls_it_is_rewarded(calculator, tmp_path, family, end):
    write_folder(tmp_path, family, marked=False)
    chat = ChatPrompts(load_tokenizer(str(tmp_path)), "here")
    script = Script(chat.tokenizer, [f"{call('12 * 7')}{end}", f"It is 84.{end}"])
    asked = turns("What is 12 * 7?")
    (found,), _ = run(chat, script, lambda _: calculator("84", level=1), asked)
    assert (found.reward, found.ended, found.failure) == (1.0, True, "")
    assert [m["content"] for m in found.messages][1:] == ["84", "It is 84."]
    learned = chat.tokenizer.decode(found.tokens[found.is_own])
    assert learned == f"{call('12 * 7')}It is 84."


# --- names


def test_an_environment_is_made_from_columns():
    found = load_environment(f"{HERE}:NeedsColumns", ["level", "answer"])
    assert found(level=1, answer=2).step([]) == ([], 2, True)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("no_such_module:Calculator", "ModuleNotFoundError"),
        (f"{HERE}:Nothing", "AttributeError"),
        (HERE, "AttributeError|TypeError|ValueError"),
        (f"{HERE}:NoStep", "AttributeError.*'step'"),
        (f"{HERE}:NeedsColumns", r"missing a required argument: 'level'"),
        ("", "ValueError"),
    ],
)
def test_an_environment_that_cannot_be_made_is_an_error_before_the_run(name, problem):
    with pytest.raises(SettingValueError, match=problem) as caught:
        load_environment(name, ["answer"])
    assert "columns of the records: answer" in str(caught.value)
    assert "step(self, messages), which returns (messages, reward, done)" in str(
        caught.value
    )
