# SPDX-License-Identifier: Apache-2.0
"""What the devices of this machine reach, as a target to plan for."""

import importlib
from dataclasses import replace

import jax
import pytest

from tessera.targets.machine import machine
from tessera.targets.target import Target

calibrate = importlib.import_module("benchmarks.calibrate")
RATES = calibrate.Rates(
    flops={"bfloat16": 2e11, "float32": 1e11},
    memory_bandwidth=3e9,
    elementwise=4e9,
    allocation=2e-9,
    operation=1e-5,
    step=2e-4,
    levels=(("devices", 8, 3e-5, 2e9),),
)


@pytest.mark.full
def test_every_rate_is_measured_where_there_are_devices(monkeypatch):
    # Small operands, as no rate is compared with what the machine reaches.
    monkeypatch.setattr(calibrate, "_MATMUL_SIZE", {"cpu": 64})
    monkeypatch.setattr(calibrate, "_ARRAY_BYTES", {"cpu": 2**20})
    monkeypatch.setattr(calibrate, "_CACHED_BYTES", 2**18)
    monkeypatch.setattr(calibrate, "_KEPT_BLOCKS", (2**14, 2**16))
    rates = calibrate.measure()
    assert min(*rates.flops.values(), rates.memory_bandwidth, rates.elementwise) > 1e6
    assert 0 < rates.operation < 0.1
    assert 0 < rates.step < 1
    ((_, count, latency, rate),) = rates.levels
    assert count == jax.device_count() > 1
    assert 0 < latency < 1
    assert rate > 1e5


def test_a_cpu_takes_what_was_measured_as_its_peaks():
    found = calibrate.calibrated(RATES, "laptop")
    assert found.flops == {"bfloat16": 2e11, "float32": 1e11, "elementwise": 4e9}
    assert found.efficiency["matmul"] == found.efficiency["memory"] == 1.0
    assert found.overhead == {"operation": 1e-5, "step": 2e-4, "allocation": 2e-9}
    (link,) = found.links
    assert (link.rate, link.latency, link.devices) == (2e9, 3e-5, None)
    assert found.sources["flops"].startswith("measured on ")


def test_the_file_is_a_target(tmp_path):
    file = tmp_path / "laptop.toml"
    found = calibrate.calibrated(RATES, "laptop")
    calibrate.write(found, file)
    assert Target.parse(f"{file}:8").machine == replace(found, file=file)


def test_every_figure_has_a_source(tmp_path):
    file = tmp_path / "laptop.toml"
    calibrate.write(calibrate.calibrated(RATES, "laptop"), file)
    assert set(machine(str(file)).sources) >= {
        "flops",
        "links",
        "overhead",
        "memory_bytes",
    }
