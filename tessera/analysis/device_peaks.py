# SPDX-License-Identifier: Apache-2.0
"""Compares programs with the peaks of their devices, by JAX's name of the device.

The peaks are those of ``configs/target``: of dense arithmetic (vendors also quote a
doubled figure for matrices of which half is zero) and of one JAX device. They bound an
estimate; no program reaches them.
"""

import numpy as np
from jax.typing import DTypeLike

from tessera.targets.machine import machine_of_kind


def peak_flops(device_kind: str, dtype: DTypeLike = "bfloat16") -> float | None:
    """Peak FLOP/s of one device, for matmuls of one dtype.

    Args:
      device_kind: ``jax.devices()[0].device_kind``.
      dtype: The dtype of the matmuls' operands: bf16, f16 or f32.

    Returns:
      FLOP/s, or None where they are unknown.

    Example:
      >>> peak_flops("NVIDIA H200", "float32") / 1e12
      494.7
      >>> peak_flops("cpu") is None
      True
    """
    found = machine_of_kind(device_kind)
    return None if found is None else found.peak(np.dtype(dtype).name)


def mfu(
    flops: float, seconds: float, num_devices: int, peak_flops: float | None
) -> float | None:
    """Model FLOP utilization: the share of the devices' peak that a step reached.

    Args:
      flops: FLOPs of one step, all devices together.
      seconds: Time of the step.
      num_devices: Number of devices.
      peak_flops: Peak FLOP/s of one device, from :func:`peak_flops`.

    Returns:
      A share of 1, or None where the peak is unknown.

    Example:
      >>> mfu(4e14, 0.5, 2, 1e15)
      0.4
    """
    return None if peak_flops is None else flops / (seconds * num_devices * peak_flops)
