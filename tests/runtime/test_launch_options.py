# SPDX-License-Identifier: Apache-2.0
"""The launcher's command line, with made-up environments."""

import sys

import pytest

from tessera.errors import ProcessLayoutError
from tessera.runtime.launch_options import make_plan
from tessera.runtime.launcher import variables

CPU = {"JAX_PLATFORMS": "cpu"}


def test_the_program_and_its_arguments_are_passed_on_as_they_are():
    plan = make_plan(["--nprocs=4", "run_training.py", "model=tiny", "--help"], CPU)
    assert plan.command == (sys.executable, "run_training.py", "model=tiny", "--help")
    assert (plan.num_local, plan.world_size, plan.first_rank) == (4, 4, 0)
    assert plan.coordinator is None


def test_the_command_tessera_is_started_as_a_module():
    plan = make_plan(["--nprocs=2", "tessera", "train", "model=tiny"], CPU)
    assert plan.command == (sys.executable, "-m", "tessera", "train", "model=tiny")


@pytest.mark.parametrize("given", [["--nprocs"], ["--nprocs=auto"], []])
def test_without_a_number_there_is_a_process_for_each_accelerator(given):
    plan = make_plan([*given, "run_training.py", "--nprocs"], CPU)
    assert plan.num_local == 1
    assert plan.command[1:] == ("run_training.py", "--nprocs")


def test_machines_are_counted_with_nnodes():
    given = ["--nprocs", "4", "--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1"]
    plan = make_plan([*given, "run.py"], CPU)
    assert (plan.first_rank, plan.world_size) == (4, 8)
    assert plan.coordinator == ("10.0.0.1", 29500)


@pytest.mark.parametrize("first", [0, 4])
def test_exported_variables_say_the_first_rank_of_this_machine(first):
    exported = {
        "MASTER_ADDR": "192.168.1.10",
        "MASTER_PORT": "29500",
        "RANK": str(first),
        "WORLD_SIZE": "8",
    }
    plan = make_plan(["--nprocs=4", "run_training.py"], CPU | exported)
    assert (plan.first_rank, plan.world_size) == (first, 8)
    assert plan.coordinator == ("192.168.1.10", 29500)
    last = variables(plan, 3, plan.coordinator)
    assert last["RANK"] == last["TESSERA_RANK"] == str(first + 3)
    assert last["LOCAL_RANK"] == "3"
    assert last["TESSERA_COORDINATOR"] == "192.168.1.10:29500"


def test_a_rank_that_counts_machines_is_told_what_rank_means():
    exported = {"RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "h"}
    with pytest.raises(ProcessLayoutError) as error:
        make_plan(["--nprocs=4", "run_training.py"], CPU | exported)
    assert str(error.value) == (
        "[T704] RANK is the first rank of this machine, which has no room for its "
        "processes there\n"
        "  got: RANK=1, WORLD_SIZE=8, --nprocs=4\n"
        "  fix: use RANK=0 or 4; or count machines: unset RANK and WORLD_SIZE and use "
        "--nnodes, --node-rank\n"
        "  docs: docs/errors/T704.md"
    )


def test_one_launcher_for_each_task_of_slurm():
    step = {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_PROCID": "1",
        "SLURM_NODEID": "1",
        "SLURM_STEP_NODELIST": "gpu[07-08]",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }
    plan = make_plan(["--nprocs=4", "run.py"], CPU | step)
    assert (plan.first_rank, plan.world_size) == (4, 8)
    assert (plan.coordinator or ("",))[0] == "gpu07"
    crowded = step | {"SLURM_STEP_TASKS_PER_NODE": "2"}
    with pytest.raises(ProcessLayoutError, match="several launchers run on this"):
        make_plan(["--nprocs=4", "run.py"], CPU | crowded | {"SLURM_NODEID": "0"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--nprocs=0"], "--nprocs is a number"),
        (["--nprocs=4", "--nnodes=2"], "no --node-rank"),
        (["--nprocs=4", "--nnodes=2", "--node-rank=2"], "--node-rank=2"),
        (["--nprocs=4", "--nnodes=2", "--node-rank=0"], "none is named"),
    ],
)
def test_what_does_not_describe_one_run_is_refused(given, message):
    with pytest.raises(ProcessLayoutError, match=message):
        make_plan([*given, "run.py"], CPU)


def test_a_port_alone_is_one_of_this_machine():
    plan = make_plan(["--nprocs=2", "--master-port=29600", "run.py"], CPU)
    assert plan.coordinator == ("127.0.0.1", 29600)
