# SPDX-License-Identifier: Apache-2.0
"""The browser of completions: complete without its script, escaped and bounded."""

import re
from html import unescape
from html.parser import HTMLParser
from itertools import count

import pytest

from tessera.train.report import samples as module
from tessera.train.report.run_files import read_run
from tessera.train.report.samples import samples
from tests.train.report.run_folders import HOSTILE, completion, make_run


@pytest.fixture
def section(tmp_path):
    """The section of a run that kept these completions."""

    folders = (tmp_path / str(number) / "a" for number in count())

    def of(*lines):
        return samples([read_run(make_run(next(folders), samples=[*lines]))])

    return of


class Texts(HTMLParser):
    """What a browser shows in each ``pre``."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "pre":
            self.texts.append("")

    def handle_data(self, data):
        if self.tags and self.tags[-1] == "pre":
            self.texts[-1] += data

    def handle_endtag(self, tag):
        self.tags.append(f"/{tag}")


def test_a_completion_is_a_line_to_open(section):
    html = section(completion(12))
    assert '<details class="sample" data-step="12" data-reward="0.5">' in html
    assert "<summary>step 12, reward 0.5: It is 4.</summary>" in html
    assert "<p>correct 1, format –, advantage -0.25, tokens 37</p>" in html
    assert Texts(html).texts[:2] == ["\nWhat is 2 + 2?", "\nIt is 4."]


def test_one_that_was_cut_says_so(section):
    assert "tokens 37, cut at the most tokens</p>" in section(
        completion(1, ended=False)
    )


@pytest.mark.parametrize(
    ("reward", "attribute", "shown"),
    [(None, "None", "–"), ("NaN", "nan", "nan"), ("Infinity", "inf", "inf")],
)
def test_a_reward_that_is_missing_is_no_number_for_the_script(
    section, reward, attribute, shown
):
    html = section(completion(1, reward=reward))
    assert f'data-reward="{attribute}"><summary>'.replace("><", ">\n<") in html
    assert f"reward {shown}: " in html


def test_the_controls_are_hidden_until_the_script_runs(section):
    html = section(completion(1))
    assert '<p class="filter" hidden>' in html
    assert not re.search(r"<details[^>]*hidden", html)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("</script><script>alert(1)</script>", None),
        (HOSTILE, None),
        ("</pre></details><b>$step ${step} $$</b>", None),
        ("&lt;b&gt;", None),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("\u202eabc\u2066", "\\u202eabc\\u2066"),
        ("a\ud800b", "a\\ud800b"),
        ("a\0b\r", "a\\x00b\\r"),
        ("\n\n  indented\n", None),
    ],
    ids=ascii,
)
def test_a_text_is_shown_as_it_is_or_by_its_codes(section, text, shown):
    plain = Texts(section(completion(1, "a", prompt="a")))
    html = section(completion(1, text, prompt=text, rewards={text: 1.0}))
    page = Texts(html)
    html.encode("utf-8")
    assert page.tags == plain.tags
    expected = "\n" + (text if shown is None else shown)
    assert page.texts[:2] == [expected, expected]
    if shown is None:
        (words,) = re.findall(r"reward 0.5: (.*?)</summary>", html)
        assert unescape(words) == " ".join(text.split())


def test_what_does_not_fit_is_left_out_and_said(section, monkeypatch):
    monkeypatch.setattr(module, "_MOST_BYTES", 20_000)
    html = section(*(completion(step, "<" * 300) for step in range(100)))
    shown = [int(step) for step in re.findall('data-step="([0-9]*)"', html)]
    assert (shown[0], shown[-1]) == (0, 99)
    left_out = 100 - len(shown)
    assert (
        f"<p>{len(shown)} of 100 completions that the run kept, spread over its steps; "
        f"{left_out} are left out.</p>"
    ) in html
    assert 10_000 < len(html.encode()) < 22_000


def test_a_completion_that_is_larger_than_all_may_be_is_left_out(section, monkeypatch):
    monkeypatch.setattr(module, "_MOST_BYTES", 100)
    assert "<p>0 of 1 completions" in section(completion(1))


def test_completions_of_repeated_steps_are_said(section):
    html = section(completion(1), completion(5), completion(3))
    assert "2 of 2 completions that the run kept; 1 more are of steps that a" in html


def test_runs_share_the_room(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MOST_BYTES", 20_000)
    lines = [completion(step, "a" * 300) for step in range(100)]
    runs = [read_run(make_run(tmp_path / n, samples=lines), n) for n in ("a", "b")]
    html = samples(runs)
    assert html.count('class="browser"') == 2
    assert len(html.encode()) < 24_000
