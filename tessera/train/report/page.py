# SPDX-License-Identifier: Apache-2.0
"""The report as one HTML file: sections in ``page.html``, and Plotly.

The page may load nothing and run only the scripts that are written here: a policy in
its head says so to the browser, should a text ever escape from its place.
"""

import logging
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from string import Template
from typing import Final, TypeAlias

from tessera.errors import OutputPathError
from tessera.train.report import configuration, curves, history, samples, summary
from tessera.train.report.markup import Html, join, paragraph, text
from tessera.train.report.run_files import RunFiles, read_run

_log: Final = logging.getLogger("tessera")
_Section: TypeAlias = Callable[[Sequence[RunFiles]], Html]
_SECTIONS: Final[Mapping[str, _Section]] = {
    "Summary": summary.summary,
    "Rewards": curves.rewards,
    "Loss and gradients": curves.learning,
    "Throughput and step time": curves.speed,
    "Compiled step": configuration.compiled_step,
    "Goodput": history.goodput,
    "Starts, stops and warnings": history.events,
    "Samples": samples.samples,
    "Configuration": configuration.settings,
    "Environment": configuration.environment,
}


def write_report(folders: Sequence[Path], output: Path) -> None:
    """Write the report of runs, so that a reader sees the old file or the new one.

    Args:
      folders: Those of the runs; the same one twice counts once.
      output: The HTML file.

    Raises:
      OutputPathError: [T504] a folder is not that of a run, or the file cannot be
        written.
    """
    unique = {folder.resolve(): folder for folder in folders}
    names: Iterable[str] = map(_short, unique)
    if len(unique) > 1:  # what tells them apart
        common = os.path.commonpath(unique)
        names = (os.path.relpath(path, common) for path in unique)
    page = report_page([*map(read_run, unique.values(), names)])
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


def report_page(runs: Sequence[RunFiles]) -> Html:
    """The whole file.

    Args:
      runs: At least one.
    """
    from plotly.offline import get_plotlyjs  # here, as it is needed by reports alone

    template, style, script = (
        Path(__file__).with_suffix(kind).read_text(encoding="utf-8")
        for kind in (".html", ".css", ".js")
    )
    made = {title: _section(title, make, runs) for title, make in _SECTIONS.items()}
    page = Template(template).substitute(
        title=text(f"Report of {', '.join(run.name for run in runs)}"),
        written=f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
        nonce=secrets.token_urlsafe(16),
        links=join(
            Html(f'<li><a href="#{_key(title)}">{title}</a></li>')
            for title, section in made.items()
            if section
        ),
        sections=join(made.values()),
        style=style,
        script=script,
        plotly=get_plotlyjs(),
    )
    return Html(page)


def _short(folder: Path) -> str:
    """The path of a run below ``outputs``, or the name of its folder."""
    parts = folder.parts
    below = parts.index("outputs") + 1 if "outputs" in parts else -1
    return "/".join(parts[below:])


def _section(title: str, make: _Section, runs: Sequence[RunFiles]) -> Html:
    """A section, or a sentence where a file holds values of other types than ours.

    A section is left out where it makes nothing of the runs.
    Such a file may be of another version, or changed by hand: the other sections show.
    """
    try:
        body = make(runs)
    except Exception as error:
        _log.debug("the section %r of the report", title, exc_info=error)
        reason = f"{type(error).__name__}: {error}"[:300]
        body = paragraph(
            f"This section cannot be shown, as a file is not as expected: {reason}",
            "warning",
        )
    if not body:
        return body
    key = _key(title)
    return Html(
        f'<section id="{key}" aria-labelledby="{key}-title">'
        f'<h2 id="{key}-title">{title}</h2>{body}</section>'
    )


def _key(title: str) -> str:
    return title.lower().replace(" ", "-").replace(",", "")
