# SPDX-License-Identifier: Apache-2.0
"""The examples of schedulers, as far as they can be looked at without one."""

import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from tessera.train.config.command_line import compose
from tessera.train.runtime.cluster import detect

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def test_the_pods_of_the_job_set_are_the_processes_of_one_run():
    job_set = yaml.safe_load((EXAMPLES / "jobset.yaml").read_text())
    (job,) = job_set["spec"]["replicatedJobs"]
    pods = job["template"]["spec"]
    (container,) = pods["template"]["spec"]["containers"]
    values = {e["name"]: e.get("value", "") for e in container["env"]}
    for pod in range(pods["completions"]):
        found = detect(values | {"JOB_COMPLETION_INDEX": str(pod)})
        assert (found.rank, found.world_size) == (pod, pods["completions"])
        assert found.local_size == 1  # it drives all GPUs of its pod
        assert found.coordinator == (values["MASTER_ADDR"], 29500)
    assert container["command"][:2] == ["python", "run_training.py"]
    config = compose(container["command"][2:], ROOT / "configs").config
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert config.model.num_devices == pods["completions"] * gpus
    grace = pods["template"]["spec"]["terminationGracePeriodSeconds"]
    assert config.runtime.grace_period < grace
    names = job_set["metadata"]["name"], job["name"]
    assert values["MASTER_ADDR"] == f"{names[0]}-{names[1]}-0-0.{names[0]}"
    ports = [port["containerPort"] for port in container["ports"]]
    assert ports == [29500, 29501]


@pytest.mark.parametrize(("flags", "tasks"), [([], 4), (["--tasks=1"], 1)])
def test_the_slurm_example_submits_the_tasks_of_one_run(
    monkeypatch, capsys, flags, tasks
):
    asked: dict[str, Any] = {}

    class Executor:
        def __init__(self, **parameters: Any) -> None:
            asked.update(parameters)

        def update_parameters(self, **parameters: Any) -> None:
            asked.update(parameters)

        def submit(self, run: Any) -> Any:
            asked["command"] = run.command
            return SimpleNamespace(job_id="7", paths=SimpleNamespace(folder="logs"))

    submitit: Any = ModuleType("submitit")
    submitit.AutoExecutor = Executor
    submitit.helpers = SimpleNamespace(DelayedSubmission=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "submitit", submitit)
    given = ["slurm.py", "--nodes=2", "--gpus=4", *flags, "model=tiny"]
    monkeypatch.setattr(sys, "argv", given)
    runpy.run_path(str(EXAMPLES / "slurm.py"), run_name="__main__")
    assert (asked["nodes"], asked["tasks_per_node"], asked["gpus_per_node"]) == (
        *(2, tasks, 4),
    )
    assert asked["command"][-1] == "model=tiny"
    assert asked["command"][1] == str(ROOT / "run_training.py")
    assert capsys.readouterr().out == "job 7, its logs are in logs\n"
