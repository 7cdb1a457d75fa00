# SPDX-License-Identifier: Apache-2.0
"""What the records of a run begin with, and the report that they end in.

A report never fails a run.
"""

import logging
import sys
from importlib.metadata import PackageNotFoundError

import pytest

import tessera
from tessera import dist
from tessera.errors import OutputPathError
from tessera.train.loop import run_records
from tessera.train.loop.run_folder import open_run_folder
from tessera.train.loop.run_records import reported


def test_tessera_need_not_be_installed(monkeypatch):
    """A folder on PYTHONPATH, as on a machine without a network, has no metadata."""

    def not_installed(name):
        if name == "tessera":
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(run_records, "version", not_installed)
    mesh = dist.Mesh(axes=["dp"], shape=[1])
    versions = run_records.description_of(mesh, 1)["versions"]
    assert versions["tessera"] == tessera.__version__
    assert versions["jax"] == "1.0"


# --- the report


@pytest.fixture
def folder(tmp_path):
    return open_run_folder(tmp_path / "run", "name: small\n")


@pytest.fixture(autouse=True)
def _small_plotly(monkeypatch):
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "/* Plotly */")


def test_a_run_that_ends_has_a_report_of_what_it_wrote(folder):
    with reported(folder):
        folder.metrics.write_text('{"step": 7, "loss": 2.5}\n')
    assert "Loss 2.5 at step 7." in folder.report.read_text()


def test_a_run_that_fails_has_a_report_and_fails_as_it_did(folder):
    error = KeyboardInterrupt("by hand")
    with pytest.raises(KeyboardInterrupt) as caught, reported(folder):
        raise error
    assert caught.value is error
    assert folder.report.is_file()


@pytest.mark.parametrize("reason", ["the library is missing", "the disk is full"])
def test_a_report_that_cannot_be_written_is_a_warning(
    folder, caplog, monkeypatch, reason
):
    if reason == "the library is missing":
        monkeypatch.setitem(sys.modules, "plotly.offline", None)
    else:
        folder.report.mkdir()
    with caplog.at_level(logging.WARNING, "tessera"), reported(folder):
        pass
    (record,) = caplog.records
    assert record.getMessage().startswith("the report was not written: ")


def test_no_report_is_written_into_a_folder_that_is_not_the_runs_any_more(tmp_path):
    def check():
        raise OutputPathError("moved", got="elsewhere", fix="none")

    calls = []
    folder = open_run_folder(tmp_path, "", check=lambda: calls and check())
    calls.append("from now on")
    with reported(folder):
        pass
    assert not folder.report.exists()


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    with reported(None):
        pass
    assert [*tmp_path.iterdir()] == []
    assert caplog.records == []
