# SPDX-License-Identifier: Apache-2.0
"""Finds the devices of a mesh by their ids, here or on its target."""

import math

import jax
from jax import Device

from tessera.errors import AbstractMeshError
from tessera.foundations.device_grid import listed
from tessera.targets.target import Target


def find_devices(ids: tuple[int, ...]) -> list[Device] | None:
    """The devices with these ids, or None if some do not exist.

    CPU clients of several processes number devices with gaps. Then ids below the device
    count are positions, so that a mesh counts from zero everywhere.
    """
    devices = sorted(jax.devices(), key=lambda device: device.id)
    by_id = {device.id: device for device in devices}
    if all(i in by_id for i in ids):
        return [by_id[i] for i in ids]
    if all(i < len(devices) for i in ids):
        return [devices[i] for i in ids]
    return None


def default_ids(
    shape: tuple[int, ...] | None, target: Target | None
) -> tuple[int, ...]:
    """Ids of all devices, or of as many as the shape has, even if too few exist."""
    if target is None:
        here = tuple(device.id for device in jax.devices())
    else:
        here = tuple(range(target.num_devices))
    if shape is None or -1 in shape:
        return here
    size = math.prod(shape)
    return here[:size] if size <= len(here) else tuple(range(size))


def no_place(
    topology: str, ids: tuple[int, ...], target: Target | None, *, is_region: bool
) -> AbstractMeshError:
    """The error [T105] for a mesh that nothing can run on.

    Args:
      topology: Its axes and sizes.
      ids: Its devices.
      target: Its target, if it has one.
      is_region: Whether it is that of an SPMD region.
    """
    if is_region:
        return AbstractMeshError(
            "inside a manual region there is no mesh to place arrays on",
            got=f"the region is manual over {topology}",
            fix="place arrays outside the region and pass them in as arguments",
        )
    if target is not None:
        return AbstractMeshError(
            "this mesh is of a target, which programs are compiled for and not run",
            got=f"{topology} on {target}",
            fix="leave target= out where the machine is; traces, compiling, "
            "memory and the ledger work as it is",
        )
    here = tuple(device.id for device in jax.devices())
    needed = max(len(ids), max(ids) + 1)
    return AbstractMeshError(
        "this mesh is abstract: it has devices that this machine lacks",
        got=f"{topology}, devices {listed(ids)}; "
        f"this machine has {len(here)}: {listed(here)}",
        fix=f"run it where there are {needed} devices, or simulate them: "
        f'jax.config.update("jax_num_cpu_devices", {needed}) before JAX is used\n'
        "specs, traces and compile-only analysis work on it as it is",
    )
