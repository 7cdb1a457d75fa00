# SPDX-License-Identifier: Apache-2.0
"""Which process this one is, from made-up environments."""

import pytest

from tessera.errors import ProcessLayoutError
from tessera.train.runtime.cluster import Cluster, detect
from tessera.train.runtime.cluster import _first_host as first_host
from tessera.train.runtime.cluster import _tasks_on_node as tasks_on_node
from tessera.train.runtime.launcher import rank_variables

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.2",
    "MASTER_PORT": "29400",
}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-12@1",
}
KUBERNETES = {
    "JOB_COMPLETION_INDEX": "2",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "train-workers-0-0.train",
}


def test_a_process_without_any_launcher_is_alone():
    found = detect({})
    assert found == Cluster()
    assert str(found) == "a single process: no launcher"


def test_the_order_of_environments_is_torchrun_slurm_mpi_kubernetes():
    environments = [TORCHRUN, SLURM, OPEN_MPI, KUBERNETES]
    sources = [
        "torchrun's RANK and WORLD_SIZE",
        "step 77.0 of Slurm",
        "Open MPI's OMPI_COMM_WORLD_RANK",
        "Kubernetes' JOB_COMPLETION_INDEX",
    ]
    for first, source in enumerate(sources):
        merged: dict[str, str] = {}
        for environment in reversed(environments[first:]):
            merged |= environment
        assert detect(merged).source == source


def test_our_launcher_sets_torchruns_variables_and_is_named():
    launched = {"TESSERA_LAUNCHER": "7", **rank_variables(1, 4, 29500)}
    found = detect(launched)
    assert str(found) == "rank 1 of 4, by tessera launch; coordinator 127.0.0.1:29501"
    assert (found.local_rank, found.local_size) == (1, 4)


def test_torchruns_store_keeps_its_port():
    found = detect(TORCHRUN)
    assert found.coordinator == ("10.0.0.2", 29401)
    assert (found.local_rank, found.local_size) == (1, 2)


def test_torchrun_with_one_process_starts_no_coordinator():
    found = detect(TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"})
    assert found.coordinator is None
    assert str(found).startswith("a single process: torchrun's")


def test_a_step_of_slurm_has_its_first_machine_and_a_port_of_its_own():
    found = detect(SLURM)
    assert (found.rank, found.world_size) == (6, 8)
    assert (found.local_rank, found.local_size) == (2, 4)
    host, port = found.coordinator or ("", 0)
    assert host == "gpu07"
    assert 61440 <= port < 65535
    assert found.coordinator == detect(SLURM | {"SLURM_PROCID": "0"}).coordinator
    other = detect(SLURM | {"SLURM_STEP_ID": "1"}).coordinator
    assert other != found.coordinator


@pytest.mark.parametrize(
    "environment",
    [
        TORCHRUN | {"LOCAL_WORLD_SIZE": "4"},
        SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_NODEID": "0"},
        OPEN_MPI | {"MASTER_ADDR": "10.0.0.2"},
    ],
)
def test_a_run_on_one_machine_uses_the_loopback_interface(environment):
    found = detect(environment)
    assert found.is_on_one_machine
    port = detect(environment | {"SLURM_PROCID": "0", "RANK": "0"}).coordinator[1]
    assert found.coordinator == ("127.0.0.1", port)


@pytest.mark.parametrize("environment", [TORCHRUN, SLURM, KUBERNETES])
def test_a_run_on_several_machines_uses_the_address_that_it_was_given(environment):
    found = detect(environment)
    assert not found.is_on_one_machine
    assert found.coordinator[0] != "127.0.0.1"


@pytest.mark.parametrize("step", ["", "batch", "extern"])
def test_a_shell_inside_a_slurm_job_is_no_step(step):
    """As over ssh, or in the script that sbatch runs."""
    found = detect(SLURM | {"SLURM_STEP_ID": step})
    assert found.coordinator is None
    assert "not started by srun" in str(found)


@pytest.mark.parametrize("missing", ["SLURM_PROCID", "SLURM_STEP_NODELIST"])
def test_part_of_slurms_variables_is_passed_over_and_told(missing):
    environment = {name: v for name, v in SLURM.items() if name != missing}
    found = detect(environment)
    assert found.coordinator is None
    assert missing in str(found)


def test_a_step_of_one_task_is_a_single_process():
    assert detect(SLURM | {"SLURM_STEP_NUM_TASKS": "1"}).coordinator is None


def test_open_mpi_on_one_machine_uses_the_loopback_interface():
    found = detect(OPEN_MPI)
    assert (found.rank, found.world_size, found.local_size) == (1, 2, 2)
    host, _ = found.coordinator or ("", 0)
    assert host == "127.0.0.1"


def test_mpi_on_several_machines_needs_an_address():
    several = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    with pytest.raises(ProcessLayoutError, match="mpirun -x MASTER_ADDR"):
        detect(several)
    given = several | {"MASTER_ADDR": "10.0.0.3", "MASTER_PORT": "1234"}
    assert detect(given).coordinator == ("10.0.0.3", 1234)


def test_mpich_counts_with_pmi():
    found = detect({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"})
    assert (found.rank, found.source) == (1, "PMI's PMI_RANK")


def test_an_indexed_job_of_kubernetes_needs_a_size_and_an_address():
    found = detect(KUBERNETES)
    assert (found.rank, found.world_size) == (2, 4)
    assert found.coordinator == ("train-workers-0-0.train", 29500)
    alone = detect({"JOB_COMPLETION_INDEX": "2"})
    assert alone.coordinator is None
    assert "no run of several pods" in str(alone)


def test_a_stray_variable_of_torchrun_is_passed_over_and_told():
    assert str(detect({"RANK": "3"})) == (
        "a single process: no launcher; RANK without WORLD_SIZE: passed over"
    )


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("node_1.example-a.org", "node_1.example-a.org"),
        ("fd00::2", "fd00::2"),
        ("[fd00::2]", "fd00::2"),
        ("[fe80::1%eth0]", "fe80::1%eth0"),
    ],
)
def test_the_first_machine_is_named_by_a_name_or_an_address(text, host):
    for environment in (TORCHRUN, KUBERNETES):
        address, _ = detect(environment | {"MASTER_ADDR": text}).coordinator
        assert address == host


@pytest.mark.parametrize("environment", [TORCHRUN, OPEN_MPI, KUBERNETES])
@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("10.0.0.1:29500", "set the port with MASTER_PORT"),
        ("node1:29500", "set the port with MASTER_PORT"),
        ("[fd00::2]:29500", "set the port with MASTER_PORT"),
        ("fd00::2:29500", "set the port with MASTER_PORT"),
        ("[node1]", "name or IP address alone"),
        ("tcp://node1", "name or IP address alone"),
        ("node1 node2", "name or IP address alone"),
    ],
)
def test_what_names_no_machine_is_refused_at_once(environment, text, fix):
    """Instead of waiting five minutes for a name that nobody will ever know."""
    with pytest.raises(ProcessLayoutError) as error:
        detect(environment | {"MASTER_ADDR": text})
    assert error.value.got == f"MASTER_ADDR={text}"
    assert fix in error.value.fix


def test_a_rank_is_one_of_its_run():
    with pytest.raises(ProcessLayoutError, match="rank 4 of 4 processes"):
        detect(TORCHRUN | {"RANK": "4"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu1", "gpu1"),
        ("gpu[001-004,7]", "gpu001"),
        ("gpu3,gpu[5-6]", "gpu3"),
        ("r[1-2]n[3,4]-ib", "r1n3-ib"),
        ("", ""),
    ],
)
def test_the_first_machine_of_a_list(nodes, first):
    assert first_host(nodes) == first


def test_tasks_of_each_machine():
    assert [tasks_on_node("2(x2),1", node) for node in range(4)] == [2, 2, 1, None]
    assert tasks_on_node("what?", 0) is None
