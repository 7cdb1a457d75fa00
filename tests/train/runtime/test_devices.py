# SPDX-License-Identifier: Apache-2.0
"""Devices are fixed when the backend starts, so most of this runs in a new process."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

from tessera import errors
from tessera.dist import simulate_devices
from tessera.foundations import simulated_devices
from tessera.jax_compat import jaxprs
from tessera.train.runtime.devices import prepare_devices


def in_new_process(code: str, *arguments: str, **environment: str) -> str:
    """Standard output of a program that starts with no device settings of its own."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_", "XLA_", "PJRT_"))
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=kept | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# One import of JAX for all cases: each runs in a fork, before any backend starts.
SIMULATE_AND_COUNT = """
import json, os, sys
os.cpu_count = lambda: 2
import jax
from tessera.dist import simulate_devices
for count, environment in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        os.environ.update(environment)
        if "JAX_NUM_CPU_DEVICES" in environment:
            number = int(environment["JAX_NUM_CPU_DEVICES"])
            jax.config.update("jax_num_cpu_devices", number)
        simulate_devices(count)
        print(os.environ.get("PJRT_NPROC"), len(jax.devices()), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""

LOOP_OF_COLLECTIVES = """
import jax, jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as P
from tessera.train.runtime.devices import prepare_devices
print(prepare_devices(8))
mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
body = lambda x: x - jax.lax.pmean(x, "d")
step = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d")))
x = jnp.arange(8.0)
for _ in range(2000):
    x = step(x)
print(float(abs(x).max()) < 4)
"""


@pytest.mark.full
def test_two_thousand_queued_collectives_on_eight_devices_do_not_starve():
    said, bounded = in_new_process(LOOP_OF_COLLECTIVES).splitlines()
    assert said == (
        "simulating 8 CPU devices: what they compute is right, how fast is not"
    )
    assert bounded == "True"


CASES = [
    (8, {}, "32 8"),
    (12, {}, "48 12"),
    (8, {"PJRT_NPROC": "100"}, "100 8"),
    (8, {"PJRT_NPROC": "8"}, "32 8"),
    (2, {"JAX_NUM_CPU_DEVICES": "10"}, "40 10"),
    (4, {"JAX_NUM_CPU_DEVICES": "2"}, "32 4"),
    (2, {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}, "32 3"),
    (4, {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}, "32 4"),
    (1, {}, "None 1"),
]


@pytest.mark.slow(reason="it starts processes")
def test_devices_and_threads_follow_the_count_and_the_environment():
    cases = json.dumps([(count, environment) for count, environment, _ in CASES])
    found = in_new_process(SIMULATE_AND_COUNT, cases).splitlines()
    assert found == [expected for _, _, expected in CASES]


def test_enough_devices_in_a_started_backend_are_left_as_they_are():
    jax.devices()
    simulate_devices(8)
    simulate_devices(3)
    assert len(jax.devices()) == 8


def test_a_started_backend_cannot_get_more_devices():
    jax.devices()
    with pytest.raises(errors.BackendStartedError) as caught:
        simulate_devices(9)
    threads = simulated_devices._threads(9)
    assert str(caught.value) == (
        "[T701] 9 CPU devices cannot be simulated any more\n"
        "  got: JAX has started its backend with 8\n"
        "  fix: call simulate_devices(9) before anything that touches a device, or "
        f"start Python with JAX_NUM_CPU_DEVICES=9 PJRT_NPROC={threads}\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T701.html"
    )


def test_more_cpu_devices_than_jax_has_in_a_process_are_refused():
    for platform in ("cpu", "auto"):
        with pytest.raises(errors.DeviceCountError) as caught:
            prepare_devices(4096, platform)
        assert str(caught.value) == (
            "[T702] 4096 CPU devices are more than JAX has in one process\n"
            "  got: 4096, and it takes at most 2048\n"
            "  fix: use a smaller mesh, or run it where there are accelerators\n"
            "  docs: https://tessera-spmd.github.io/tessera/errors/T702.html"
        )


def test_one_device_is_not_called_simulated():
    assert prepare_devices(1, "cpu") == "one CPU device"


def test_the_log_says_how_many_of_the_devices_are_used():
    assert prepare_devices(4) == (
        "simulating 4 of 8 CPU devices: what they compute is right, how fast is not"
    )


def test_the_log_says_which_mesh_takes_the_devices_that_are_idle():
    assert prepare_devices(1, axes={"fsdp": 1, "tp": 1}) == (
        "1 of 8 CPU devices; 7 idle: "
        "model.mesh_shape=[[8,1],[fsdp,tp]] or [[1,8],[fsdp,tp]] takes all"
    )


def test_a_size_to_infer_takes_every_device_that_fits():
    said = "CPU devices: what they compute is right, how fast is not"
    assert prepare_devices(2, axes={"fsdp": -1, "tp": 2}) == f"simulating 8 {said}"
    assert prepare_devices(3, axes={"fsdp": -1, "tp": 3}) == (
        f"simulating 6 of 8 {said}; 2 idle: "
        "model.mesh_shape=[[2,4],[fsdp,tp]] or [[4,2],[fsdp,tp]] takes all"
    )


def test_a_platform_that_is_not_there_is_named():
    with pytest.raises(errors.DeviceCountError) as caught:
        prepare_devices(1, "gpu")
    assert str(caught.value) == (
        "[T702] there is no GPU that JAX can use\n"
        "  got: JAX started on CPU\n"
        "  fix: install JAX's plugin for it: pip install 'tessera-spmd[cuda12]'\n"
        "  fix: or take what is there: runtime.platform=cpu\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T702.html"
    )


@pytest.fixture
def four_gpus(monkeypatch):
    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")
    monkeypatch.setattr(jax, "devices", lambda backend=None: [gpu] * 4)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jaxprs, "backend_started", lambda: True)


@pytest.mark.usefixtures("four_gpus")
def test_accelerators_are_named_with_their_kind():
    assert prepare_devices(4) == "4 GPU devices (NVIDIA H200)"
    assert prepare_devices(2, "gpu") == "2 of 4 GPU devices (NVIDIA H200)"
    assert prepare_devices(3, axes={"fsdp": 3, "tp": 1}) == (
        "3 of 4 GPU devices (NVIDIA H200); 1 idle: "
        "model.mesh_shape=[[4,1],[fsdp,tp]] or [[2,2],[fsdp,tp]] takes all"
    )


def test_processes_with_several_devices_each_take_all_of_them(monkeypatch):
    """As the page of a script of one's own has it."""
    gpus = [
        SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", process_index=i // 4)
        for i in range(8)
    ]
    monkeypatch.setattr(jax, "devices", lambda backend=None: gpus)
    monkeypatch.setattr(jaxprs, "backend_started", lambda: True)
    all_of_them = prepare_devices(2, axes={"dp": -1}, num_processes=2)
    assert all_of_them == "8 GPU devices in 2 processes (NVIDIA H200)"
    with pytest.raises(errors.DeviceCountError, match="have 8") as caught:
        prepare_devices(2, num_processes=2)
    assert "in a script: prepare_devices(..., axes={'dp': -1})" in caught.value.fix


@pytest.mark.usefixtures("four_gpus")
def test_too_few_accelerators_are_an_error_that_says_how_many_there_are():
    with pytest.raises(errors.DeviceCountError) as caught:
        prepare_devices(16, axes={"fsdp": 8, "tp": 2})
    assert str(caught.value) == (
        "[T702] the mesh takes 16 GPU devices\n"
        "  got: 4 on this machine (NVIDIA H200)\n"
        "  fix: use model.mesh_shape=[[2,2],[fsdp,tp]] or [[4,1],[fsdp,tp]]; -1 takes "
        "what there is\n"
        "  fix: or simulate 16 CPU devices: runtime.platform=cpu\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T702.html"
    )


@pytest.mark.usefixtures("four_gpus")
def test_too_few_accelerators_for_a_size_to_infer():
    with pytest.raises(errors.DeviceCountError) as caught:
        prepare_devices(8, axes={"fsdp": -1, "tp": 8})
    assert "4 on this machine" in caught.value.got


@pytest.mark.usefixtures("four_gpus")
def test_the_platform_cannot_change_once_the_backend_runs():
    with pytest.raises(errors.BackendStartedError) as caught:
        prepare_devices(4, "cpu")
    assert str(caught.value) == (
        "[T701] the CPU cannot be made the default platform any more\n"
        "  got: JAX has started its backend on gpu\n"
        "  fix: call prepare_devices before anything that touches a device, or start "
        "Python with JAX_PLATFORMS=cpu\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T701.html"
    )


@pytest.mark.full
def test_a_platform_that_the_environment_names_and_jax_cannot_start_is_explained():
    program = """
from tessera.train.runtime.devices import prepare_devices
try:
    prepare_devices(2)
except ValueError as error:
    print(error)
"""
    said = in_new_process(program, JAX_PLATFORMS="cuda")
    assert said.startswith(
        "[T702] JAX cannot start its backend on this machine\n"
        "  got: JAX_PLATFORMS is 'cuda'"
    )
    assert said.endswith(
        "  fix: leave JAX_PLATFORMS unset, or simulate devices: runtime.platform=cpu\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T702.html"
    )
    program = program.replace("prepare_devices(2)", "print(prepare_devices(2, 'cpu'))")
    assert in_new_process(program, JAX_PLATFORMS="cuda").startswith("simulating 2 CPU")
