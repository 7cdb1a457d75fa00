# SPDX-License-Identifier: Apache-2.0
"""Open every page of the built site in headless Chromium and report what is broken.

    python docs/_ext/browse.py docs/_build/html [PAGE ...]

Checks, at 1,300 and at 400 pixels: every internal link leads to a page and a place on
it; every image loads; no script fails; nothing is wider than the page or clipped
without a scroll bar of its own. ``CHROMIUM`` names a browser; otherwise one on PATH, or
Playwright's own (``playwright install chromium``).
"""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

from playwright.sync_api import sync_playwright

WIDTHS = (1300, 400)

# What is wider than the window without anything around it that scrolls, and what hides
# a part of its text. Furo's drawers lie outside of the window on a phone.
FIND_CLIPPED = """
() => {
  const found = [];
  const page = document.documentElement;
  if (page.scrollWidth > page.clientWidth + 1) {
    found.push(`the page is ${page.scrollWidth} px wide`);
  }
  const scrolls = (e) => ['auto', 'scroll'].includes(getComputedStyle(e).overflowX);
  for (const e of document.querySelectorAll('article *')) {
    const box = e.getBoundingClientRect();
    if (!box.width || !box.height || e.closest('.headerlink, .copybtn, svg')) continue;
    let holder = e.parentElement;
    while (holder && holder.tagName !== 'BODY' && !scrolls(holder)) {
      holder = holder.parentElement;
    }
    const inScroll = holder && holder.tagName !== 'BODY' && scrolls(holder);
    const name = `${e.tagName.toLowerCase()}.${e.className}`.slice(0, 60);
    const words = e.textContent.trim().slice(0, 50);
    if (!inScroll && box.right > page.clientWidth + 1) {
      found.push(`${name} ends at ${Math.round(box.right)} px: ${words}`);
    }
    const style = getComputedStyle(e);
    const hides = ['hidden', 'clip'].includes(style.overflowX);
    if (hides && style.display !== 'inline' && e.scrollWidth > e.clientWidth + 1) {
      found.push(`${name} clips its content: ${words}`);
    }
  }
  for (const image of document.images) {
    if (!image.complete || !image.naturalWidth) found.push(`no image: ${image.src}`);
  }
  return [...new Set(found)].slice(0, 5);
}
"""

FIND_LINKS = """
() => [...document.querySelectorAll('a[href]')].map((a) => a.href)
"""
FIND_ANCHORS = "() => [...document.querySelectorAll('[id]')].map((e) => e.id)"


def start(playwright: Any) -> Any:
    """A headless Chromium: the one of ``CHROMIUM``, of PATH, or Playwright's own."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = os.environ.get("CHROMIUM") or next(
        filter(None, map(shutil.which, names)), None
    )
    # As root, as in a container, Chromium has no sandbox; it opens local files alone.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    return playwright.chromium.launch(executable_path=path, args=arguments)


def note(shown: list[str]) -> Callable[[Any], None]:
    """A handler that keeps what a page's script failed with."""
    return lambda error: shown.append(f"script: {error}")


def main(folder: Path, names: list[str]) -> int:
    """Check the pages; the number of problems, at most 1."""
    pages = [folder / n for n in names] or sorted(folder.rglob("*.html"))
    problems: list[str] = []
    links: dict[str, set[str]] = {}
    anchors: dict[str, set[str]] = {}
    with sync_playwright() as playwright:
        browser = start(playwright)
        for width in WIDTHS:
            page = browser.new_page(viewport={"width": width, "height": 900})
            page.on("pageerror", note(shown := []))
            # Nothing is loaded from elsewhere.
            page.route(
                lambda url: not url.startswith(("file:", "data:")),
                lambda route: route.abort(),
            )
            for path in pages:
                shown.clear()
                url = path.absolute().as_uri()
                page.goto(url, wait_until="load")
                name = path.relative_to(folder)
                found = [*page.evaluate(FIND_CLIPPED), *shown]
                problems += [f"{name} at {width}: {text}" for text in found]
                if width == WIDTHS[0]:
                    anchors[url] = set(page.evaluate(FIND_ANCHORS))
                    for link in page.evaluate(FIND_LINKS):
                        links.setdefault(link, set()).add(str(name))
            page.close()
        browser.close()
    for link, sources in sorted(links.items()):
        if not link.startswith("file:"):
            continue
        target, fragment = urldefrag(link)
        path = Path(unquote(target.removeprefix("file://")))
        if not path.is_file():
            problems.append(f"{min(sources)}: no such page: {link}")
        elif (
            fragment and target in anchors and unquote(fragment) not in anchors[target]
        ):
            problems.append(f"{min(sources)}: no such place: {link}")
    for problem in problems:
        print(problem)  # noqa: T201
    print(f"{len(pages)} pages, {len(links)} links, {len(problems)} problems")  # noqa: T201
    return min(len(problems), 1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
