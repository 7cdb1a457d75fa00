# SPDX-License-Identifier: Apache-2.0
"""The examples of schedulers, as far as they can be looked at without one."""

import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from tessera.runtime.launch_options import make_plan

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_each_pod_of_the_job_set_starts_its_part_of_one_run():
    job_set = yaml.safe_load((EXAMPLES / "jobset.yaml").read_text())
    (job,) = job_set["spec"]["replicatedJobs"]
    pods = job["template"]["spec"]
    (container,) = pods["template"]["spec"]["containers"]
    command = container["command"]
    assert command[:3] == ["python", "-m", "tessera.launch"]
    values = {e["name"]: e.get("value", "") for e in container["env"]}
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    for pod in range(pods["completions"]):
        given = values | {"JOB_COMPLETION_INDEX": str(pod)}
        # As Kubernetes replaces them in a command.
        arguments = list(command[3:])
        for name, value in given.items():
            arguments = [a.replace(f"$({name})", value) for a in arguments]
        plan = make_plan(arguments, given)
        assert plan.num_local == gpus
        assert plan.first_rank == pod * gpus
        assert plan.world_size == pods["completions"] * gpus
        assert plan.coordinator == (values["MASTER_ADDR"], 29500)
    names = job_set["metadata"]["name"], job["name"]
    assert values["MASTER_ADDR"] == f"{names[0]}-{names[1]}-0-0.{names[0]}"
    ports = [port["containerPort"] for port in container["ports"]]
    assert ports == [29500, 29501]


@pytest.mark.parametrize(("flags", "tasks"), [([], 4), (["--launcher"], 1)])
def test_the_slurm_example_submits_a_task_for_each_rank_or_launcher(
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
    assert ("tessera.launch" in asked["command"]) == bool(flags)
    assert capsys.readouterr().out == "job 7, its logs are in logs\n"
