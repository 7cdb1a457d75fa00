# SPDX-License-Identifier: Apache-2.0
"""Opens reports in headless Chromium, for the tests and for a look at them."""

import os
import shutil
from typing import Any

# What ends right of the window with nothing around it that scrolls or hides.
OVERFLOWS = """() => {
  const page = document.documentElement, found = [];
  if (page.scrollWidth > page.clientWidth + 1) found.push(`page: ${page.scrollWidth}`);
  for (const e of document.querySelectorAll("body *")) {
    const box = e.getBoundingClientRect();
    if (!box.width || e.closest(".scroll, .chart, .skip, pre")) continue;
    if (box.right > page.clientWidth + 1) found.push(`${e.tagName}.${e.className}`);
  }
  return found.slice(0, 5);
}"""

# Words and numbers of tables that go on in the next line.
BROKEN_WORDS = """() => {
  document.querySelectorAll("details").forEach((each) => { each.open = true; });
  const found = [], range = document.createRange();
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text; (text = texts.nextNode());) {
    if (!text.parentElement.closest("table")) continue;
    for (const word of text.data.matchAll(/[\\w.,%]{2,22}/g)) {
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      const tops = [...range.getClientRects()].map((box) => Math.round(box.top));
      if (new Set(tops).size > 1) found.push(word[0]);
    }
  }
  return found.slice(0, 5);
}"""

# The points that Plotly drew, for each chart.
POINTS = """() => [...document.querySelectorAll(".chart")].map((chart) => [
  chart.getAttribute("aria-label").slice(0, 60),
  (chart.data || []).reduce((n, trace) => n + trace.x.length, 0),
  chart.querySelectorAll(".scatterlayer .trace, .barlayer .trace").length,
])"""

# The lowest ratio of contrast of text to the ground that is behind it.
CONTRASTS = """() => {
  const parse = (c) => c.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const color = parse(getComputedStyle(e).backgroundColor);
      if (color.length < 4 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || e.closest("script, noscript")) continue;
    const isSvg = e.namespaceURI.endsWith("svg");
    const ink = parse(getComputedStyle(e)[isSvg ? "fill" : "color"]);
    const [a, b] = [light(ink), light(ground(e))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    const words = e.textContent.slice(0, 30);
    if (ratio < 4.5) found.push([ratio.toFixed(2), e.tagName, words]);
  }
  return found.slice(0, 5);
}"""


def chromium(playwright: Any) -> Any:
    """The Chromium of ``CHROMIUM``, of PATH, or Playwright's own."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = os.environ.get("CHROMIUM") or next(
        filter(None, map(shutil.which, names)), None
    )
    # As root, as in a container, Chromium has no sandbox; it opens local files alone.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    return playwright.chromium.launch(executable_path=path, args=arguments)
