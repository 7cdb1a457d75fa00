# SPDX-License-Identifier: Apache-2.0
"""Names of rewards with literals as settings, which are never evaluated."""

import pytest

from tessera.errors import RewardError
from tessera.train.rewards.reward_names import parse_names


def test_a_name_is_of_a_module_or_of_the_library():
    found = parse_names(["a.b:c.d", "exact", ' regex(pattern=r"\\d+(,)") ', "exact()"])
    assert [(name.module, name.function) for name in found] == [
        ("a.b", "c.d"),
        ("", "exact"),
        ("", "regex"),
        ("", "exact"),
    ]
    assert [name.label for name in found] == ["d", "exact", "regex", "exact_2"]
    assert found[2].settings == {"pattern": r"\d+(,)"}


def test_no_two_rewards_have_one_label():
    found = parse_names(["a:f", "b:f", "a:f_2", "a:environment", "./f"])
    labels = ["f", "f_2", "f_2_2", "environment_2", "f_3"]
    assert [name.label for name in found] == labels


def test_what_has_a_slash_is_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commit = "a" * 40
    texts = ["./rm", "exact", "org/rm", f"hf://org/rm@{commit}", "~/models/exact/"]
    found = parse_names([*texts, 'regex(pattern=r"a/b:c")', "org/rm.v2@main", "./."])
    assert [name.is_model for name in found] == [1, 0, 1, 1, 1, 0, 1, 1]
    labels = ["rm", "exact", "rm_2", "rm_3", "exact_2", "regex", "rm.v2", tmp_path.name]
    assert [name.label for name in found] == labels
    assert [name.text for name in found][:5] == texts


def test_settings_are_literals():
    text = 'f(a=-1, b=[1.5, None], c={"x": "y"}, d="^<answer>.*</answer>$")'
    assert parse_names([text])[0].settings == {
        "a": -1,
        "b": [1.5, None],
        "c": {"x": "y"},
        "d": "^<answer>.*</answer>$",
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a b",
        "a:b:c",
        "a-b:c",
        "rewards/mine.py:correct",
        "reward-model",
        'regex(pattern="a/b"',
        "regex(pattern=)",
        "regex('a')",
        "regex(**{'a': 1})",
        "regex(a=1)(b=2)",
        "regex(a=open('x'))",
        "regex(a=__import__('os').system('true'))",
        "regex(a=1, a=2)",
        "regex(a=" + "(" * 5000 + ")" * 5000 + ")",
    ],
    ids=lambda text: text[:30],
)
def test_what_is_no_name_is_refused(text):
    with pytest.raises(RewardError, match="is no name of a reward"):
        parse_names([text])


@pytest.mark.parametrize("text", [r'"\bword\b"', r'r"\d" "\b"', r"['a', '\n']"])
def test_a_backslash_needs_a_raw_text(text):
    with pytest.raises(RewardError, match="a backslash needs an r in front: "):
        parse_names([f"regex(pattern={text})"])


def test_a_raw_text_means_what_it_shows():
    assert parse_names([r'f(p=r"\bword\b")'])[0].settings == {"p": r"\bword\b"}
