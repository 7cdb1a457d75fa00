# SPDX-License-Identifier: Apache-2.0
"""The notebooks of the documentation run, and are stored as they were written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
RUNNER = Path(__file__).with_name("run_notebook.py")


def cells(notebook, kind="code"):
    stored = json.loads(notebook.read_text())
    assert stored["nbformat"] == 4
    return [cell for cell in stored["cells"] if cell["cell_type"] == kind]


def run(path):
    """Every cell in a process of its own, where a warning is an error."""
    return subprocess.run(
        [sys.executable, "-W", "error", str(RUNNER), str(path)],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_there_is_one_that_goes_from_one_device_to_eight():
    assert [path.stem for path in NOTEBOOKS] == ["one-to-eight-devices"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_what_it_printed(notebook):
    for cell in cells(notebook):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_page_of_the_guide_links_to_a_notebook(notebook):
    pages = [path.read_text() for path in (ROOT / "docs").glob("*.md")]
    assert any(f"](notebooks/{notebook.name})" in page for page in pages)


def test_the_notebook_runs_and_shows_what_it_speaks_of():
    (notebook,) = NOTEBOOKS
    result = run(notebook)
    assert result.returncode == 0, result.stderr
    shown = dict(
        part.split("\n", 1) for part in result.stdout.split("--- cell ") if part
    )
    assert len(shown) == len(cells(notebook))
    pages = "\n".join(shown.values())
    for text in (
        *("devices 0, 4 hold the same block", "hsla(90,70%,50%,.3)"),  # inspect
        *("--- before differentiate_losses", "all-reduce tp"),  # trace
        *("communication over dp", "FLOPs"),  # profile
        *("no difference in", "made by dot_general at"),  # compare_layouts
    ):
        assert text in pages, text


def test_a_cell_that_fails_is_named(tmp_path):
    code = {"cell_type": "code", "source": ["x = 1\n", "assert x == 2\n"]}
    text = {"cell_type": "markdown", "source": ["words"]}
    path = tmp_path / "wrong.ipynb"
    path.write_text(json.dumps({"cells": [text, code]}))
    result = run(path)
    assert result.returncode == 1
    assert 'File "wrong-1", line 2, in <module>\nAssertionError' in result.stderr
