# SPDX-License-Identifier: Apache-2.0
"""What a rank says of itself, and what becomes of differences."""

import platform

import jax

from tessera.runtime import fingerprint
from tessera.runtime.cluster import Cluster
from tessera.runtime.rank_consistency import difference_error, differences


def test_versions_are_those_that_are_installed():
    found = fingerprint.versions()
    assert found["python"] == platform.python_version()
    assert found["jax"] == jax.__version__
    assert "tessera" in found


def test_code_is_every_file_of_the_package_and_changes_with_it(monkeypatch, tmp_path):
    found = fingerprint.code()
    assert len(found["tessera/runtime/fingerprint.py"]) == 12
    monkeypatch.setattr(fingerprint, "_PACKAGE", tmp_path / "tessera")
    (tmp_path / "tessera").mkdir()
    module = tmp_path / "tessera/a.py"
    module.write_text("a = 1\n")
    before = fingerprint.code()["tessera/a.py"]
    module.write_text("a = 2\n")
    assert fingerprint.code()["tessera/a.py"] != before


def test_devices_of_a_run_on_the_cpu_are_the_cpus_whatever_else_is_there():
    found = fingerprint.devices(Cluster(), "cpu", {})
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
    (found,) = differences(dict(enumerate(values)))
    assert len(str(found)) < 320
