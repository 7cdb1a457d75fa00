# SPDX-License-Identifier: Apache-2.0
"""Every Python block of the documentation runs, and does what its page says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tessera import dist
from tessera.errors import TesseraError

ROOT = Path(__file__).parent.parent
ERROR_PAGES = sorted((ROOT / "docs/errors").glob("T*.md"))
GUIDES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/data-parallel").glob("*.md")),
]

# Their cures begin before JAX has started, so each runs in a process of its own.
FRESH_PROCESS = {"T105"}


def python_blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def section(page: Path, title: str) -> str:
    return page.read_text().split(f"## {title}\n")[1].split("\n## ")[0]


def run(blocks: list[str], page: Path) -> None:
    """Run blocks in one namespace, with the page's own lines in tracebacks."""
    namespace: dict[str, object] = {"__name__": "example"}
    for block in blocks:
        before = page.read_text().split(block)[0].count("\n")
        exec(compile("\n" * before + block, str(page), "exec"), namespace)


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("page", ERROR_PAGES, ids=lambda page: page.stem)
def test_the_example_that_fails_raises_that_error(page):
    blocks = python_blocks(section(page, "An example that fails"))
    if not blocks:
        assert "```sh\npython run_training.py" in page.read_text()
        return
    with pytest.raises(TesseraError) as caught:
        run(blocks, page)
    assert caught.value.code == page.stem


@pytest.mark.parametrize("page", ERROR_PAGES, ids=lambda page: page.stem)
def test_the_cure_of_an_error_runs(page):
    blocks = python_blocks(section(page, "How to mend it"))
    if page.stem in FRESH_PROCESS:
        program = "\n".join(blocks)
        subprocess.run([sys.executable, "-c", program], check=True)
    else:
        run(blocks, page)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_the_examples_of_a_guide_run(page):
    run(python_blocks(page.read_text()), page)


def test_the_error_in_the_readme_is_the_real_one():
    mesh = dist.Mesh(axes=["dp", "tp"], shape=[4, 2])
    rows_over_tp = dist.ShardSpec(partition=("row",), mesh_axes=("tp",))
    with pytest.raises(TesseraError) as caught:
        dist.tensor((257, 64), rows_over_tp, mesh, init="normal", name="table")
    assert str(caught.value) in (ROOT / "README.md").read_text()


def test_the_readme_names_targets_that_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    for page in [*GUIDES, ROOT / "CONTRIBUTING.md"]:
        named = set(re.findall(r"^make ([a-z]+)", page.read_text(), re.MULTILINE))
        assert named <= targets, page.name


@pytest.mark.parametrize("page", [*GUIDES, *ERROR_PAGES], ids=lambda page: page.stem)
def test_a_link_to_a_file_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target
