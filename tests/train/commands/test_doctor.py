# SPDX-License-Identifier: Apache-2.0
"""``tessera doctor``: what it shows, and what it finds wrong."""

import json

import pytest

from tessera.train.commands import doctor


@pytest.fixture(scope="module")
def started():
    """What JAX finds on this machine, looked up once."""
    return doctor._start_jax({"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"})


@pytest.fixture
def examine(monkeypatch, started):
    """The report for made-up environment variables, on two CPU devices."""

    def run(*, cache: str | None = None, **environ: str) -> dict:
        found = {**started[0], "compile_cache": cache}
        monkeypatch.setattr(doctor, "_start_jax", lambda _: (found, started[1]))
        return doctor.examine(environ)

    return run


@pytest.mark.slow(reason="its module starts a process in which JAX begins")
def test_versions_devices_and_variables_are_shown(examine, tmp_path):
    (tmp_path / "program").write_bytes(bytes(2**20))
    tmp_path.chmod(0o700)
    cache = str(tmp_path)
    report = examine(cache=cache, PJRT_NPROC="32", HOME="/x", TESSERA_API_KEY="abc")
    assert {"tessera", "python", "OS", "jax", "jaxlib", "flax", "optax"} <= set(
        report["versions"]
    )
    assert [device["platform"] for device in report["devices"]] == ["cpu", "cpu"]
    assert report["compile_cache"] == {"folder": cache, "bytes": 2**20}
    assert report["environment"] == {"PJRT_NPROC": "32", "TESSERA_API_KEY": "(hidden)"}
    assert report["problems"] == []
    text = doctor.as_text(report)
    assert "\n  jax 0." in text
    assert f"\ncompile cache\n  {cache}: 1.0 MiB\n" in text
    assert text.endswith("problems\n  none")


def test_what_is_wrong_comes_with_its_fix(examine, tmp_path, monkeypatch):
    tmp_path.chmod(0o777)
    monkeypatch.setattr(doctor, "find_accelerators", lambda _: ["NVIDIA H200"] * 2)
    report = examine(cache=str(tmp_path))
    problems = {one["problem"].partition(":")[0]: one for one in report["problems"]}
    assert [*problems] == [
        "2 × NVIDIA H200 is here, and JAX uses the CPU",
        "2 CPU devices can deadlock",
        "the folder of compiled programs is not yours alone",
    ]
    assert all(one["fix"] for one in problems.values())
    assert "\n    fix: export PJRT_NPROC=32" in doctor.as_text(report)


def test_a_jaxlib_with_wrong_values_on_cpus_is_noted(examine, monkeypatch):
    versions = {"jaxlib": "0.10.2"}
    monkeypatch.setattr(doctor, "installed", lambda _: versions)
    report = examine(PJRT_NPROC="32")
    (note,) = report["notes"]
    assert "jax-ml/jax#39103" in note
    assert f"\nnotes\n  {note}\n" in doctor.as_text(report)
    versions["jaxlib"] = "0.11.2"
    assert examine(PJRT_NPROC="32")["notes"] == []


def test_the_exit_code_says_whether_something_is_wrong(monkeypatch, capsys):
    report = {"problems": []}
    monkeypatch.setattr(doctor, "examine", lambda _: report)
    assert doctor.main(["--json"]) == 0
    report["problems"].append({"problem": "p", "fix": "f"})
    assert doctor.main(["--json"]) == 1
    assert capsys.readouterr().out.count('"problems"') == 2


@pytest.mark.full
def test_a_jax_that_aborts_is_a_problem_and_not_the_end():
    """XLA aborts the process for a flag that it does not know."""
    report = doctor.examine({"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_nosuch=1"})
    (problem,) = report["problems"]
    assert problem["problem"] == (
        "JAX cannot start: Unknown flag in XLA_FLAGS: --xla_nosuch=1"
    )
    json.dumps(report)
