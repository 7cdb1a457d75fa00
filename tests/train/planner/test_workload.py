# SPDX-License-Identifier: Apache-2.0
"""A workload is that of one device, whatever the size of its machine."""

import pytest

from tessera.targets.target import Target
from tessera.train.planner.workload import LEAST, workload
from tests.train.planner.test_step_time import config


@pytest.fixture(scope="module")
def few():
    return workload(config(), Target.parse("h100:1x8", "cpu"), ("none", "full"))


@pytest.fixture(scope="module")
def many():
    """A CPU client of all its devices would take minutes and 19 GiB."""
    return workload(config(), Target.parse("h100:12544x8", "cpu"), ("none", "full"))


def test_devices_beyond_the_first_are_not_made(few, many):
    assert many.recomputed == few.recomputed
    assert [each.flops for each in many.products] == [e.flops for e in few.products]


def test_the_least_policy_is_below_all_others(few):
    least = few.recomputed[LEAST]
    assert least.kept_bytes == 0
    assert least.products == few.recomputed["none"].products
    assert least.products < few.recomputed["full"].products
