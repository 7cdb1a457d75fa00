# SPDX-License-Identifier: Apache-2.0
"""Checks that the devices of a mesh can compile a run and hold its state."""

import os
from typing import Any

from tessera.analysis.inspection import inspect
from tessera.analysis.memory import format_bytes
from tessera.errors import (
    DeviceCountError,
    DeviceMemoryError,
    SettingConflictError,
    ShardDivisibilityError,
)
from tessera.jax_compat import jaxprs
from tessera.mesh import Mesh
from tessera.targets.machine import machine_of_kind
from tessera.train.runtime.devices import nearest_settings


def check_compilable(mesh: Mesh) -> None:
    """Check that a step can be compiled for a mesh.

    Raises:
      DeviceCountError: [T702] its devices are not here, and are too many for CPU
        devices to stand in for them.
      TargetCompilerError: [T712] the compiler of its target is not installed.
    """
    if mesh.target is not None:
        _ = mesh.compile_mesh  # its compiler starts, or raises
        return
    if mesh.is_abstract and mesh.size > jaxprs.MOST_CPU_DEVICES:
        raise DeviceCountError(
            "the mesh has more devices than can be compiled for where they are not",
            got=f"{mesh.topology}: {mesh.size} devices, and CPU devices stand in for "
            f"{jaxprs.MOST_CPU_DEVICES} at most",
            fix="use a smaller mesh, or run it where the devices are",
        )


def check_fp8(mesh: Mesh) -> None:
    """Check that devices multiply 8-bit numbers, as far as their kind is known.

    Raises:
      SettingConflictError: [T507] the compiler would cast them to 16 bits.
    """
    if mesh.target is not None:
        found = mesh.target.machine
    elif mesh.is_abstract:
        return
    else:
        found = machine_of_kind(mesh.jax.devices.flat[0].device_kind)
    if found is not None and not found.has_fp8:
        raise SettingConflictError(
            f"{found.device_kind} has no matmuls of 8-bit floating-point numbers",
            got=f"training.mixed_precision=fp8 on {found.name}",
            fix="use training.mixed_precision=bf16",
        )


def check_state_fits(state: Any, mesh: Mesh) -> None:
    """Check that the devices of this process hold the state of a run.

    Activations and temporaries come on top, so a state that fits is no promise.

    Args:
      state: Shapes, dtypes and layouts of every array.
      mesh: Where they lie.

    Raises:
      DeviceMemoryError: [T509] they do not.
    """
    summary, devices = inspect(state), mesh.jax.local_devices
    host, each = summary.host_nbytes, summary.local_nbytes - summary.host_nbytes
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    if limit is None:  # CPU devices have the memory of the host
        host, each = summary.local_nbytes, 0
    elif each > limit:
        raise _too_large(f"{format_bytes(each)} on each device", limit, "a device")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if (needed := host * len(devices)) > memory:
        count = f"the {len(devices)} devices" if len(devices) > 1 else "the device"
        needed_by = f"{format_bytes(needed)} for {count} of this process"
        raise _too_large(needed_by, memory, "this machine")


def _too_large(needed: str, available: int, where: str) -> DeviceMemoryError:
    return DeviceMemoryError(
        "the parameters and the optimizer's state do not fit into the memory",
        got=f"{needed}, and {where} has {format_bytes(available)}",
        fix="use a smaller model, a mesh of more devices with fsdp or tp, or an "
        "optimizer with less state; training.dry_run=true shows what each part takes",
    )


def with_idle_devices(
    error: ShardDivisibilityError, mesh: Mesh
) -> ShardDivisibilityError:
    """An error of a layout, with the meshes that use all devices where this cannot."""
    is_here = mesh.target is not None or not mesh.is_abstract
    idle = len(mesh.idle_device_ids) if is_here else 0
    count = mesh.size + idle
    if count % mesh.size == 0:
        return error
    shapes = nearest_settings(mesh.shape, count)
    return ShardDivisibilityError(
        f"the mesh leaves {idle} of {count} devices idle, and {error.what}",
        got=f"{mesh.topology} = {mesh.size}, and {count} devices\n{error.got}",
        fix=f"use model.mesh_shape={shapes}\nor {error.fix}",
    )
