# SPDX-License-Identifier: Apache-2.0
"""Accelerators, as the file system of a made-up machine shows them."""

import pytest

from tessera.train.runtime.accelerators import assign_devices, find_accelerators


@pytest.fixture
def machine(tmp_path):
    for number, model in enumerate(["NVIDIA H200", "NVIDIA H100"]):
        folder = tmp_path / f"proc/driver/nvidia/gpus/0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {model}\nIRQ: 1\n")
    return tmp_path


def test_the_driver_names_its_gpus(machine):
    assert find_accelerators({}, machine) == ["NVIDIA H200", "NVIDIA H100"]


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["NVIDIA H100"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "GPU-12ab"}, ["NVIDIA H200"]),
        ({"JAX_PLATFORMS": "cpu"}, []),
        ({"JAX_PLATFORMS": "cuda,cpu"}, ["NVIDIA H200", "NVIDIA H100"]),
    ],
)
def test_the_environment_hides_some(machine, environment, found):
    assert find_accelerators(environment, machine) == found


def test_tpus_are_counted_and_a_machine_may_have_nothing(tmp_path):
    assert find_accelerators({}, tmp_path) == []
    (tmp_path / "dev").mkdir()
    for number in range(4):
        (tmp_path / f"dev/accel{number}").touch()
    assert find_accelerators({}, tmp_path) == ["TPU"] * 4


@pytest.mark.parametrize(
    ("local_rank", "num_local", "num_devices", "mine"),
    [
        (3, 4, 4, [3]),
        (1, 2, 4, [2, 3]),
        (0, 1, 8, None),  # alone with all
        (2, 4, 1, None),  # its scheduler shows it its own alone
        (1, 2, 0, None),  # a CPU
    ],
)
def test_each_process_takes_its_share(local_rank, num_local, num_devices, mine):
    assert assign_devices(local_rank, num_local, num_devices) == mine
