# SPDX-License-Identifier: Apache-2.0
"""A workload is that of one device, whatever the size of its machine."""

from tessera.targets.target import Target
from tessera.train.planner.workload import LEAST, workload
from tests.train.planner.test_step_time import config


def test_devices_beyond_the_first_are_not_made():
    """A CPU client of 100,352 devices takes minutes and 19 GiB."""
    policies = ("none",)
    few = workload(config(), Target.parse("h100:1x8", "cpu"), policies)
    many = workload(config(), Target.parse("h100:12544x8", "cpu"), policies)
    assert many.recomputed == few.recomputed
    assert [each.flops for each in many.products] == [e.flops for e in few.products]


def test_the_least_policy_is_below_all_others():
    found = workload(config(), Target.parse("cpu:8"), ("none", "full")).recomputed
    least = found[LEAST]
    assert least.kept_bytes == 0
    assert least.products == found["none"].products
    assert least.products < found["full"].products
