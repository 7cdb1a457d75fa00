# SPDX-License-Identifier: Apache-2.0
"""Published runs are predicted within stated bounds, in their order."""

import importlib
import statistics
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def published():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield importlib.import_module("planner_published")


@pytest.mark.full
def test_published_runs_are_predicted(published):
    found = {
        title: published.rows_of(runs) for title, runs in published.tables().items()
    }
    errors = [abs(row["error %"]) for rows in found.values() for row in rows]
    assert len(errors) == 30
    assert statistics.median(errors) < 15
    for row in published.summary(found)[:-1]:
        assert row["Spearman"] >= 0.9, row["table"]


def test_ranks_are_compared_and_not_values(published):
    assert published.spearman([1, 2, 3], [10, 20, 1000]) == pytest.approx(1)
    assert published.spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
