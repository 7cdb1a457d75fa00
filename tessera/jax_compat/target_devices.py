# SPDX-License-Identifier: Apache-2.0
"""Starts the compilers of devices that are not there, through JAX's plugins.

The compilers of NVIDIA GPUs and TPUs run without their devices. JAX has the call that
describes such devices, and refuses to register the plugins without hardware.
"""

import functools
import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import jax
from jax._src.cudnn import fused_attention_stablehlo as cudnn_attention
from jax._src.lib import xla_client
from jax.experimental import topologies
from jax.extend.backend import get_backend

# Without them the CUDA plugin asks the driver for devices, and libtpu a metadata
# server for the machine's name.
_ENVIRONMENT = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "TPU_SKIP_MDS_QUERY": "1"}

# What libtpu would otherwise miss, and complain about; no topology depends on it. It
# also lets one process of a machine use it, though several may compile with it.
_NO_TPU = {
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@functools.cache
def cpu_devices(count: int) -> Sequence[jax.Device]:
    """Devices of a CPU client that programs are compiled for and never run on.

    They let a mesh of 72 devices be lowered, compiled and inspected on any machine.
    They have a separate client, so the process's default devices do not change.
    """
    return xla_client.make_cpu_client(num_devices=count).devices()


@functools.cache
def cuda_devices(topology: str, config: str) -> Sequence[jax.Device]:
    """NVIDIA GPUs that are not there, host by host.

    Args:
      topology: Racks × hosts of each × GPUs of each, such as ``1x2x8``.
      config: XLA's ``GpuTargetConfigProto`` of the device in text form.

    Raises:
      Exception: Of any class, where the plugin is missing or does not start.
    """
    options = {"topology": topology, "target_config": config}
    prepare()
    _assume_capabilities()
    try:
        found = topologies.get_topology_desc("target", "cuda", **options)
    except NotImplementedError:
        # The plugin was imported before, without the variable that lets it register.
        _cuda_plugin().initialize()
        found = topologies.get_topology_desc("target", "cuda", **options)
    return sorted(found.devices, key=lambda device: device.id)


def _cuda_plugin() -> Any:
    try:
        return import_module("jax_plugins.xla_cuda13")
    except ImportError:
        return import_module("jax_plugins.xla_cuda12")


@functools.cache
def _assume_capabilities() -> None:
    """Let a process without GPUs trace what cuDNN supports on newer GPUs only.

    JAX asks the GPU of this process for its compute capability, and takes none for an
    old one. Tessera's dispatch of attention has asked the target's device before.
    """
    of_this_process = cudnn_attention.check_compute_capability

    def check(capability: str) -> bool:
        if "cuda" in get_backend().platform_version:
            return of_this_process(capability)
        return True

    cudnn_attention.check_compute_capability = check


@functools.cache
def tpu_devices(
    topology: str, chip_config: str, slices: int = 1
) -> Sequence[jax.Device]:
    """TPU devices that are not there, slice by slice.

    Args:
      topology: Such as ``v5e:4x4``, in chips.
      chip_config: libtpu's name: ``default``, or ``megacore`` for one device a chip.
      slices: How many of that topology.

    Raises:
      Exception: Of any class, where libtpu is missing or has no such topology.
    """
    prepare()
    options: dict[str, Any] = {"num_slices": slices}
    if chip_config != "default":
        options["chip_config_name"] = chip_config
    found = topologies.get_topology_desc(topology, "tpu", **options)
    return sorted(found.devices, key=lambda device: device.id)


def prepare() -> None:
    """Let the plugins register without devices; to be called before JAX's backend."""
    variables = dict(_ENVIRONMENT)
    if (
        jax.config.values["jax_platforms"] == "cpu"
    ):  # this process uses no TPU of its own
        variables |= _NO_TPU
    for name, value in variables.items():
        os.environ.setdefault(name, value)
