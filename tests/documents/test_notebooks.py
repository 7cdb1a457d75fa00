# SPDX-License-Identifier: Apache-2.0
"""The notebooks of the documentation run, and show what they are stored with."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents.shown_output import agrees

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
RUNNER = Path(__file__).with_name("run_notebook.py")
# With the commands that are installed beside this interpreter.
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
NOT_INSTALLED = "Transformers is not installed"
# Stored with their outputs, as the build of the documentation runs them no more.
WITH_OUTPUTS = {"fine-tune", "teach-arithmetic"}
SAMPLED = {"teach-arithmetic"}  # its numbers are of what a model draws
SHOWN = {
    "fine-tune": ("step   0  validation 6.48", "The opposite of cold is hot."),
    "one-to-eight-devices": (
        "devices 0, 4 hold the same block",  # inspect
        *("--- before differentiate_losses", '[{"dp"}, {"tp"}]'),  # trace
        "all-reduce  tp",
        *("communication over dp", "FLOPs"),  # profile
        *("no difference in", "made by dot_general at"),  # compare_layouts
    ),
    "own-pipeline": (
        *("device 3 |", "4 microbatches: idle 43%", "the losses agree"),
        *("collective-permute  pp", "[T3"),
    ),
    "teach-arithmetic": (
        *('{"prompt": "3+4=", "text": "8"}', '{"prompt": "3+4=", "text": "7"}'),
        *("the last ten above 0.9: True", "groups_without_variance      0.00     1.00"),
    ),
    "unwanted-collective": (
        *("UNPLANNED", "all-gather over ('tp',) 65536 bytes at"),
        "all-gather True 2048",
    ),
}


def cells(notebook, kind="code"):
    stored = json.loads(notebook.read_text())
    assert stored["nbformat"] == 4
    return [cell for cell in stored["cells"] if cell["cell_type"] == kind]


def run(path):
    """Every cell in a process of its own, where a warning is an error."""
    return subprocess.run(
        [sys.executable, "-W", "error", str(RUNNER), str(path)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PATH": PATH},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def test_there_are_five_tutorials():
    assert [path.stem for path in NOTEBOOKS] == [*SHOWN]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_build_of_the_documentation_makes_outputs_or_they_are_stored(notebook):
    stored = notebook.stem in WITH_OUTPUTS
    assert any(cell["outputs"] for cell in cells(notebook)) == stored
    pattern = f'"notebooks/{notebook.stem}.ipynb"'
    assert (pattern in (ROOT / "docs/conf.py").read_text()) == stored


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_site_and_the_readme_link_to_a_notebook(notebook):
    assert f"\nnotebooks/{notebook.stem}\n" in (ROOT / "docs/index.md").read_text()
    assert f"(docs/notebooks/{notebook.name})" in (ROOT / "README.md").read_text()


@pytest.mark.full  # the build of the documentation runs them too
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_it_speaks_of(notebook):
    result = run(notebook)
    assert result.returncode == 0, result.stderr
    shown = dict(
        part.split("\n", 1) for part in result.stdout.split("--- cell ") if part
    )
    assert len(shown) == len(cells(notebook))
    pages = "\n".join(shown.values())
    for text in SHOWN[notebook.stem]:
        assert text in pages, text
    if notebook.stem in WITH_OUTPUTS:
        for cell, printed in zip(cells(notebook), shown.values(), strict=True):
            shows = output_of(cell)
            if notebook.stem in SAMPLED:
                assert bool(shows) == bool(printed)
            else:
                assert agrees(shows, printed) or printed == f"{NOT_INSTALLED}\n"


def output_of(cell):
    """What is stored as the output of a cell."""
    return "".join(line for one in cell["outputs"] for line in one["text"])


def test_a_cell_that_fails_is_named(tmp_path):
    code = {"cell_type": "code", "source": ["x = 1\n", "assert x == 2\n"]}
    text = {"cell_type": "markdown", "source": ["words"]}
    path = tmp_path / "wrong.ipynb"
    path.write_text(json.dumps({"cells": [text, code]}))
    result = run(path)
    assert result.returncode == 1
    assert 'File "wrong-1", line 2, in <module>\n' in result.stderr
    assert result.stderr.endswith("AssertionError\n")
