# SPDX-License-Identifier: Apache-2.0
"""Every Python block of the documentation runs, and prints what its page shows.

``tests/documents/shown_output.py`` says what of a page is output, and compares it.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import tessera as ts
from tessera import amp, arrays, dist, graph, nn, op
from tessera.__main__ import _COMMANDS as COMMANDS
from tessera.errors import TesseraError
from tessera.foundations import dtypes
from tessera.tracing import scope
from tessera.train.config.optimizer_config import OPTIMIZERS
from tessera.train.config.run_config import Config
from tessera.train.config.setting_fields import describe
from tests.documents import shown_output
from tests.documents.shown_output import python_blocks

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
ERROR_PAGES = sorted((DOCS / "errors").glob("T*.md"))
# Their steps call functions of the reader's; tests/documents/ has these, and runs them.
WITH_HELPERS = {"training-at-scale"}
PAGES = [
    ROOT / "README.md",
    *sorted(DOCS.glob("*.md")),
    *sorted((DOCS / "contributing").glob("*.md")),
    *(
        page
        for folder in ("start", "guides", "concepts", "reference", "api")
        for page in sorted((DOCS / folder).rglob("*.md"))
    ),
]
MAKES_FILES = {"fine-tune-from-nothing"}  # tests/documents/ runs it in a folder
GUIDES = [page for page in PAGES if page.stem not in WITH_HELPERS | MAKES_FILES]
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))

FIRST_READ = {
    *("quickstart-pytorch", "own-script", "install"),
    *("collectives", "memory", "index"),
}

# Their cures begin before JAX has started, so each runs in a process of its own.
FRESH_PROCESS = {"T105"}

RECIPE = """from tessera.dist import simulate_devices

simulate_devices(8)
"""


def section(page: Path, title: str) -> str:
    return page.read_text().split(f"## {title}\n")[1].split("\n## ")[0]


def run(text: str, page: Path) -> None:
    """Run blocks in one namespace, and compare what they print."""
    shown_output.run(text, page, {"__name__": "example"})


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(ROOT)
    schedule_before = scope.current_plan()
    yield
    scope.set_plan(schedule_before)


@pytest.mark.parametrize("page", ERROR_PAGES, ids=lambda page: page.stem)
def test_the_example_that_fails_raises_that_error(page):
    text = section(page, "An example that fails")
    if not python_blocks(text):
        assert "```sh\npython run_training.py" in page.read_text()
        return
    if page.stem == "T712" and find_spec("libtpu"):
        pytest.skip("the compiler that the page lacks is installed")
    with pytest.raises(TesseraError) as caught:
        run(text, page)
    assert caught.value.code == page.stem


@pytest.mark.full
@pytest.mark.parametrize("page", ERROR_PAGES, ids=lambda page: page.stem)
def test_the_cure_of_an_error_runs(page):
    text = section(page, "How to fix it")
    if page.stem in FRESH_PROCESS:
        program = "\n".join(python_blocks(text))
        subprocess.run([sys.executable, "-c", program], check=True)
    else:
        run(text, page)


def with_blocks(pages: list[Path]) -> list[Any]:
    """Pages with examples; those that are not read first only run in the full suite."""
    return [
        pytest.param(page, marks=[] if page.stem in FIRST_READ else pytest.mark.full)
        for page in pages
        if python_blocks(page.read_text())
    ]


@pytest.mark.slow(reason="some guides train a model")
@pytest.mark.parametrize("page", with_blocks(GUIDES), ids=lambda page: page.stem)
def test_the_examples_of_a_guide_run(page):
    run(page.read_text(), page)


def used_names(text: str) -> set[str]:
    """Dotted names, such as ``ts.nn.rms_norm``, in Python text."""
    return {
        ast.unparse(node)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute)
    }


FACADES: dict[str, ModuleType] = {
    "ts": ts,
    "ts.amp": amp,
    "ts.nn": nn,
    "dist": dist,
    "graph": graph,
    "op": op,
}
# Types that functions return, modules, and what measures or reads a run's folder.
NOT_IN_EXAMPLES = {
    *("DistTensor", "Inspection", "TesseraWarning", "autocast"),
    *("graph", "op", "schedule"),
}


def public_names(facade: str) -> set[str]:
    """The names of a facade that are no modules."""
    module = FACADES[facade]
    listed = getattr(module, "__all__", vars(module))
    names = {name for name in listed if not name.startswith("_")}
    return {n for n in names if not isinstance(getattr(module, n), ModuleType)}


@pytest.mark.parametrize("facade", FACADES)
def test_examples_that_run_use_every_public_name(facade):
    """But for array functions and dtypes, which are rows of one table."""
    text = "\n".join("\n".join(python_blocks(page.read_text())) for page in PAGES)
    used = used_names(text)
    used |= {name.replace("ts.distributed.", "dist.") for name in used}
    used |= {name.replace("dist.", "ts.") for name in used if name.startswith("dist.")}
    used |= {"ts.checkpoint"} if "ts.remat" in used else set()  # an alias
    # What both facades have is one function.
    used |= {name.replace("ts.nn.", "op.") for name in used}
    rows = {*arrays.__all__, *dtypes.__all__}
    names = public_names(facade) - NOT_IN_EXAMPLES - rows
    assert {name for name in names if f"{facade}.{name}" not in used} == set()


def needs_devices(page: Path) -> bool:
    text = "\n".join(python_blocks(page.read_text()))
    return re.search(r"\bMesh\(|distribute\(|op\.kernel", text) is not None


@pytest.mark.parametrize(
    "page", [*filter(needs_devices, PAGES)], ids=lambda page: page.stem
)
def test_a_page_that_needs_devices_starts_with_the_recipe(page):
    """So that its blocks run when they are pasted into a fresh Python."""
    assert python_blocks(page.read_text())[0].startswith(RECIPE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_begins_with_whom_it_is_for(page):
    """A title, and then a paragraph of at most three lines for the reader."""
    title, blank, *lines = page.read_text().splitlines()
    assert title.startswith("# ")
    assert blank == ""
    if page.name not in ("README.md", "benchmarks.md"):
        paragraph = " ".join(lines[: lines.index("")])
        assert re.match(r"For \w+", paragraph), paragraph
        assert len(paragraph) < 320


def generated(name: str) -> ModuleType:
    """A module of the documentation's own tools."""
    path = str(DOCS / "_ext")
    sys.path.insert(0, path)
    try:
        return __import__(name)
    finally:
        sys.path.remove(path)


def test_the_module_tree_has_every_module():
    text = generated("module_tree").as_markdown()
    rows = re.findall(r"^\| `(\w+\.py)` \| \S.+ \|$", text, re.MULTILINE)
    modules = [p for p in (ROOT / "tessera").rglob("*.py") if p.name != "__init__.py"]
    assert sorted(rows) == sorted(path.name for path in modules)
    packages = re.findall(r"^:::\{dropdown\} `(\S+)/` \S", text, re.MULTILINE)
    folders = {path.parent for path in (ROOT / "tessera").rglob("*.py")}
    assert sorted(packages) == sorted(f.relative_to(ROOT).as_posix() for f in folders)


def test_the_page_of_settings_has_a_table_of_every_group():
    page = (DOCS / "reference/configuration.md").read_text()
    tables = generated("settings_tables").tables()
    assert re.findall(r"\{include\} /_generated/(\S+)", page) == [*tables]
    alone = {"name", "rewards"}
    groups = [one.name for one in fields(Config) if one.name not in alone]
    assert sorted(tables) == sorted(f"settings-{group}.md" for group in groups)
    for text in tables.values():
        cells = re.findall(r"^\| `\S+` \| (.+) \| (.+) \| (.*) \|$", text, re.MULTILINE)
        assert len(cells) == text.count("\n| `")
        assert all(meaning for _, _, meaning in cells)
    for cls in OPTIMIZERS.values():
        for one in describe(cls):
            assert f"\n| `{one.name}` | {one.type} |" in tables["settings-optimizer.md"]


def test_the_figure_of_the_readme_is_what_the_script_draws():
    figures = generated("figures")
    stored = figures.README_FIGURE.read_text()
    assert stored == figures.mesh_and_array()
    assert "docs/images/mesh-and-array.svg" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("facade", FACADES)
def test_the_api_pages_have_every_public_name(facade):
    text = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    found = re.findall(r"^\.\. auto\w+:: (\S+)$", text, re.MULTILINE)
    listed = {n.rpartition(".")[2] for n in found}
    names = public_names(facade) - set(dtypes.__all__)
    assert {
        n for n in names if n not in listed and f"`{facade}.{n}`" not in text
    } == set()


def test_the_error_in_the_readme_is_the_real_one():
    mesh = dist.Mesh(axes=["dp", "tp"], shape=[4, 2])
    rows_over_tp = dist.ShardSpec(partition=("row",), mesh_axes=("tp",))
    with pytest.raises(TesseraError) as caught:
        dist.tensor((257, 64), rows_over_tp, mesh, init="normal", name="table")
    assert str(caught.value) in (ROOT / "README.md").read_text()


def test_the_readme_names_targets_that_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        named = set(re.findall(r"^make ([a-z]+)", page.read_text(), re.MULTILINE))
        assert named <= targets, page.name


def test_the_page_of_installing_lists_every_command():
    page = (DOCS / "start/install.md").read_text()
    listed = re.findall(r"^\| `tessera (\w+)", page, re.MULTILINE)
    assert sorted(listed) == sorted(COMMANDS)


def anchors(page: Path) -> set[str]:
    """What a link to a page may have after ``#``: its headings and its labels."""
    text = without_fences(page)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", one.lower()) for one in headings}
    labels = re.findall(r"^\(([\w-]+)\)=$", text, re.MULTILINE)
    return {slug.replace(" ", "-") for slug in slugs} | {*labels}


def without_fences(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def links_of(page: Path) -> list[tuple[str, str]]:
    """Target and anchor of each link, but of those to other sites."""
    return re.findall(r"\]\(([^)#:\s]*)#?([^):\s]*)\)", without_fences(page))


@pytest.mark.parametrize(
    "page",
    [*filter(links_of, [*PAGES, *ERROR_PAGES, ROOT / "CONTRIBUTING.md"])],
    ids=lambda page: page.stem,
)
def test_a_link_leads_somewhere(page):
    for target, anchor in links_of(page):
        if target.startswith("/_generated/"):  # made when the site is built
            name = target.rpartition("/")[2]
            assert name in generated("figures").FIGURES
            continue
        file = page.parent / target if target else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


def test_the_index_of_decisions_has_each_of_them():
    folder = DOCS / "contributing/decisions"
    listed = re.findall(r"\]\((0\d+-\S+\.md)\)", (folder / "index.md").read_text())
    assert sorted(listed) == sorted(path.name for path in folder.glob("0*.md"))
