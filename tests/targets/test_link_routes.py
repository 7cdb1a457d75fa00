# SPDX-License-Identifier: Apache-2.0
"""Collectives share links, or use links of their own."""

import pytest

from tessera.targets.link_routes import domain, group_links, permutation_links
from tessera.targets.target import Target

HOSTS = Target.parse("h100:2x8")
PLANE = Target.parse("v5e:4x4")
SLICES = Target.parse("v5e:4x4*2")
RINGS = Target.parse("v5p:4x4x4")


@pytest.mark.parametrize(
    ("group", "links"),
    [
        ((0, 1), {"NVLink"}),
        ((0, 8), {"InfiniBand"}),
        (range(16), {"NVLink", "InfiniBand"}),
        ((5,), set()),
    ],
)
def test_a_group_uses_the_levels_that_it_extends_over(group, links):
    assert group_links(HOSTS, group) == links


def test_hosts_of_which_a_part_of_the_devices_is_used_are_still_hosts():
    part = Target.parse("h100:2x4")
    assert [domain(part, device) for device in range(8)] == [0] * 4 + [1] * 4
    rack = Target.parse("gb200:36x2")
    assert [domain(rack, device) for device in (35, 36)] == [0, 1]


def test_each_slice_or_rack_of_a_target_is_a_domain():
    racks = Target.parse("gb200:16x4*2")
    assert [domain(racks, device) for device in (63, 64)] == [0, 1]
    assert [domain(SLICES, device) for device in (15, 16)] == [0, 1]


def test_a_group_in_several_slices_uses_the_links_between_them():
    assert group_links(SLICES, (3, 19)) == {"DCN"}
    inside, both = group_links(SLICES, range(4)), group_links(SLICES, (0, 1, 16, 17))
    assert both == inside | {"DCN"}


def test_the_same_links_of_two_slices_are_not_shared():
    inside = [(0, 1), (1, 2), (16, 17), (17, 18)]
    assert set(permutation_links(SLICES, inside).values()) == {1}
    assert permutation_links(SLICES, [(0, 16), (1, 17)]) == {"DCN": 2}


def test_a_group_of_a_torus_uses_the_links_along_its_dims_both_ways():
    row, column = group_links(PLANE, (0, 1, 2, 3)), group_links(PLANE, (0, 4, 8, 12))
    assert {(dim, step) for dim, step, _ in row} == {(0, 1), (0, -1)}
    assert row.isdisjoint(column)
    assert group_links(PLANE, range(16)) == row | column


def test_a_permutation_uses_one_link_for_each_pair_of_neighbors():
    ahead = permutation_links(PLANE, [(0, 1), (1, 2), (2, 3)])
    back = permutation_links(PLANE, [(1, 0), (2, 1), (3, 2)])
    assert set(ahead.values()) == {1}
    assert len(ahead) == 3
    # They run at the same time, but not while the row does something else.
    assert set(ahead).isdisjoint(back)
    assert set(ahead) <= group_links(PLANE, (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("target", "hops"),
    [(PLANE, 3), (RINGS, 1)],  # v5e has rings of 16 only
    ids=["line", "ring"],
)
def test_the_last_device_of_a_ring_is_a_neighbor_of_the_first(target, hops):
    assert sum(permutation_links(target, [(3, 0)]).values()) == hops


def test_pairs_whose_ways_meet_share_a_link():
    assert max(permutation_links(PLANE, [(0, 2), (1, 3)]).values()) == 2


def test_devices_of_one_chip_use_no_link_of_the_torus():
    chips = Target.parse("7x:2x2x2")
    assert list(permutation_links(chips, [(0, 1)])) == ["chip"]
    assert group_links(chips, (0, 1)) == {"chip"}


def test_a_device_sends_nothing_to_itself():
    assert not permutation_links(HOSTS, [(3, 3)])
