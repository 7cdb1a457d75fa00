# SPDX-License-Identifier: Apache-2.0
"""``tessera explain`` prints an error's page, in a wheel as in a checkout."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tessera.__main__ import main
from tessera.errors import NoMeshError, base
from tessera.errors.explain import explain

ROOT = Path(__file__).parents[2]


def test_a_code_prints_its_page_with_links_that_open(capsys):
    assert main(["explain", "t201"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("# T201: a dim does not divide\n\n## What happened\n")
    assert f"]({base.SITE}/concepts/parallelism.html)" in shown
    assert ".md)" not in shown
    assert explain("[T201]") == shown


def test_without_a_code_all_are_listed(capsys):
    assert main(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "T201: a dim does not divide" in lines
    assert len(lines) == len(list((ROOT / "docs/errors").glob("T*.md")))


def test_an_unknown_code_is_a_coded_error(capsys):
    assert main(["explain", "T299"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("[T501] there is no error 'T299'\n  fix: 'tessera explain'")


def test_an_error_names_the_page_on_the_declared_site():
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    assert urls["Documentation"] == base.SITE
    shown = str(NoMeshError("a mesh has no axes"))
    assert shown.endswith(f"\n  docs: {base.SITE}/errors/{NoMeshError.code}.html")


@pytest.mark.slow(reason="it starts Python")
def test_an_installed_package_has_the_pages_and_needs_no_jax(tmp_path):
    """As a wheel is unpacked: the package, and the folders that it forces in."""
    ignored = shutil.ignore_patterns("__pycache__", "train")
    shutil.copytree(ROOT / "tessera", tmp_path / "tessera", ignore=ignored)
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]
    included = wheel["build"]["targets"]["wheel"]["force-include"]
    shutil.copytree(ROOT / "docs/errors", tmp_path / included["docs/errors"])
    program = (
        "import sys\nsys.modules |= dict.fromkeys(('jax', 'numpy', 'hydra'))\n"
        "from tessera.__main__ import main\nmain(['explain', 'T802'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("# T802: ")
