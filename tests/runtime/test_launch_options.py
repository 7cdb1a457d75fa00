# SPDX-License-Identifier: Apache-2.0
"""The launcher's command line, with made-up environments."""

import sys

import pytest

from tessera.errors import ProcessLayoutError
from tessera.runtime.launch_options import make_plan
from tests.runtime.test_cluster import KUBERNETES, OPEN_MPI, SLURM, TORCHRUN

CPU = {"JAX_PLATFORMS": "cpu"}


def test_the_program_and_its_arguments_are_passed_on_as_they_are():
    plan = make_plan(["--nprocs=4", "run_training.py", "model=tiny", "--help"], CPU)
    assert plan.command == (sys.executable, "run_training.py", "model=tiny", "--help")
    assert (plan.num_ranks, plan.max_restarts, plan.grace) == (4, 0, 30.0)


def test_the_command_tessera_is_started_as_a_module():
    plan = make_plan(["--nprocs=2", "tessera", "train", "model=tiny"], CPU)
    assert plan.command == (sys.executable, "-m", "tessera", "train", "model=tiny")


def test_without_a_number_there_is_a_process_for_each_accelerator():
    plan = make_plan(["run_training.py", "--nprocs"], CPU)
    assert plan.num_ranks == 1
    assert plan.command[1:] == ("run_training.py", "--nprocs")


@pytest.mark.parametrize(
    ("environment", "got"),
    [
        (TORCHRUN, "rank 3 of 4, by torchrun's RANK and WORLD_SIZE"),
        (SLURM, "rank 6 of 8, by step 77.0 of Slurm"),
        (OPEN_MPI, "rank 1 of 2, by Open MPI's OMPI_COMM_WORLD_RANK"),
        (KUBERNETES, "rank 2 of 4, by Kubernetes' JOB_COMPLETION_INDEX"),
        ({"RANK": "4", "WORLD_SIZE": "8"}, "WORLD_SIZE=8"),
    ],
)
def test_a_launcher_on_each_of_several_machines_is_refused(environment, got):
    """Each would start a run of its own, which computes something else."""
    with pytest.raises(ProcessLayoutError) as error:
        make_plan(["--nprocs=4", "run_training.py"], CPU | environment)
    assert error.value.what == (
        "the launcher starts a run on one machine, and this process is already one "
        "of several"
    )
    assert error.value.got.startswith(got)


def test_a_job_of_one_process_may_start_the_launcher():
    alone = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    plan = make_plan(["--nprocs=4", "run.py"], CPU | SLURM | alone)
    assert plan.num_ranks == 4


@pytest.mark.parametrize(
    "option",
    [
        *("--nprocs=0", "--nprocs=x", "--nprocs=10000", "--max-restarts=-1"),
        *("--grace=-1", "--grace=nan", "--grace=inf", "--nnodes=2", "--nproc=2"),
    ],
)
def test_an_option_that_is_wrong_ends_the_launcher_with_code_2(option, capsys):
    with pytest.raises(SystemExit) as end:
        make_plan([option, "run.py"], CPU)
    assert end.value.code == 2
    assert "error: " in capsys.readouterr().err
