# SPDX-License-Identifier: Apache-2.0
"""``tessera report`` as a person calls it."""

import subprocess
import sys

import pytest

from tessera.__main__ import main
from tests.train.report.run_folders import make_run


@pytest.fixture(autouse=True)
def _small_plotly(monkeypatch):
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "/* Plotly */")


def test_the_report_of_a_run_lies_in_its_folder(tmp_path, capsys):
    run = make_run(tmp_path / "a")
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    assert (run / "report.html").read_text().startswith("<!doctype html>")


def test_several_runs_are_compared_in_a_file_of_any_name(tmp_path):
    runs = [str(make_run(tmp_path / name)) for name in "ab"]
    output = tmp_path / "comparison.html"
    assert main(["report", *runs, f"--output={output}"]) == 0
    assert "<h1>Report of a, b</h1>" in output.read_text()


def test_a_folder_without_a_run_is_a_coded_error(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("[T504] there is no run to report on\n")


def test_the_report_imports_no_jax():
    program = "import sys, tessera.train.report.page; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
