# SPDX-License-Identifier: Apache-2.0
"""The devices of this process: how many there are, or how many are simulated.

Before anything else of a run: ``prepare_devices(8)`` gives a machine without an
accelerator eight CPU devices, and checks the count on one that has accelerators.

JAX fixes the devices when its backend starts, and what accelerators there are is only
known then. So the CPU devices are asked for first, the backend is started second, and
what it chose decides: on a GPU or TPU the CPU devices lie idle and cost nothing.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from math import ceil, log2, prod
from typing import NoReturn

import jax

from tessera import _jax
from tessera.errors import BackendStartedError, DeviceCountError
from tessera.runtime.rank_consistency import difference_error, differences


def simulate_devices(count: int) -> None:
    """Give this process's CPU backend at least ``count`` devices.

    Also sets ``PJRT_NPROC``, from which XLA sizes the thread pool that all CPU devices
    share. With a pool of one thread a device, a queued step holds the thread that
    another step's collective waits for, and the process aborts after 40 s; eight
    devices stop at 12 threads and run at 16. Four threads a device, 32 at least, leaves
    a factor of two; a thread that waits costs nothing. It has to be in the environment
    before the backend starts; before JAX is imported is not needed.

    Where ``JAX_NUM_CPU_DEVICES`` or ``XLA_FLAGS`` asks for enough devices already, only
    the thread pool is set; where they are there already, nothing is done.

    Args:
      count: Devices needed, at least 1.

    Raises:
      BackendStartedError: [T701] JAX has started its backend with fewer CPU devices.
      DeviceCountError: [T702] there are more of them than JAX can simulate.

    Example:
      >>> simulate_devices(8)
      >>> len(jax.devices("cpu"))
      8
    """
    assert count >= 1, f"{count} devices cannot be simulated"
    if _jax.backend_started():
        there = len(jax.devices("cpu"))
        if there < count:
            raise BackendStartedError(
                f"{count} CPU devices cannot be simulated any more",
                got=f"JAX has started its backend with {there}",
                fix=f"call simulate_devices({count}) before anything that touches a "
                f"device, or start Python with JAX_NUM_CPU_DEVICES={count} "
                f"PJRT_NPROC={_threads(count)}",
            )
        return
    _check_cpu_devices(count)
    asked_for = _cpu_devices_asked_for()
    if max(count, asked_for) > 1:
        threads = max(_threads(max(count, asked_for)), _environment_int("PJRT_NPROC"))
        os.environ["PJRT_NPROC"] = str(threads)
    if asked_for < count:
        jax.config.update("jax_num_cpu_devices", count)


def prepare_devices(
    num_needed: int,
    platform: str = "auto",
    *,
    axes: Mapping[str, int] | None = None,
    num_processes: int = 1,
) -> str:
    """Make sure that a mesh of ``num_needed`` devices can run, and start the backend.

    Args:
      num_needed: Devices that the mesh takes; at least, where a size is -1.
      platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``; ``"auto"`` takes what JAX prefers,
        which follows ``JAX_PLATFORMS``.
      axes: The mesh's axes and sizes, of which one may be -1: then the mesh takes as
        many devices as there are. An error proposes others like it.
      num_processes: Processes that have the devices together, already connected.

    Returns:
      What the log says of it: ``"simulating 4 CPU devices: …"`` or
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
    # Not so many: what counts then is whether there are accelerators.
    elif not _jax.backend_started() and num_here <= _jax.MOST_CPU_DEVICES:
        simulate_devices(num_here)
    devices = _start_backend(platform)
    found, there = devices[0].platform, len(devices)
    takes_all = axes is not None and -1 in axes.values()
    if num_processes > 1:
        check_alike(devices)
        if not takes_all and there != num_needed:
            _refuse_idle(num_needed, there, num_processes, axes)
    if found == "cpu":
        _check_cpu_devices(num_here)
        simulate_devices(num_needed)
    elif there < num_needed:
        raise DeviceCountError(
            f"the mesh takes {num_needed} {found.upper()} devices",
            got=f"{there} on this machine ({devices[0].device_kind})",
            fix=_smaller_meshes(axes or {"fsdp": num_needed}, there)
            + f"\nor simulate {num_needed} CPU devices: runtime.platform=cpu"
            * (num_needed <= _jax.MOST_CPU_DEVICES),
        )
    used = there // num_needed * num_needed if takes_all else num_needed
    counted = f"{used} of {there}" if used < there else f"{used}"
    spread = f" in {num_processes} processes" * (num_processes > 1)
    if found != "cpu":
        return f"{counted} {found.upper()} devices{spread} ({devices[0].device_kind})"
    if used == 1:
        return "one CPU device"
    return (
        f"simulating {counted} CPU devices{spread}: what they compute is right, how "
        "fast is not"
    )


def _check_cpu_devices(count: int) -> None:
    """See that JAX can have so many CPU devices in a process.

    Raises:
      DeviceCountError: [T702] it cannot.
    """
    if count > _jax.MOST_CPU_DEVICES:
        raise DeviceCountError(
            f"{count} CPU devices are more than JAX has in one process",
            got=f"{count}, and it takes at most {_jax.MOST_CPU_DEVICES}",
            fix="use a smaller mesh, or run it where there are accelerators",
        )


def check_alike(devices: Sequence[jax.Device]) -> None:
    """See that all processes have devices of the same kind, and as many.

    Args:
      devices: Those of all processes.

    Raises:
      RanksDifferError: [T707] they have not.
    """
    kinds: dict[int, list[str]] = {}
    for device in devices:
        kinds.setdefault(device.process_index, []).append(device.device_kind)
    found = differences(
        {
            rank: {
                "devices": {
                    "kind": ", ".join(sorted(set(kind))),
                    "count": str(len(kind)),
                }
            }
            for rank, kind in kinds.items()
        }
    )
    if found:
        raise difference_error(found)


def _refuse_idle(
    needed: int, there: int, num_processes: int, axes: Mapping[str, int] | None
) -> NoReturn:
    raise DeviceCountError(
        f"the mesh takes {needed} devices, and {num_processes} processes have {there}",
        got=f"{there // num_processes} devices in each process: all of them have to be "
        "in the mesh, or a process would have nothing to do",
        fix=_smaller_meshes(axes or {"fsdp": needed}, there)
        + "\nor start another number of processes: --nprocs",
    )


def _choose_cpu(count: int) -> None:
    """Make the CPU the default platform, with ``count`` devices."""
    _check_cpu_devices(count)
    if _jax.backend_started():
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
    """The default devices, or T702 when they are not of the platform asked for."""
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:
        # A platform is named whose plugin cannot start, or (a bare assert) is absent.
        why = f": {str(error).splitlines()[0]}" if str(error) else ""
        raise DeviceCountError(
            "JAX cannot start its backend on this machine",
            got=f"JAX_PLATFORMS is {jax.config.values['jax_platforms']!r}{why}",
            fix="leave JAX_PLATFORMS unset, or simulate devices: runtime.platform=cpu",
        ) from error
    found = devices[0].platform
    if platform not in ("auto", found):
        extra = {"gpu": "cuda12", "tpu": "tpu"}.get(platform, platform)
        raise DeviceCountError(
            f"there is no {platform.upper()} that JAX can use",
            got=f"JAX started on {found.upper()}",
            fix=f"install JAX's plugin for it (pip install -e '.[{extra}]'), or "
            f"take what is there: runtime.platform={found}",
        )
    return devices


def _threads(count: int) -> int:
    """The thread pool that ``count`` devices need; never fewer than the processors."""
    return max(32, 4 * count, os.cpu_count() or 1)


def _cpu_devices_asked_for() -> int:
    """CPU devices that the process's environment or configuration already asks for."""
    configured: int = jax.config.values["jax_num_cpu_devices"]
    if configured > 0:
        return configured
    flag = r"--xla_force_host_platform_device_count=(\d+)"
    in_flags = re.findall(flag, os.environ.get("XLA_FLAGS", ""))
    return int(in_flags[-1]) if in_flags else 1


def _environment_int(name: str) -> int:
    """An environment variable that holds a number, or 0."""
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else 0


def _smaller_meshes(axes: Mapping[str, int], count: int) -> str:
    """Up to three meshes of ``count`` devices, as like ``axes`` as can be."""
    wanted = [max(size, 1) for size in axes.values()]
    shrink = log2(prod(wanted) / count) / len(wanted)

    def unlikeness(sizes: tuple[int, ...]) -> float:
        pairs = zip(sizes, wanted, strict=True)
        return sum(abs(log2(size / want) + shrink) for size, want in pairs)

    nearest = sorted(_factorings(count, len(wanted)), key=unlikeness)[:3]
    names = ",".join(axes)
    shown = (f"[[{','.join(map(str, sizes))}],[{names}]]" for sizes in nearest)
    return f"use model.mesh_shape={' or '.join(shown)}"


def _factorings(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as an ordered product of ``parts`` factors."""
    if parts == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _factorings(number // first, parts - 1):
                yield (first, *rest)
