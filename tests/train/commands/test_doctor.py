# SPDX-License-Identifier: Apache-2.0
"""``tessera doctor``: what it shows, and what it finds wrong."""

import pytest

from tessera.train.commands import doctor


@pytest.fixture(scope="module")
def started():
    """What JAX finds on this machine, looked up once."""
    return doctor._start_jax({"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"})


@pytest.fixture
def examine(monkeypatch, started):
    """The report for made-up environment variables, on two CPU devices."""

    def run(*, cache: str | None = None, **environ: str) -> doctor.Report:
        found = {**started[0], "compile_cache": cache}
        monkeypatch.setattr(doctor, "_start_jax", lambda _: (found, started[1]))
        return doctor.examine(environ)

    return run


@pytest.mark.slow(reason="its module starts a process in which JAX begins")
def test_versions_devices_and_variables_are_shown(examine, tmp_path):
    tmp_path.chmod(0o700)
    cache = str(tmp_path)
    report = examine(cache=cache, PJRT_NPROC="32", HOME="/x", TESSERA_API_KEY="abc")
    assert report.sections["compile cache"] == [cache]
    assert report.sections["environment"] == [
        "PJRT_NPROC=32",
        "TESSERA_API_KEY=(hidden)",
    ]
    assert report.problems == []
    text = str(report)
    assert "\n  flax 0." in text
    assert "\n  jaxlib: 0." in text
    assert ", 2 local devices" in text
    assert text.endswith("problems\n  none")


def test_what_is_wrong_comes_with_its_fix(examine, tmp_path, monkeypatch):
    tmp_path.chmod(0o777)
    monkeypatch.setattr(doctor, "find_accelerators", lambda _: ["NVIDIA H200"] * 2)
    report = examine(cache=str(tmp_path))
    problems = {one.text.partition(":")[0]: one for one in report.problems}
    assert [*problems] == [
        "2 × NVIDIA H200 is here, and JAX uses the CPU",
        "2 CPU devices can deadlock",
        "the folder of compiled programs is not yours alone",
    ]
    assert all(one.fix for one in problems.values())
    assert "\n    fix: export PJRT_NPROC=32" in str(report)


def test_a_jaxlib_with_wrong_values_on_cpus_is_noted(examine, monkeypatch):
    versions = {"jaxlib": "0.10.2"}
    monkeypatch.setattr(doctor, "installed", lambda _: versions)
    report = examine(PJRT_NPROC="32")
    (note,) = report.sections["notes"]
    assert "jax-ml/jax#39103" in note
    assert f"\nnotes\n  {note}\n" in str(report)
    versions["jaxlib"] = "0.11.2"
    assert examine(PJRT_NPROC="32").sections["notes"] == []


def test_the_exit_code_says_whether_something_is_wrong(monkeypatch, capsys):
    problems = []
    monkeypatch.setattr(doctor, "examine", lambda _: doctor.Report({}, problems))
    assert doctor.main([]) == 0
    problems.append(doctor.Problem("p", "f"))
    assert doctor.main([]) == 1
    assert capsys.readouterr().out == "problems\n  none\nproblems\n  p\n    fix: f\n"


@pytest.mark.full
def test_a_jax_that_aborts_is_a_problem_and_not_the_end():
    """XLA aborts the process for a flag that it does not know."""
    report = doctor.examine({"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_nosuch=1"})
    (problem,) = report.problems
    assert problem.text == (
        "JAX cannot start: Unknown flag in XLA_FLAGS: --xla_nosuch=1"
    )
