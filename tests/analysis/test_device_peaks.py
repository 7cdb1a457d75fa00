# SPDX-License-Identifier: Apache-2.0
import jax.numpy as jnp
import pytest

from tessera.analysis.device_peaks import mfu, peak_flops


@pytest.mark.parametrize(
    ("kind", "dtype", "flops"),
    [
        ("NVIDIA H100 80GB HBM3", jnp.bfloat16, 989.4e12),
        ("NVIDIA H200", "float16", 989.4e12),
        ("NVIDIA H200", "float32", 494.7e12),
        ("TPU v5 lite", "bfloat16", 197e12),
        ("NVIDIA H200", "int8", None),
        ("cpu", "float32", None),
    ],
)
def test_the_peak_of_a_device_and_dtype(kind, dtype, flops):
    assert peak_flops(kind, dtype) == flops


def test_an_unknown_device_has_no_peak():
    assert peak_flops("cpu") is None
    assert mfu(1e12, 1.0, 8, peak_flops("cpu")) is None


def test_utilization_is_a_share_of_all_devices_together():
    assert mfu(8e12, 2.0, 4, 2e12) == 0.5
