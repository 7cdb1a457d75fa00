# SPDX-License-Identifier: Apache-2.0
"""Prepares the devices of a run: checks the accelerators, or simulates CPU devices.

A run begins with ``prepare_devices(8)``: it gives a machine without an accelerator
eight CPU devices, and checks the count on one that has accelerators.

JAX fixes the devices when its backend starts, and only then is it known which
accelerators there are. So the CPU devices are requested first, and the backend is
started second: on a GPU or TPU, unused CPU devices cost nothing.
"""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import NoReturn

import jax

from tessera.errors import BackendStartedError, DeviceCountError
from tessera.foundations.device_grid import nearest_shapes
from tessera.foundations.simulated_devices import check_cpu_devices, simulate_devices
from tessera.jax_compat import jaxprs
from tessera.train.runtime.rank_consistency import (
    Fingerprint,
    difference_error,
    differences,
)


def prepare_devices(
    num_needed: int,
    platform: str = "auto",
    *,
    axes: Mapping[str, int] | None = None,
    num_processes: int = 1,
) -> str:
    """Check that a mesh of ``num_needed`` devices can run, and start the backend.

    Args:
      num_needed: Devices that the mesh takes; the least, if a size is -1.
      platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``; ``"auto"`` takes what JAX prefers,
        which follows ``JAX_PLATFORMS``.
      axes: The mesh's axes and sizes, of which one may be -1: then the mesh takes as
        many devices as there are.
      num_processes: Processes that share the devices, already connected.

    Returns:
      A line for the log: ``"simulating 4 CPU devices: …"`` or
      ``"4 of 8 GPU devices (NVIDIA H200)"``.

    Raises:
      BackendStartedError: [T701] the backend was started before with fewer CPU devices,
        or on another platform than the one asked for.
      DeviceCountError: [T702] the machine has no such platform, or fewer accelerators
        than the mesh takes; or the mesh leaves processes without a device.
      RanksDifferError: [T707] the processes have devices of different kinds.

    Example:
      >>> prepare_devices(8, "cpu")
      'simulating 8 CPU devices: what they compute is right, how fast is not'
    """
    num_here = ceil(num_needed / num_processes)
    if platform == "cpu":
        _choose_cpu(num_here)
    # With more than JAX can simulate, only accelerators will do.
    elif not jaxprs.backend_started() and num_here <= jaxprs.MOST_CPU_DEVICES:
        simulate_devices(num_here)
    devices = _start_backend(platform)
    found, count = devices[0].platform, len(devices)
    takes_all = axes is not None and -1 in axes.values()
    if num_processes > 1:
        check_homogeneous(devices)
        if not takes_all and count != num_needed:
            _raise_idle_devices(num_needed, count, num_processes, axes)
    if found == "cpu":
        check_cpu_devices(num_here)
        simulate_devices(num_needed)
    elif count < num_needed:
        fix = _other_mesh(axes, count)
        if num_needed <= jaxprs.MOST_CPU_DEVICES:
            fix += f"\nor simulate {num_needed} CPU devices: runtime.platform=cpu"
        raise DeviceCountError(
            f"the mesh takes {num_needed} {found.upper()} devices",
            got=f"{count} on this machine ({devices[0].device_kind})",
            fix=fix,
        )
    used = count // num_needed * num_needed if takes_all else num_needed
    number = f"{used} of {count}" if used < count else f"{used}"
    processes = f" in {num_processes} processes" if num_processes > 1 else ""
    idle = ""
    if used < count and axes is not None:
        shapes = nearest_settings(axes, count)
        idle = f"; {count - used} idle: model.mesh_shape={shapes} takes all"
    if found != "cpu":
        kind = devices[0].device_kind
        return f"{number} {found.upper()} devices{processes} ({kind}){idle}"
    if used == 1:
        return f"{number} CPU devices{idle}" if idle else "one CPU device"
    return (
        f"simulating {number} CPU devices{processes}: what they compute is right, how "
        f"fast is not{idle}"
    )


def check_homogeneous(devices: Sequence[jax.Device]) -> None:
    """Check that all processes have devices of the same kind, and as many.

    Args:
      devices: Those of all processes.

    Raises:
      RanksDifferError: [T707] they differ.
    """
    kinds: dict[int, list[str]] = {}
    for device in devices:
        kinds.setdefault(device.process_index, []).append(device.device_kind)
    fingerprints: dict[int, Fingerprint] = {}
    for rank, own in kinds.items():
        entries = {"kind": ", ".join(sorted(set(own))), "count": str(len(own))}
        fingerprints[rank] = {"devices": entries}
    if found := differences(fingerprints):
        raise difference_error(found)


def _raise_idle_devices(
    needed: int, count: int, num_processes: int, axes: Mapping[str, int] | None
) -> NoReturn:
    raise DeviceCountError(
        f"the mesh takes {needed} devices, and {num_processes} processes have {count}",
        got=f"{count // num_processes} devices in each process: all of them have to be "
        "in the mesh, or a process would have nothing to do",
        fix=_other_mesh(axes, count)
        + ("" if axes else "\nin a script: prepare_devices(..., axes={'dp': -1})")
        + "\nor start another number of processes",
    )


def _choose_cpu(count: int) -> None:
    """Make the CPU the default platform, with ``count`` devices."""
    check_cpu_devices(count)
    if jaxprs.backend_started():
        if jax.default_backend() != "cpu":
            raise BackendStartedError(
                "the CPU cannot be made the default platform any more",
                got=f"JAX has started its backend on {jax.default_backend()}",
                fix="call prepare_devices before anything that touches a device, or "
                "start Python with JAX_PLATFORMS=cpu",
            )
    else:
        jax.config.update("jax_platforms", "cpu")
    simulate_devices(count)


def _start_backend(platform: str) -> list[jax.Device]:
    """The default devices; T702 if they are not of the requested platform."""
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:
        # The named platform's plugin cannot start, or (a bare assert) is absent.
        reason = f": {str(error).splitlines()[0]}" if str(error) else ""
        raise DeviceCountError(
            "JAX cannot start its backend on this machine",
            got=f"JAX_PLATFORMS is {jax.config.values['jax_platforms']!r}{reason}",
            fix="leave JAX_PLATFORMS unset, or simulate devices: runtime.platform=cpu",
        ) from error
    found = devices[0].platform
    if platform not in ("auto", found):
        extra = {"gpu": "cuda12", "tpu": "tpu"}.get(platform, platform)
        raise DeviceCountError(
            f"there is no {platform.upper()} that JAX can use",
            got=f"JAX started on {found.upper()}",
            fix=f"install JAX's plugin for it: pip install 'tessera-spmd[{extra}]'\n"
            f"or take what is there: runtime.platform={found}",
        )
    return devices


def _other_mesh(axes: Mapping[str, int] | None, count: int) -> str:
    axes = axes or {"fsdp": -1}
    return (
        f"use model.mesh_shape={nearest_settings(axes, count)}; -1 takes what there is"
    )


def nearest_settings(axes: Mapping[str, int], count: int) -> str:
    """The nearest meshes of a number of devices, as ``model.mesh_shape`` is written.

    Args:
      axes: Names and sizes of the axes; -1 may become any.
      count: The number of devices.

    Example:
      >>> nearest_settings({"fsdp": 3, "tp": 2}, 64)
      '[[32,2],[fsdp,tp]] or [[8,8],[fsdp,tp]]'
    """
    names = ",".join(axes)
    shapes = nearest_shapes(tuple(axes), tuple(axes.values()), count)
    return " or ".join(f"[[{','.join(map(str, s))}],[{names}]]" for s in shapes)
