# SPDX-License-Identifier: Apache-2.0
"""Simulates devices on the CPU, before JAX starts."""

import os
import re

import jax

from tessera.errors import BackendStartedError, DeviceCountError
from tessera.jax_compat import jaxprs


def simulate_devices(count: int) -> None:
    """Give this process's CPU backend at least ``count`` devices.

    Also sets ``PJRT_NPROC``, from which XLA sizes the thread pool that all CPU devices
    share. With one thread per device, a queued step holds the thread that another
    step's collective waits for, and the process aborts after 40 s; eight devices
    deadlock with 12 threads and run with 16. Four threads per device, and at least 32,
    leave a factor of two; a waiting thread costs nothing. The variable has to be set
    before the backend starts, not before JAX is imported.

    If ``JAX_NUM_CPU_DEVICES`` or ``XLA_FLAGS`` requests enough devices already, this
    only sets the size of the thread pool; if the devices exist already, it does
    nothing.

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
    if jaxprs.backend_started():
        existing = len(jax.devices("cpu"))
        if existing < count:
            raise BackendStartedError(
                f"{count} CPU devices cannot be simulated any more",
                got=f"JAX has started its backend with {existing}",
                fix=f"call simulate_devices({count}) before anything that touches a "
                f"device, or start Python with JAX_NUM_CPU_DEVICES={count} "
                f"PJRT_NPROC={_threads(count)}",
            )
        return
    check_cpu_devices(count)
    requested = _requested_cpu_devices()
    if max(count, requested) > 1:
        text = os.environ.get("PJRT_NPROC", "")
        current = int(text) if text.isdecimal() else 0
        threads = max(_threads(max(count, requested)), current)
        os.environ["PJRT_NPROC"] = str(threads)
    if requested < count:
        jax.config.update("jax_num_cpu_devices", count)


def check_cpu_devices(count: int) -> None:
    """Raise [T702] if JAX cannot simulate so many CPU devices in a process."""
    if count > jaxprs.MOST_CPU_DEVICES:
        raise DeviceCountError(
            f"{count} CPU devices are more than JAX has in one process",
            got=f"{count}, and it takes at most {jaxprs.MOST_CPU_DEVICES}",
            fix="use a smaller mesh, or run it where there are accelerators",
        )


def _threads(count: int) -> int:
    """The threads that ``count`` devices need; at least one for each processor."""
    return max(32, 4 * count, os.cpu_count() or 1)


def _requested_cpu_devices() -> int:
    """CPU devices that the environment or JAX's configuration requests already."""
    configured: int = jax.config.values["jax_num_cpu_devices"]
    if configured > 0:
        return configured
    flag = r"--xla_force_host_platform_device_count=(\d+)"
    in_flags = re.findall(flag, os.environ.get("XLA_FLAGS", ""))
    return int(in_flags[-1]) if in_flags else 1
