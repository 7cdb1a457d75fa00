# SPDX-License-Identifier: Apache-2.0
"""The launcher's command line, with made-up environments."""

import sys

import pytest

from tessera.__main__ import _COMMANDS
from tessera.errors import ProcessLayoutError, SettingValueError, UnknownSettingError
from tessera.train.runtime.launch_options import _SUBCOMMANDS, make_plan
from tessera.train.runtime.python_process import module_command
from tests.train.runtime.test_cluster import KUBERNETES, OPEN_MPI, SLURM, TORCHRUN

CPU = {"JAX_PLATFORMS": "cpu"}


def test_the_program_and_its_arguments_are_passed_on_as_they_are():
    plan = make_plan(["--nprocs=4", "run_training.py", "model=tiny", "--help"], CPU)
    assert plan.command == (sys.executable, "run_training.py", "model=tiny", "--help")
    assert (plan.num_ranks, plan.max_restarts, plan.grace) == (4, 0, 30.0)


def test_the_command_tessera_is_started_as_a_module():
    plan = make_plan(["--nprocs=2", "tessera", "train", "model=tiny"], CPU)
    expected = module_command("tessera.__main__", "train", "model=tiny")
    assert plan.command == expected


def test_a_subcommand_is_started_as_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["--nprocs=2", "train", "model=tiny"]
    expected = module_command("tessera.__main__", "train", "model=tiny")
    assert make_plan(arguments, CPU).command == expected
    (tmp_path / "train").mkdir()  # data, perhaps
    assert make_plan(arguments, CPU).command == expected
    assert {*_SUBCOMMANDS} == {*_COMMANDS} - {"launch", "explain", "push"}


@pytest.mark.parametrize("file", ["train", "train/__main__.py"])
def test_a_program_with_the_name_of_a_subcommand_has_to_be_told_from_it(
    tmp_path, monkeypatch, file
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    with pytest.raises(SettingValueError) as error:
        make_plan(["train", "model=tiny"], CPU)
    assert error.value.fix == "write ./train for the program, or tessera train"
    assert make_plan(["./train"], CPU).command == (sys.executable, "./train")
    expected = module_command("tessera.__main__", "train")
    assert make_plan(["tessera", "train"], CPU).command == expected


def test_a_word_that_is_no_file_and_no_subcommand_is_refused_at_once():
    with pytest.raises(UnknownSettingError) as error:
        make_plan(["--nprocs=2", "trian"], CPU)
    assert error.value.fix.startswith("did you mean 'train'?")


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ("--nproc_per_node=8", "--nproc_per_node=8: write --nprocs=<processes>"),
        ("-n 8", "-n: write --nprocs=<processes>"),
        ("--nnodes=2", "--nnodes=2: tessera launch is for one machine; on several, to"),
        ("--node-rank=0", "--node-rank=0: tessera launch is for one machine"),
        ("--master_addr=a", "--master_addr=a: tessera launch is for one machine"),
        ("--foo", "tessera launch --help lists all"),
    ],
)
def test_options_of_torchrun_say_what_to_write(options, fix):
    with pytest.raises(UnknownSettingError) as error:
        make_plan([*options.split(), "train", "model=tiny"], CPU)
    assert error.value.fix.startswith(fix)


def test_help_of_a_subcommand_is_shown_by_one_process():
    assert make_plan(["--nprocs=2", "train", "model=a", "--help"], CPU).shows_help
    assert not make_plan(["--nprocs=2", "train", "model=a"], CPU).shows_help
    assert not make_plan(["--nprocs=2", "my.py", "--help"], CPU).shows_help


def test_without_a_number_there_is_a_process_for_each_accelerator():
    plan = make_plan(["run_training.py", "--nprocs"], CPU)
    assert plan.num_ranks == 1
    assert plan.command[1:] == ("run_training.py", "--nprocs")


MACHINE = {
    "MASTER_ADDR": "192.168.1.10",
    "MASTER_PORT": "29500",
    "RANK": "4",
    "WORLD_SIZE": "8",
}


@pytest.mark.parametrize(
    ("changed", "got"),
    [
        ({"RANK": ""}, "WORLD_SIZE=8, MASTER_ADDR=192"),
        ({"WORLD_SIZE": ""}, "RANK=4, MASTER_ADDR=192"),
        ({"MASTER_ADDR": ""}, "RANK=4, WORLD_SIZE=8"),
        ({"RANK": "0", "WORLD_SIZE": "4"}, "rank 0 of 4, by torchrun's RANK"),
    ],
)
def test_exported_variables_of_several_machines_are_refused(changed, got):
    with pytest.raises(ProcessLayoutError) as error:
        make_plan(["--nprocs=4", "run.py"], CPU | MACHINE | changed)
    assert got in error.value.got
    assert "unset RANK" in error.value.fix


@pytest.mark.parametrize(
    ("environment", "got"),
    [
        (TORCHRUN, "rank 3 of 4, by torchrun's RANK and WORLD_SIZE"),
        (SLURM, "rank 6 of 8, by step 77.0 of Slurm"),
        (SLURM | MACHINE, "rank 4 of 8, by torchrun's RANK and WORLD_SIZE"),
        (OPEN_MPI, "rank 1 of 2, by Open MPI's OMPI_COMM_WORLD_RANK"),
        (OPEN_MPI | MACHINE, "rank 4 of 8, by torchrun's RANK and WORLD_SIZE"),
        (KUBERNETES, "rank 2 of 4, by Kubernetes' JOB_COMPLETION_INDEX"),
    ],
)
def test_a_launcher_inside_another_is_refused(environment, got):
    """Each would start a run of its own, which computes something else."""
    with pytest.raises(ProcessLayoutError) as error:
        make_plan(["--nprocs=4", "run_training.py"], CPU | environment)
    assert error.value.what.startswith("this process is one of several already")
    assert error.value.got.startswith(got)


def test_a_job_of_one_process_may_start_the_launcher():
    alone = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    plan = make_plan(["--nprocs=4", "run.py"], CPU | SLURM | alone)
    assert plan.num_ranks == 4


@pytest.mark.parametrize(
    "option",
    [
        *("--nprocs=0", "--nprocs=x", "--nprocs=10000", "--max-restarts=-1"),
        *("--grace=-1", "--grace=nan", "--grace=inf"),
    ],
)
def test_an_option_that_is_wrong_ends_the_launcher_with_code_2(option, capsys):
    with pytest.raises(SystemExit) as end:
        make_plan([option, "run.py"], CPU)
    assert end.value.code == 2
    assert "error: " in capsys.readouterr().err
