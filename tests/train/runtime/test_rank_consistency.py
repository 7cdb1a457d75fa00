# SPDX-License-Identifier: Apache-2.0
"""The fingerprints of ranks, and how they are compared."""

import importlib
import platform
import sys

import jax

from tessera.train.runtime import rank_consistency
from tessera.train.runtime.cluster import Cluster
from tessera.train.runtime.rank_consistency import (
    code_fingerprint,
    device_fingerprint,
    difference_error,
    differences,
    module_fingerprint,
    version_fingerprint,
)


def test_versions_are_those_that_are_installed():
    found = version_fingerprint()
    assert found["python"] == platform.python_version()
    assert found["jax"] == jax.__version__
    assert "tessera-spmd" in found


def test_code_is_every_file_of_the_package_and_changes_with_it(monkeypatch, tmp_path):
    found = code_fingerprint()
    assert len(found["tessera/train/runtime/rank_consistency.py"]) == 12
    monkeypatch.setattr(rank_consistency, "_PACKAGE", tmp_path / "tessera")
    (tmp_path / "tessera").mkdir()
    module = tmp_path / "tessera/a.py"
    module.write_text("a = 1\n")
    before = code_fingerprint()["tessera/a.py"]
    module.write_text("a = 2\n")
    assert code_fingerprint()["tessera/a.py"] != before


def test_modules_are_the_named_ones_and_what_they_import_beside_them(
    monkeypatch, tmp_path
):
    for name in ("mine_a", "mine_b", "mine_c/__init__", "mine_c/d", "other/mine_e"):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("import json\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "other")
    for name in ("mine_a", "mine_b", "mine_c.d", "mine_e"):
        importlib.import_module(name)
    before = module_fingerprint(["mine_c.d:Model"])
    assert [*before] == ["mine_a", "mine_b", "mine_c", "mine_c.d"]
    (tmp_path / "mine_b.py").write_text("import math\n")
    after = module_fingerprint(["mine_a"])
    assert [name for name in before if before[name] != after[name]] == ["mine_b"]
    assert module_fingerprint([]) == {}
    assert all(name.startswith("json") for name in module_fingerprint(["json"]))


def test_devices_of_a_run_on_the_cpu_are_the_cpus_whatever_else_is_there():
    found = device_fingerprint(Cluster(), "cpu", {})
    assert found == {"kind": f"CPU, {platform.machine()}"}


def test_many_differences_are_counted():
    one = {"code": {f"{n:02}.py": "a" for n in range(30)}, "versions": {"jax": "1"}}
    two = {"code": {f"{n:02}.py": "b" for n in range(30)}, "versions": {"jax": "2"}}
    error = difference_error(differences({0: one, 1: two}))
    assert error.what == (
        "the ranks run different code, and the ranks run different versions"
    )
    assert error.got.splitlines()[-1] == "and 7 more"
    assert len(error.got.splitlines()) == 25


def test_a_long_value_is_shortened():
    values = ({"configuration": {"data.path": letter * 500}} for letter in "ab")
    ((_, text),) = differences(dict(enumerate(values)))
    assert len(text) < 320


def test_the_script_of_an_environment_is_no_part_of_the_code(monkeypatch, tmp_path):
    """pip writes the path of the environment into it: it differs between machines."""
    program = tmp_path / "program.py"
    program.write_text("a = 1\n")
    monkeypatch.setattr(
        sys.modules["__main__"], "__file__", str(program), raising=False
    )
    assert "program.py" in code_fingerprint()
    monkeypatch.setattr(rank_consistency.sysconfig, "get_path", lambda _: str(tmp_path))
    assert "program.py" not in code_fingerprint()
