# SPDX-License-Identifier: Apache-2.0
"""What must hold of the repository itself: sizes, names, imports, errors, passes."""

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import tessera
from tessera import arrays, errors
from tessera.foundations import dtypes
from tessera.graph.pass_runner import PASSES

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tessera"
SOURCES = sorted(PACKAGE.rglob("*.py"))
MODULES = [
    path
    for path in SOURCES
    if path.name != "__init__.py" or path.parent == PACKAGE  # the others are maps
]
PROGRAMS = [
    *SOURCES,
    ROOT / "run_training.py",
    *sorted(ROOT.glob("benchmarks/**/*.py")),
]
EVERYTHING = [*PROGRAMS, *sorted(ROOT.glob("tests/**/*.py")), ROOT / "docs/conf.py"]

# File -> why it may be longer than the limit. Splitting comes first.
LONG_MODULES: dict[str, str] = {}

# Error class -> why nothing raises it.
NEVER_RAISED = {"TesseraError": "the base of the others"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def num_lines_of_code(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from ``def`` to the end, without the docstring."""
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        lines -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
    return lines


# --- sizes and names


def test_a_module_has_at_most_500_lines():
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in PROGRAMS}
    too_long = {name: n for name, n in lengths.items() if n > 500}
    assert set(too_long) == set(LONG_MODULES), too_long


def test_the_program_reads_as_one_page():
    for name in ("run_training.py", "tessera/train/loop/train.py"):
        assert len((ROOT / name).read_text().splitlines()) <= 150


def test_a_package_file_holds_a_map_and_no_logic():
    logic = (ast.FunctionDef, ast.ClassDef, ast.If, ast.For, ast.While, ast.Try)
    for path in (p for p in SOURCES if p.name == "__init__.py"):
        assert len(path.read_text().splitlines()) <= 80, name_of(path)
        found = [n for n in ast.walk(parsed(path)) if isinstance(n, logic)]
        assert not found, f"{name_of(path)}:{found[0].lineno}"


@pytest.mark.slow(reason="it reads every module")
def test_a_function_has_at_most_80_lines_of_code():
    too_long = [
        f"{name_of(path)}:{function.lineno} {function.name}: {n} lines"
        for path in PROGRAMS
        for function in functions(path)
        if (n := num_lines_of_code(function)) > 80
    ]
    assert not too_long, "\n".join(too_long)


def test_no_module_is_a_drawer_for_odds_and_ends():
    drawer = re.compile(r"(^|_)(utils?|common|helpers?|misc|tools)(_|$)")
    places = {part for path in EVERYTHING for part in Path(name_of(path)).parts}
    assert not [name for name in places if drawer.search(name.removesuffix(".py"))]


def test_every_file_begins_with_its_license():
    line = "# SPDX-License-Identifier: Apache-2.0\n"
    for path in EVERYTHING:
        assert path.read_text().startswith(line), name_of(path)


def test_the_public_names_are_these():
    assert sorted(tessera.__all__) == sorted(
        [
            "DistTensor",
            "Mesh",
            "ShardSpec",
            "Tensor",
            "TesseraError",
            "TesseraWarning",
            "__version__",
            "accumulate_gradients",
            "amp",
            "autocast",
            "checkpoint",
            "clip_by_global_norm",
            "compare_layouts",
            "dist",
            "distribute",
            "distributed",
            "function",
            "global_norm",
            "grad",
            "graph",
            "jit",
            "mesh",
            "nn",
            "op",
            "remat",
            "schedule",
            "value_and_grad",
            *arrays.__all__,
            *dtypes.__all__,
        ]
    )
    for name in tessera.__all__:
        assert hasattr(tessera, name)


# --- what imports what


def test_imports_go_one_way():
    """The contracts of pyproject.toml: layers, stages, passes, runtime, facades."""
    program = "from importlinter.cli import lint_imports_command as run; run()"
    result = subprocess.run(
        [sys.executable, "-c", program, "--no-cache", "--no-logo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


@pytest.mark.full
def test_every_library_that_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {
        re.split(r"[\[<>=]", requirement)[0].lower()
        for requirement in (
            *project["dependencies"],
            *project["optional-dependencies"]["train"],
            *project["optional-dependencies"]["tokenizers"],
            *project["optional-dependencies"]["hub"],
        )
    }
    distributions = packages_distributions()
    declared |= {"jaxlib"}  # comes with jax
    for path in SOURCES:
        for node in ast.walk(parsed(path)):
            match node:
                case ast.Import(names=aliases):
                    modules = [alias.name for alias in aliases]
                case ast.ImportFrom(module=str(module), level=0):
                    modules = [module]
                case _:
                    continue
            for module in modules:
                top = module.partition(".")[0]
                if top in sys.stdlib_module_names or top == "tessera":
                    continue
                owners = {owner.lower() for owner in distributions.get(top, [top])}
                assert owners & declared, f"{name_of(path)}:{node.lineno} {module}"


@pytest.mark.parametrize("python", ["py311", "py312"])
def test_a_set_of_versions_pins_every_library_that_is_declared(python):
    lines = (ROOT / f"constraints/{python}.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for line in (
        *project["dependencies"],
        *(
            line
            for extra in ("train", "tokenizers", "hub", "dev", "docs")
            for line in extras[extra]
        ),
    ):
        requirement = Requirement(line)
        if requirement.name != "tessera-spmd":
            version = versions[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version), line


PROBE = """
import json, os, sys
import jax
environment, settings = dict(os.environ), dict(jax.config.values)
loaded = set(sys.modules)
import tessera
loaded = set(sys.modules) - loaded
from jax.extend import backend
from tessera.jax_compat import jaxprs
print(json.dumps({
    "environment": dict(os.environ) != environment,
    "settings": [k for k, v in dict(jax.config.values).items() if settings.get(k) != v],
    "loaded": sorted(loaded),
    "backend": jaxprs.backend_started(),
}))
"""


@pytest.fixture(scope="module")
def imported() -> dict:
    """What ``import tessera`` did after ``import jax``, in a fresh process."""
    command = [sys.executable, "-c", PROBE]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


@pytest.mark.full
def test_importing_tessera_changes_nothing_and_starts_nothing(imported):
    assert not imported["environment"]
    assert imported["settings"] == []
    assert not imported["backend"]


def test_importing_tessera_loads_no_library_but_jax_and_numpy(imported):
    loaded = {name.partition(".")[0] for name in imported["loaded"]}
    outside = loaded - sys.stdlib_module_names - {"tessera"}
    assert outside <= {"jax", "jaxlib", "numpy"}


# Modules that ask for much more of the machine than the rest of an import together.
HEAVY = (
    "asyncio",
    "jax._src.pallas.mosaic.lowering",
    "jax._src.pallas.mosaic_gpu.lowering",
    "jax.experimental.mosaic",
    "jax.experimental.pallas",
    "multiprocessing",
    "tessera.analysis.ledger",
    "tessera.train.models",
    "tessera.train.runtime",
    "tessera.train.loop.training_loop",
)


def test_importing_tessera_loads_nothing_heavy(imported):
    loaded = [f"{name}." for name in imported["loaded"]]
    assert [
        name for name in HEAVY if any(m.startswith(f"{name}.") for m in loaded)
    ] == []
    # What JAX has for those who extend it, and little beside.
    assert sum(name.startswith("jax") for name in loaded) <= 40


# --- errors

ERRORS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.TesseraError)
}
CODES = [kind.code for kind in ERRORS.values() if kind is not errors.TesseraError]


def test_every_error_has_a_code_of_its_own():
    assert len(set(CODES)) == len(CODES)
    assert all(re.fullmatch(r"T[1-9]\d\d", code) for code in CODES)
    assert sorted(CODES) == CODES, "in order, section by section"


def test_every_error_is_a_value_error_or_a_type_error():
    for name, kind in ERRORS.items():
        if name != "TesseraError":
            assert issubclass(kind, (ValueError, TypeError, AttributeError)), name


def test_every_code_has_a_page_and_every_page_a_code():
    pages = sorted(path.stem for path in (ROOT / "docs/errors").glob("T*.md"))
    assert pages == sorted(CODES)


@pytest.mark.parametrize("code", CODES)
def test_an_error_page_says_what_happened_shows_it_and_mends_it(code):
    lines = (ROOT / f"docs/errors/{code}.md").read_text().splitlines()
    assert re.fullmatch(rf"# {code}: \S.+", lines[0])
    sections = [line.removeprefix("## ") for line in lines if line.startswith("## ")]
    required = ["What happened", "An example that fails", "How to fix it"]
    assert [name for name in sections if name in required] == required
    example = "\n".join(lines).split("## An example that fails")[1].split("\n## ")[0]
    assert re.search(r"```(python|sh)\n.+?\n```", example, re.DOTALL)


@pytest.mark.slow(reason="it reads every module")
def test_every_error_is_raised_somewhere():
    used = {
        node.id
        for path in PROGRAMS
        if path.parent.name != "errors"
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Name)
    }
    assert set(ERRORS) - used - set(NEVER_RAISED) == set()


def test_a_docstring_names_no_code_that_does_not_exist():
    known = {*CODES, "T000"}
    for path in [*PROGRAMS, *sorted(ROOT.glob("docs/**/*.md")), ROOT / "README.md"]:
        named = set(re.findall(r"\bT\d\d\d\b", path.read_text()))
        assert named <= known, f"{name_of(path)}: {named - known}"


# --- passes

PASS_FILES = sorted(
    path
    for path in (PACKAGE / "graph/passes").glob("*.py")
    if path.name != "__init__.py"
)


def test_every_pass_is_in_the_one_tuple_and_in_a_file_of_its_name():
    assert sorted(apply.__name__ for apply in PASSES) == [p.stem for p in PASS_FILES]
    for apply in PASSES:
        assert apply.__module__ == f"tessera.graph.passes.{apply.__name__}"


@pytest.mark.parametrize("path", PASS_FILES, ids=lambda path: path.stem)
def test_a_file_of_a_pass_defines_that_pass_and_nothing_else_public(path):
    module = importlib.import_module(f"tessera.graph.passes.{path.stem}")
    public = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    ]
    assert public == [path.stem]


@pytest.mark.parametrize("apply", PASSES, ids=lambda apply: apply.__name__)
def test_a_pass_says_what_it_changes_and_what_becomes_of_numbers(apply):
    text = inspect.getdoc(apply) or ""
    assert re.search(r"^Before:  ", text, re.MULTILINE)
    assert re.search(r"^After:   ", text, re.MULTILINE)
    assert re.search(r"Numerics: (exact|reordered|changed)", text)
