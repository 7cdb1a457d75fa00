# SPDX-License-Identifier: Apache-2.0
"""Lists the peak performance of accelerators, by JAX's name of the device.

Peaks are of dense arithmetic (vendors also quote a doubled figure for matrices of which
half is zero) and of one JAX device. They bound an estimate; no program reaches them.
"""

from dataclasses import dataclass

import numpy as np
from jax.typing import DTypeLike


@dataclass(frozen=True, slots=True)
class Peak:
    """The peak performance of one device.

    Attributes:
      bf16: FLOP/s of bf16 and f16 matmuls.
      f32: FLOP/s of f32 matmuls as XLA runs them by default: in TF32 on NVIDIA, in one
        bf16 pass on a TPU.
      memory_bandwidth: Bytes/s between the device and its memory.
      link_bandwidth: Bytes/s that one device sends during a collective along one mesh
        axis: to the NVLink switch, or both ways around one ring of a TPU's torus.
      is_torus: Whether devices reach only their neighbors, as in a TPU pod.
    """

    bf16: float
    f32: float
    memory_bandwidth: float
    link_bandwidth: float
    is_torus: bool = False


# NVIDIA's datasheets of A100, H100, H200, HGX B200 and GB200. They quote NVLink in both
# directions together; half of that leaves a device.
_H100 = Peak(989.4e12, 494.7e12, 3.35e12, 450e9)
_H200 = Peak(989.4e12, 494.7e12, 4.8e12, 450e9)
# Tables of "How to Scale Your Model", chapter 2 (jax-ml.github.io/scaling-book/tpus),
# with the bidirectional bandwidth of one ICI axis.
_V4 = Peak(275e12, 275e12, 1.2e12, 9e10, is_torus=True)
_V5E = Peak(197e12, 197e12, 0.81e12, 1e11, is_torus=True)
_V5P = Peak(459e12, 459e12, 2.8e12, 2e11, is_torus=True)
_V6E = Peak(920e12, 920e12, 1.6e12, 2e11, is_torus=True)

PEAKS: dict[str, Peak] = {
    "NVIDIA A100-SXM4-40GB": Peak(312e12, 156e12, 1.555e12, 300e9),
    "NVIDIA A100-SXM4-80GB": Peak(312e12, 156e12, 2.039e12, 300e9),
    "NVIDIA H100 80GB HBM3": _H100,
    "NVIDIA H200": _H200,
    "NVIDIA B200": Peak(2250e12, 1100e12, 8e12, 900e9),
    "NVIDIA GB200": Peak(2500e12, 1250e12, 8e12, 900e9),
    "TPU v4": _V4,
    "TPU v5 lite": _V5E,
    "TPU v5e": _V5E,
    "TPU v5": _V5P,
    "TPU v5p": _V5P,
    "TPU v6 lite": _V6E,
    "TPU v6e": _V6E,
}


def peak(device_kind: str) -> Peak | None:
    """The peaks of a kind of device, or None where they are unknown, as for CPUs.

    Args:
      device_kind: ``jax.devices()[0].device_kind``.
    """
    return PEAKS.get(device_kind)


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
    best = peak(device_kind)
    if best is None:
        return None
    rates = {"bfloat16": best.bf16, "float16": best.bf16, "float32": best.f32}
    return rates.get(np.dtype(dtype).name)


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
