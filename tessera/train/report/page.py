# SPDX-License-Identifier: Apache-2.0
"""The report as one HTML file: sections, style, script and the plotting library.

The page may load nothing and run only the scripts that are written here: a policy in
its head says so to the browser, should a text ever escape from its place.
"""

import logging
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from tessera.errors import OutputPathError
from tessera.train.report import configuration, curves, devices, history, summary
from tessera.train.report.markup import Html, Section, join, paragraph, text
from tessera.train.report.run_files import RunFiles, read_run

_log: Final = logging.getLogger("tessera")
_SECTIONS: Final[tuple[tuple[str, Callable[[Sequence[RunFiles]], Section]], ...]] = (
    ("Summary", summary.summary),
    ("Loss and gradients", curves.learning),
    ("Throughput and step time", curves.speed),
    ("Memory", devices.memory),
    ("Mesh and communication", devices.mesh),
    ("Pipeline", devices.pipeline),
    ("Timeline of one step", devices.timeline),
    ("Goodput", history.goodput),
    ("Starts, stops and warnings", history.events),
    ("Samples", configuration.samples),
    ("Configuration", configuration.settings),
    ("Environment", configuration.environment),
)


def write_report(
    folders: Sequence[Path], output: Path, *, every: float | None = None
) -> None:
    """Write the report of runs, so that a reader sees the old file or the new one.

    Args:
      folders: Those of the runs; the same one twice counts once.
      output: The HTML file.
      every: Seconds until the page reads itself again; None never does.

    Raises:
      OutputPathError: [T504] a folder is not that of a run, or the file cannot be
        written.
    """
    unique = {folder.resolve(): folder for folder in folders}
    names: Iterable[str | None] = [None]
    if len(unique) > 1:  # what tells them apart
        common = os.path.commonpath(unique)
        names = (os.path.relpath(path, common) for path in unique)
    page = report_page([*map(read_run, unique.values(), names)], every)
    partial = output.with_name(f"{output.name}.{os.getpid()}.partial")
    try:
        partial.write_text(page, encoding="utf-8")
        partial.replace(output)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OutputPathError(
            "the report cannot be written",
            got=f"{output}: {error.strerror}",
            fix="make room, or name another file: --output=report.html",
        ) from error


def report_page(runs: Sequence[RunFiles], every: float | None = None) -> Html:
    """The whole file.

    Args:
      runs: At least one.
      every: Seconds until the page reads itself again; None never does.
    """
    from plotly.offline import get_plotlyjs  # here, as it is needed by reports alone

    sections = [_guarded(title, make, runs) for title, make in _SECTIONS]
    names = ", ".join(run.name for run in runs)
    nonce = secrets.token_urlsafe(16)
    here = Path(__file__)
    style, script = (
        here.with_suffix(kind).read_text(encoding="utf-8") for kind in (".css", ".js")
    )
    links = join(
        Html(f'<li><a href="#{s.key}">{text(s.title)}</a></li>') for s in sections
    )
    written = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    return Html(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{text(f"Report of {names}")}</title><link rel="icon" href="data:,">'
        f"<style>{style}</style></head>\n"
        '<body><a class="skip" href="#main">Skip to the content</a>'
        f"<header><h1>{text(f'Report of {names}')}</h1>"
        f"{paragraph(f'Written at {written}.', 'note')}{_follow(every)}"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav></header>\n'
        f'<main id="main" tabindex="-1">{_help()}'
        f"{join(section.as_html() for section in sections)}</main>\n"
        "<footer><p>Written by Tessera; charts by Plotly.js (MIT license).</p></footer>"
        f'\n<script nonce="{nonce}">{get_plotlyjs()}</script>\n'
        f'<script nonce="{nonce}">{script}</script></body></html>\n'
    )


def _guarded(
    title: str, make: Callable[[Sequence[RunFiles]], Section], runs: Sequence[RunFiles]
) -> Section:
    """A section, or a sentence where a file holds values of other types than ours.

    Such a file may be of another version, or changed by hand: the other sections show.
    """
    try:
        return make(runs)
    except Exception as error:
        _log.debug("the section %r of the report", title, exc_info=error)
        reason = f"{type(error).__name__}: {error}"[:300]
        sentence = (
            f"This section cannot be shown, as a file is not as expected: {reason}"
        )
        key = title.lower().replace(" ", "-").replace(",", "")
        return Section(key, title, paragraph(sentence, "warning"))


def _help() -> Html:
    return Html(
        "<noscript><p>The charts need JavaScript; their numbers stand in the tables."
        "</p></noscript>"
        + paragraph(
            "Charts: drag to zoom, double-click to see all. By keys, on a chart: + and "
            "- zoom, arrows move, 0 shows all. Each has its numbers in a table. A long "
            "curve is drawn by the lowest and highest value of each group of steps, so "
            "that no spike is lost.",
            "note",
        )
    )


def _follow(every: float | None) -> Html:
    if every is None:
        return Html("")
    return Html(
        f'<p class="watch"><label><input type="checkbox" id="follow" checked '
        f'data-seconds="{every:g}"> Reload every {every:g} seconds, unless a chart '
        "or a table is in use</label></p>"
    )
