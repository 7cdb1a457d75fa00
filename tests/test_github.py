# SPDX-License-Identifier: Apache-2.0
"""The workflows and issue forms in ``.github``: read, and held to the repository."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))
FORMS = [ROOT / f".github/ISSUE_TEMPLATE/{name}.yml" for name in ("bug", "feature")]


def steps(workflow: dict) -> list[dict]:
    return [step for job in workflow["jobs"].values() for step in job.get("steps", ())]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_few_rights_pinned_actions_and_targets_that_exist(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job.get("permissions", {}) in ({}, {"id-token": "write"})
        if (called := job.get("uses")) is not None:  # a workflow of this repository
            assert (ROOT / called).is_file()
            continue
        assert job["timeout-minutes"] <= 120
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for step in steps(workflow):
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", step.get("uses", f"a@{'0' * 40}"))
        for target in re.findall(r"\bmake ([a-z-]+)", step.get("run", "")):
            assert target in targets


def test_the_tests_run_on_every_python_that_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [
        name.rpartition(" ")[2]
        for name in project["classifiers"]
        if re.fullmatch(r"Programming Language :: Python :: 3\.\d+", name)
    ]
    for name, job in (("checks", "test"), ("nightly", "test-all")):
        path = ROOT / f".github/workflows/{name}.yml"
        found = yaml.safe_load(path.read_text())["jobs"][job]
        assert found["strategy"]["matrix"]["python"] == declared


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_asks_for_the_output_of_doctor(path):
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= form.keys()
    (field,) = [field for field in form["body"] if field.get("id") == "doctor"]
    assert "`tessera doctor`" in field["attributes"]["label"]
    assert field["validations"]["required"]
