# SPDX-License-Identifier: Apache-2.0
"""The HTML file: complete, of one piece, and without anything of a run that runs."""

import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from tessera.errors import OutputPathError
from tessera.train.report import page
from tessera.train.report.page import report_page, write_report
from tessera.train.report.run_files import RunFiles, read_run
from tests.train.report.run_folders import (
    make_hostile_run,
    make_reward_run,
    make_run,
)

TITLES = [*page._SECTIONS]
# Of runs without rewards.
OTHERS = [title for title in TITLES if title != "Rewards"]


class Elements(HTMLParser):
    """The elements of a page, with their attributes, and the texts of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


@pytest.fixture(scope="module", autouse=True)
def _small_plotly(tmp_path_factory):
    """In place of five megabytes that HTMLParser would read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plotly.offline.get_plotlyjs", lambda: "/* Plotly */")
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> str:
    return report_page([read_run(make_run(tmp_path_factory.mktemp("runs") / "a"))])


@pytest.fixture(scope="module")
def rewarded(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("runs") / "a"
    return report_page([read_run(make_reward_run(folder), "a")])


def section(text: str, title: str) -> str:
    return re.split(r"</section>", text.split(f">{title}</h2>")[1])[0]


def test_the_headings_are_in_order(whole):
    levels = [
        int(level)
        for level in re.findall(r"<h(\d)>|<h(\d) ", whole)
        for level in level
        if level
    ]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b <= a + 1 for a, b in pairwise(levels))
    assert re.findall(r'<h2 id="[^"]*">([^<]*)</h2>', whole) == OTHERS


def test_runs_with_rewards_have_a_section_more(rewarded):
    assert re.findall(r'<h2 id="[^"]*">([^<]*)</h2>', rewarded) == TITLES
    assert "cannot be shown" not in rewarded


def test_a_page_has_its_language_and_landmarks_and_links_to_its_sections(whole):
    elements = Elements(whole)
    assert elements.of("html") == [{"lang": "en"}]
    assert [len(elements.of(tag)) for tag in ("header", "nav", "main", "footer")] == [
        *(1, 1, 1, 1),
    ]
    links = {a["href"] for a in elements.of("a")}
    assert links == {"#main", *(f"#{s['id']}" for s in elements.of("section"))}


def test_nothing_is_loaded_from_elsewhere(whole):
    elements = Elements(whole)
    assert not [a for _, a in elements.found if a.get("src")]
    assert elements.of("link") == [{"rel": "icon", "href": "data:,"}]
    assert "default-src 'none'" in str(elements.of("meta"))


def test_every_chart_has_a_sentence_and_a_table(whole):
    figures = re.findall(r"<figure>.*?</figure>", whole, re.DOTALL)
    assert len(figures) >= 8
    for figure in figures:
        assert re.search(r"<figcaption><p>[^<]{20,}", figure)
        assert re.search(r"<details>.*<td>[^<]", figure, re.DOTALL)


def test_no_section_of_a_whole_run_fails(whole):
    assert "cannot be shown" not in whole


@pytest.mark.parametrize(
    ("title", "sentence"),
    [
        ("Summary", "Finished: 200 of 200 steps. Loss 1.928 at step 200."),
        ("Summary", "<td>tiny: 1,234,567 parameters</td>"),
        ("Summary", "7,560,354 tokens, 232,639 for validation</td>"),
        ("Summary", '<th scope="row">tokens/s, median</th><td>12,003</td>'),
        ("Throughput and step time", "<td>12,006</td>"),
        ("Compiled step", "<td>4 GiB: state and batch 3 GiB, temporaries 1 GiB</td>"),
        ("Compiled step", "<td>layers 0-2, 3-5; 1f1b: 2 stages, 2 microbatches</td>"),
        ("Compiled step", "measured peak of memory</th><td>5 GiB</td>"),
        ("Goodput", "went into steps that counted"),
        ("Starts, stops and warnings", "1 × damaged checkpoint"),
        ("Starts, stops and warnings", "begins after step 80 on 4 × cpu"),
        ("Starts, stops and warnings", "rank 1 is slow, and all others wait for it"),
        ("Samples", "<b>def f(</b>x):\n    return x"),
        ("Configuration", "<td>deterministic</td>"),
        ("Environment", "<td>node1</td>"),
    ],
)
def test_a_section_says_what_its_files_hold(whole, title, sentence):
    assert sentence in section(whole, title)


def test_a_section_without_data_says_so_and_has_no_chart():
    text = report_page([RunFiles("empty", {"loss": {1: 2.0}})])
    for title in OTHERS[3:]:
        body = section(text, title)
        assert re.search(r"<p>[A-Z][^<]*\.</p>", body), title
        assert "<figure" not in body, title
    assert "cannot be shown" not in text


@pytest.mark.parametrize(
    ("title", "sentence"),
    [
        ("Summary", "Loss 2.241 at step 20. Reward 0.95 at step 19."),
        ("Summary", '<th scope="row">val_<wbr>reward</th><td>0.75</td>'),
        ("Rewards", ">a: reward: 0.05 at step 1, 0.95 at step 19. a: val_reward:"),
        ("Rewards", "a: reward/format: nan at step 1"),
        ("Rewards", "a: clip_low_fraction: 0.1 at step 1, 0.1 at step 20"),
        ("Throughput and step time", "a: rollout_seconds: 2 at step 1, 2 at step 19"),
        ("Goodput", "rollout, of step</th><td>40 s, 18.6%</td>"),
        ("Goodput", "reward, of step</th><td>10 s, 4.7%</td>"),
        ("Samples", "<p>40 of 40 completions that the run kept.</p>"),
    ],
)
def test_a_section_says_what_was_rewarded(rewarded, title, sentence):
    assert sentence in section(rewarded, title)


def test_the_loss_of_rewards_or_pairs_is_in_no_unit(rewarded, whole):
    titles = r'"yaxis":\{"title":\{"text":"(nats per token|loss)"'
    assert set(re.findall(titles, section(rewarded, "Loss and gradients"))) == {"loss"}
    found = set(re.findall(titles, section(whole, "Loss and gradients")))
    assert found == {"nats per token"}


def test_preferences_have_margins_and_accuracies_of_training_and_validation():
    names = ("chosen_reward", "rejected_reward", "reward_margin", "accuracy")
    series = {name: {1: 0.5} for name in (*names, "val_accuracy", "loss")}
    body = section(report_page([RunFiles("a", series)]), "Rewards")
    assert re.findall("<h3>([^<]*)</h3>", body) == [
        "Rewards of answers",
        "Reward margin",
        "Accuracy",
    ]
    assert "<p>a: accuracy: 0.5 at step 1. a: val_accuracy: 0.5 at step 1.</p>" in body


def test_a_single_reward_function_is_named():
    series = {"reward": {1: 0.5}, "reward/correct": {1: 1.0}}
    body = section(report_page([RunFiles("a", series)]), "Rewards")
    assert "<p>a: 0.5 at step 1.</p>" in body
    assert "<p>a: reward/correct: 1 at step 1.</p>" in body


def test_differences_between_the_settings_of_runs_are_marked(tmp_path):
    settings = "name: tiny\na: 1\nb: {c: 2}\n"
    one = make_run(tmp_path / "one", settings=settings)
    two = make_run(tmp_path / "two", settings=settings.replace("c: 2", "c: '2'"))
    body = section(report_page([read_run(one), read_run(two)]), "Configuration")
    assert "The runs differ in 1 settings." in body
    marked = re.findall(r'<tr class="marked">(.*?)</tr>', body)
    cells = '<th scope="row">b.c</th><td>2</td><td>&#x27;2&#x27;</td>'
    assert marked == [cells, cells]


def test_the_last_loss_is_that_of_the_step_that_counted(tmp_path):
    lines = [
        {"step": s, "loss": x} for s, x in ((1, 9.0), (2, 8.0), (3, 7.0), (3, 6.0))
    ]
    text = report_page([read_run(make_run(tmp_path / "a", lines=lines))])
    assert "Loss 6 at step 3." in section(text, "Summary")


def test_a_loss_that_is_not_finite_is_said(tmp_path):
    lines = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": "NaN"}]
    text = report_page([read_run(make_run(tmp_path / "a", lines=lines))])
    assert "The loss is not finite at 1 step." in section(text, "Summary")
    assert "not finite at 1 step: 2" in section(text, "Loss and gradients")


# What a run's files hold that is HTML stays text, wherever the page shows it.


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> str:
    return report_page([read_run(make_hostile_run(tmp_path_factory.mktemp("runs")))])


def test_a_hostile_run_adds_no_element(hostile, rewarded):
    tags = {tag for tag, _ in Elements(rewarded).found}
    assert {tag for tag, _ in Elements(hostile).found} <= tags
    scripts = Elements(hostile).of("script")
    assert all(
        "nonce" in one or one.get("type") == "application/json" for one in scripts
    )
    assert sum("nonce" in one for one in scripts) == 2
    assert not [a for _, a in Elements(hostile).found if "onerror" in a]


@pytest.mark.parametrize("title", TITLES)
def test_a_section_shows_hostile_text_as_text(hostile, title):
    body = section(hostile, title)
    assert "cannot be shown" not in body
    assert "&lt;script&gt;alert(" in body
    assert "<script>alert" not in body


def test_the_figures_of_a_hostile_run_hold_no_html(hostile):
    figures = re.findall(r'json" class="figure">(.*?)</script>', hostile, re.DOTALL)
    assert len(figures) >= 5
    assert not [figure for figure in figures if "<" in figure or "\\u003c" in figure]


def test_control_characters_and_surrogates_become_visible():
    text = report_page([RunFiles("a\x1b[2J\ud800\u202e", {"loss": {1: 2.0}})])
    assert "a\\x1b[2J\\ud800\\u202e" in text
    text.encode("utf-8")


# Values of types that the trainer does not write


@pytest.mark.parametrize("rows", [3, [1], [["a"]], [[[], "a"]], None])
def test_one_section_that_cannot_be_made_leaves_the_others(tmp_path, rows):
    event = {"time": 1e9, "event": "program", "rows": rows}
    run = read_run(make_run(tmp_path / "a", happened=[event]))
    text = report_page([run])
    assert text.count("cannot be shown") == 1
    assert re.findall(r'<h2 id="[^"]*">([^<]*)</h2>', text) == OTHERS


# Writing


def test_the_same_run_twice_counts_once(tmp_path):
    run = make_run(tmp_path / "a")
    write_report([run, run / "." / "..", run][::2], tmp_path / "r.html")
    assert "<h1>Report of a</h1>" in (tmp_path / "r.html").read_text()


def test_a_run_is_called_by_its_path_below_outputs(tmp_path):
    run = make_run(tmp_path / "outputs/tiny/2026-11-28/12-00-00")
    write_report([run], tmp_path / "r.html")
    title = "<h1>Report of tiny/2026-11-28/12-00-00</h1>"
    assert title in (tmp_path / "r.html").read_text()


def test_a_run_without_a_log_of_its_start_has_the_model_and_data_of_its_settings(
    tmp_path,
):
    settings = "model: {name: tiny}\ndata: {name: text, path: books}\n"
    run = make_run(tmp_path / "a", happened=[], settings=settings)
    body = section(report_page([read_run(run)]), "Summary")
    for name, value in (
        ("model", "tiny"),
        ("data", "text"),
        ("path of the data", "books"),
    ):
        assert f'<th scope="row">{name}</th><td>{value}</td>' in body


def test_a_report_that_cannot_be_written_is_an_error_and_leaves_nothing(tmp_path):
    run = make_run(tmp_path / "a")
    (tmp_path / "r.html").mkdir()
    with pytest.raises(OutputPathError, match=r"T504.*report cannot be written"):
        write_report([run], tmp_path / "r.html")
    assert not [*tmp_path.glob("*.partial")]


def test_the_style_and_the_script_are_beside_the_module():
    here = Path(page.__file__)
    assert here.with_suffix(".css").is_file()
    assert here.with_suffix(".js").is_file()


def test_runs_are_called_by_what_tells_their_folders_apart(tmp_path):
    runs = [make_run(tmp_path / "x" / name / "1") for name in ("a", "b")]
    write_report(runs, tmp_path / "r.html")
    assert "<h1>Report of a/1, b/1</h1>" in (tmp_path / "r.html").read_text()
