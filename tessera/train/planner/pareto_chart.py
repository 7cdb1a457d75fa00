# SPDX-License-Identifier: Apache-2.0
"""Draws the layouts of an answer by time and memory, and the front of the best."""

from collections.abc import Mapping, Sequence
from typing import Any

from tessera.analysis.memory import format_bytes
from tessera.analysis.tables import format_seconds
from tessera.train.planner.answer import Answer, describe
from tessera.train.planner.search import Candidate
from tessera.train.report.charts import axis, label


def pareto_page(answer: Answer) -> str:
    """An HTML page of its own: seconds of a step against memory of a device, as logs.

    Each point says which layout it is; the line joins those that no other beats in
    both, and the dashed one is the memory of a device.
    """
    from plotly.io import to_html  # here, as it is needed by the page alone

    capacity = answer.target.machine.memory_bytes / 2**30
    name = f"{answer.space.config.model.name} on {answer.target.name}"
    traces = [
        _points("layouts", answer.found.best, mode="markers"),
        _points("best for their memory", answer.found.front, mode="lines+markers"),
    ]
    layout = {
        "title": {"text": label(f"{name}: a step, by layout")},
        "xaxis": axis("memory of a device, GiB", type="log"),
        "yaxis": axis("seconds", type="log"),
        "shapes": [
            {
                "type": "line",
                "x0": capacity,
                "x1": capacity,
                "yref": "paper",
                "y0": 0,
                "y1": 1,
                "line": {"dash": "dash"},
            }
        ],
    }
    return to_html({"data": traces, "layout": layout}, validate=False)


def _points(
    name: str, candidates: Sequence[Candidate], **options: Any
) -> Mapping[str, Any]:
    found = [each.prediction for each in candidates]
    texts = [
        f"{describe(each.layout)}: {format_seconds(each.prediction.seconds)}, "
        f"{format_bytes(each.prediction.memory_bytes)}"
        for each in candidates
    ]
    return {
        "type": "scatter",
        "name": name,
        "x": [each.memory_bytes / 2**30 for each in found],
        "y": [each.seconds for each in found],
        "text": [label(text, 200) for text in texts],
        "hoverinfo": "text",
        **options,
    }
