# SPDX-License-Identifier: Apache-2.0
"""What the devices of a mesh cannot have."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from tessera.errors import (
    DeviceCountError,
    DeviceMemoryError,
    SettingConflictError,
)
from tessera.mesh import Mesh
from tessera.targets.machine import machine
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.loop import device_checks
from tessera.train.loop.build_run import Run
from tessera.train.loop.device_checks import check_compilable, check_state_fits
from tests.train.config.command_lines import composed


def run_of(*overrides):
    settings = composed("data=synthetic", *overrides).config
    return Run(settings, mesh_of_shape(settings.model.mesh_shape))


def test_a_mesh_of_more_devices_than_jax_compiles_for_is_refused():
    check_compilable(Mesh(["dp"], devices=range(2048)))
    with pytest.raises(DeviceCountError) as caught:
        check_compilable(Mesh(["dp"], devices=range(2049)))
    assert str(caught.value) == (
        "[T702] the mesh has more devices than can be compiled for where they are "
        "not\n"
        "  got: dp mesh, 2049: 2049 devices, and CPU devices stand in for 2048 at "
        "most\n"
        "  fix: use a smaller mesh, or run it where the devices are\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T702.html"
    )
    with pytest.raises(DeviceCountError):
        run_of("training.dry_run=true", "model.mesh_shape=[[4096],[dp]]").check()


def test_devices_that_are_here_are_asked_for_fp8(monkeypatch):
    run = run_of("training.mixed_precision=fp8")
    run.check()
    monkeypatch.setattr(device_checks, "machine_of_kind", lambda _: machine("h100"))
    run.check()
    monkeypatch.setattr(device_checks, "machine_of_kind", lambda _: machine("a100"))
    with pytest.raises(SettingConflictError) as caught:
        run.check()
    assert caught.value.got == "training.mixed_precision=fp8 on a100"
    run_of("training.mixed_precision=bf16").check()


def test_a_state_larger_than_the_machine_is_refused_before_it_is_made():
    sizes = "model.d_model=65536", "model.mlp_dim=1048576"
    with pytest.raises(DeviceMemoryError) as caught:
        run_of(*sizes).check()
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        "[T509] the parameters and the optimizer's state do not fit into the memory"
    )
    assert lines[1].startswith("  got: 13.5 TiB for the device of this process, and ")
    run_of(*sizes, "training.dry_run=true").check()


def test_copies_on_each_device_count_and_parts_count_once(monkeypatch):
    run = run_of("model.mesh_shape=[[2],[dp]]")
    split = run_of("model.mesh_shape=[[2],[fsdp]]")
    leaves = jax.tree.leaves(split.abstract_state)
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    memory = {"SC_PHYS_PAGES": int(whole * 1.5), "SC_PAGE_SIZE": 1}
    monkeypatch.setattr(device_checks.os, "sysconf", memory.__getitem__)
    check_state_fits(split.abstract_state, split.mesh)
    with pytest.raises(DeviceMemoryError, match="for the 2 devices of this process"):
        check_state_fits(run.abstract_state, run.mesh)


def test_an_accelerator_has_a_limit_of_its_own():
    run = run_of()
    limited = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 1_000_000})
    mesh = SimpleNamespace(jax=SimpleNamespace(local_devices=[limited]))
    with pytest.raises(DeviceMemoryError, match="on each device, and a device has "):
        check_state_fits(run.abstract_state, mesh)
    kept = replace(run.abstract_state, params={}, optimizer={})
    check_state_fits(kept, mesh)
