# SPDX-License-Identifier: Apache-2.0
"""What models wrote: texts of the log, and completions with their rewards."""

from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Final

from tessera.train.report.charts import number
from tessera.train.report.markup import Html, join, paragraph, text
from tessera.train.report.run_files import RunFiles
from tessera.train.report.samples_file import Sample, evenly

_MOST_TEXTS: Final = 20
_MOST_BYTES: Final = 2**21


def samples(runs: Sequence[RunFiles]) -> Html:
    """What the models continued their prompts with, and the rewards it got."""
    rewarded = [run for run in runs if run.samples.total]
    parts = [_browser(run, _MOST_BYTES // len(rewarded)) for run in rewarded]
    for run in runs:
        found = run.of_kind("sample")
        if len(found) > _MOST_TEXTS:
            parts.append(paragraph(f"{run.name}: the last {_MOST_TEXTS} samples."))
        for event in found[-_MOST_TEXTS:]:
            prompt, words = event.get("prompt", ""), event.get("text", "")
            parts.append(
                Html(
                    f"<h3>{text(run.name)}, step {text(event.get('step', '?'))}</h3>"
                    f'<pre tabindex="0"><b>{text(prompt)}</b>{text(words)}</pre>'
                )
            )
    return join(parts or [paragraph("No text was sampled.")])


def _browser(run: RunFiles, most_bytes: int) -> Html:
    """The completions of a run, which the page's script filters and sorts."""
    chosen = shown = [*map(_completion, run.samples.chosen)]
    while (size := sum(len(each.encode()) for each in shown)) > most_bytes:
        shown = evenly(chosen, min(len(shown) * most_bytes // size, len(shown) - 1))
    words = f"{len(shown):,} of {run.samples.total:,} completions that the run kept"
    if left_out := run.samples.total - len(shown):
        words += f", spread over its steps; {left_out:,} are left out"
    if repeated := run.samples.repeated:
        words += f"; {repeated:,} more are of steps that a later attempt repeated"
    name, samples = text(run.name), join(shown)
    return _filled("samples", name=name, words=text(words), samples=samples)


def _completion(sample: Sample) -> Html:
    """A line to open; a number that is missing is no number for the page's script."""
    numbers = ", ".join(f"{name} {number(value)}" for name, value in sample.numbers)
    return _filled(
        "sample",
        step=text(sample.step),
        reward=text(sample.reward),
        shown=number(sample.reward),
        words=text(" ".join(sample.completion.split())[:80]),
        numbers=text(numbers + ", cut at the most tokens" * sample.is_cut),
        prompt=text(sample.prompt),
        completion=text(sample.completion),
    )


def _filled(template: str, /, **parts: str) -> Html:
    """A template beside this module, with pieces of HTML."""
    path = Path(__file__).with_name(f"{template}.html")
    return Html(Template(path.read_text("utf-8")).substitute(parts))
