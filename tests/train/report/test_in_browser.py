# SPDX-License-Identifier: Apache-2.0
"""Reports in headless Chromium: ``make test-report`` sets it up.

A report of 100,000 steps has to open within 3 s on a machine that is not busy. A timed
test would fail on one that is: the time is printed (``pytest -s``), and not checked.
"""

import time
from pathlib import Path
from typing import Any

import pytest

from tessera.train.report.page import write_report
from tests.train.report.browser_page import (
    BROKEN_WORDS,
    CONTRASTS,
    OVERFLOWS,
    POINTS,
    chromium,
)
from tests.train.report.run_folders import (
    SETTINGS,
    completion,
    make_hostile_run,
    make_reward_run,
    make_run,
    metrics,
)

playwright = pytest.importorskip("playwright.sync_api", reason="make test-report")
WIDTHS = (360, 800, 1400)

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        try:
            opened = chromium(started)
        except playwright.Error as error:
            pytest.skip(f"there is no Chromium: {error}")
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    other = SETTINGS.replace("0.003", "0.001")
    runs = {
        "one": [make_run(folder / "runs" / "one")],
        "long": [make_run(folder / "runs" / "long", lines=metrics(100_000))],
        "rewards": [make_reward_run(folder / "runs" / "rewards")],
    }
    # Beside another one, so that charts have legends.
    runs["hostile"] = [make_hostile_run(folder / "runs"), *runs["one"]]
    runs["two"] = [*runs["one"], make_run(folder / "runs" / "two", settings=other)]
    for name, folders in runs.items():
        write_report(folders, folder / f"{name}.html")
    return {file.stem: file for file in folder.glob("*.html")}


class Opened:
    """A page, and everything that it complained of, asked for or popped up."""

    def __init__(self, browser: Any, file: Path, **options: Any) -> None:
        self.page = browser.new_page(**options)
        self.seen: list[str] = []
        self.page.on("console", lambda message: self.seen.append(message.text))
        self.page.on("pageerror", lambda error: self.seen.append(str(error)))
        self.page.on("dialog", lambda dialog: self.seen.append(dialog.message))
        self.page.on("request", self._note)
        begin = time.perf_counter()
        self.page.goto(file.as_uri())
        self.page.wait_for_selector("html[data-drawn]")
        self.seconds = time.perf_counter() - begin

    def _note(self, request: Any) -> None:
        if not request.url.startswith(("file:", "data:", "blob:")):
            self.seen.append(request.url)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        self.page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["one", "two", "hostile", "rewards"])
def test_a_report_fits_can_be_read_and_complains_of_nothing(
    browser, reports, name, width, scheme
):
    window = {"width": width, "height": 900}
    with Opened(browser, reports[name], viewport=window, color_scheme=scheme) as opened:
        assert opened.page.evaluate(OVERFLOWS) == []
        assert opened.page.evaluate(CONTRASTS) == []
        drawn = opened.page.evaluate(POINTS)
        assert drawn
        assert [chart for chart in drawn if not (chart[1] and chart[2])] == []
        assert opened.seen == []


@pytest.mark.parametrize("name", ["one", "two", "long", "rewards"])
def test_tables_hold_their_words_on_a_phone(browser, reports, name):
    with Opened(
        browser, reports[name], viewport={"width": 360, "height": 800}
    ) as opened:
        assert opened.page.evaluate(BROKEN_WORDS) == []


def test_a_hostile_name_is_shown_as_it_is(browser, reports):
    with Opened(browser, reports["hostile"]) as opened:
        assert '<script>alert("1")</script>&<img' in opened.page.inner_text("h1")
        legends = opened.page.locator(".chart text").all_text_contents()
        assert any("<img src=x" in text for text in legends)
        assert opened.seen == []


def test_a_hundred_thousand_steps_open(browser, reports, capsys):
    with Opened(browser, reports["long"]) as opened:
        with capsys.disabled():
            print(f" opened in {opened.seconds:.2f} s")  # noqa: T201
        assert all(points for _, points, _ in opened.page.evaluate(POINTS))
        assert opened.seen == []


def test_a_chart_is_reached_and_zoomed_by_keys(browser, reports):
    limits = "() => document.querySelector('.chart')._fullLayout.xaxis.range"
    with Opened(browser, reports["one"]) as opened:
        page = opened.page
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.focus(".chart")
        before = page.evaluate(limits)
        page.keyboard.press("+")
        page.wait_for_function(f"({limits})()[0] > {before[0]}")
        page.keyboard.press("0")
        page.wait_for_function(f"({limits})()[0] === {before[0]}")
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        assert page.evaluate(outline) == "solid"


def shown(page: Any, name: str) -> list[str]:
    """What the completions that are shown have as data, in their order."""
    one = page.locator(".sample:not([hidden])")
    return one.evaluate_all(f"(all) => all.map((each) => each.dataset.{name})")


def test_completions_are_found_by_text_and_reward_and_sorted(browser, reports):
    with Opened(browser, reports["rewards"]) as opened:
        page = opened.page
        assert page.text_content("output") == "40 of 40"
        page.get_by_label("Text").fill("IS 7.")
        assert (page.text_content("output"), shown(page, "step")) == (
            *("2 of 40", ["5", "7"]),
        )
        page.get_by_label("Text").fill("")
        page.get_by_label("Reward from").fill("0.5")
        page.get_by_label("to", exact=True).fill("0.52")
        assert shown(page, "reward") == ["0.5", "0.5"]
        page.get_by_label("to", exact=True).fill("")
        page.get_by_label("Order").select_option("-step")
        assert shown(page, "step")[::4] == ["19", "17", "15", "13"]
        page.get_by_label("Order").select_option("-reward")
        rewards = [*map(float, shown(page, "reward"))]
        assert rewards == sorted(rewards, reverse=True)
        page.locator(".sample summary").first.click()
        assert page.locator(".sample pre").last.is_hidden()
        assert page.locator(".sample pre").first.is_visible()
        assert opened.seen == []


def test_completions_without_a_reward_are_in_no_range_and_last(
    browser, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("missing")
    rewards = ("NaN", 0.25, None, "Infinity", -1.0)
    lines = [completion(1, reward=reward) for reward in rewards]
    run = make_run(folder / "a", samples=lines)
    write_report([run], folder / "a.html")
    with Opened(browser, folder / "a.html") as opened:
        page = opened.page
        page.get_by_label("Order").select_option("-reward")
        assert shown(page, "reward") == ["0.25", "-1.0", "nan", "None", "inf"]
        page.get_by_label("Reward from").fill("-5")
        assert shown(page, "reward") == ["0.25", "-1.0"]


def test_without_scripts_all_completions_can_be_opened(browser, reports):
    page = browser.new_page(java_script_enabled=False)
    page.goto(reports["rewards"].as_uri())
    assert page.locator("details.sample").count() == 40
    assert not page.locator(".filter").is_visible()
    page.locator(".sample summary").nth(2).click()
    assert page.locator(".sample pre").nth(5).inner_text() == "It is 3."
    page.close()


def test_a_zoom_outlives_a_reload(browser, reports):
    limits = "() => document.querySelector('.chart')._fullLayout.xaxis.range"
    with Opened(browser, reports["one"]) as opened:
        page = opened.page
        page.focus(".chart")
        page.keyboard.press("+")
        page.wait_for_function(
            "() => Object.keys(sessionStorage).some(k => k[0] === 'z')"
        )
        zoomed = page.evaluate(limits)
        page.reload()
        page.wait_for_selector("html[data-drawn]")
        assert page.evaluate(limits) == zoomed


def test_a_printed_report_shows_its_tables(browser, reports):
    with Opened(browser, reports["one"]) as opened:
        opened.page.emulate_media(media="print")
        opened.page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert opened.page.locator("details:not([open])").count() == 0
        assert not opened.page.is_visible("nav")
        assert opened.page.evaluate(OVERFLOWS) == []
