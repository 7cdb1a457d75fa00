# SPDX-License-Identifier: Apache-2.0
"""Collectives take the time that their bytes need on the slowest link they use."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.analysis.collective import KINDS
from tessera.targets.link_times import (
    Span,
    collective_seconds,
    level_bytes,
    permutation_span,
    sent_bytes,
    span,
)
from tessera.targets.machine import machine
from tessera.targets.target import Target

HOSTS = Target.parse("h100:2x8")
TORUS = Target.parse("v5p:4x4x4")


def ideal(name):
    """A machine whose links have no latency and reach their bandwidth."""
    found = machine(name)
    links = [dataclasses.replace(x, efficiency=1.0, latency=1e-30) for x in found.links]
    return dataclasses.replace(found, links=tuple(links))


@pytest.mark.parametrize(
    ("group", "inside", "domains"),
    [
        (range(8), 8, 1),
        (range(16), 8, 2),
        ((0, 8), 1, 2),
        (range(0, 16, 2), 4, 2),
        ((3,), 1, 1),
    ],
)
def test_a_group_extends_over_hosts(group, inside, domains):
    where = span(HOSTS, group)
    assert (where.inside, where.domains) == (inside, domains)


@pytest.mark.parametrize(
    ("group", "rings"),
    [
        (range(4), ((4, 1.0),)),  # a whole ring
        (range(16), ((4, 1.0), (4, 1.0))),  # a plane
        ((0, 1), ((2, 0.5),)),  # neighbors: a line
        ((0, 2), ((2, 0.5),)),  # opposite on a ring of four
        ((0, 16, 32, 48), ((4, 1.0),)),  # along the last dim
    ],
)
def test_a_group_extends_along_rings_of_a_torus(group, rings):
    assert span(TORUS, group).rings == rings


def test_one_rack_of_72_is_one_domain_although_it_has_18_hosts():
    assert span(Target.parse("gb200:18x4"), range(72)).domains == 1
    assert span(Target.parse("gb200:1x4*18"), range(72)).domains == 18
    assert span(Target.parse("gb200:16x4*2"), range(128)) == Span(128, 64)


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        ("all-gather", 8e9 / 450e9 * 7 / 8),
        ("reduce-scatter", 8e9 / 450e9 * 7 / 8),
        ("all-reduce", 2 * 8e9 / 450e9 * 7 / 8),
        ("all-to-all", 8e9 / 450e9 * 7 / 8),
        ("collective-permute", 8e9 / 450e9),
    ],
)
def test_inside_a_host_the_switch_decides(kind, seconds):
    found = collective_seconds(ideal("h100"), kind, 8e9, Span(8, 8))
    assert found == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        # Eight links leave each host; half of the array comes from the other one.
        ("all-gather", 8e9 / 2 / (8 * 50e9)),
        ("all-reduce", 2 * 8e9 / 2 / (8 * 50e9)),
        ("all-to-all", 8e9 / 2 / 50e9),
        ("collective-permute", 8e9 / 50e9),
    ],
)
def test_across_hosts_the_network_decides(kind, seconds):
    found = collective_seconds(ideal("h100"), kind, 8e9, Span(16, 8))
    inside = 8e9 / 450e9 * 15 / 16 * (2 if kind == "all-reduce" else 1)
    expected = max(seconds, inside) if kind.startswith("all-") else seconds
    assert found == pytest.approx(expected)


def test_two_rings_of_a_torus_carry_twice_as_much():
    v5p = ideal("v5p")
    one = collective_seconds(v5p, "all-gather", 1e9, Span(4, 4, ((4, 1.0),)))
    two = collective_seconds(v5p, "all-gather", 1e9, Span(16, 16, ((4, 1.0),) * 2))
    assert one == pytest.approx(1e9 / 1.8e11 * 3 / 4)
    assert two == pytest.approx(1e9 / 3.6e11 * 15 / 16)


SLICES = Target.parse("v5p:4x4x4*2")


def test_a_group_extends_over_slices():
    assert span(SLICES, range(128)) == Span(128, 64, ((4, 1.0),) * 3)
    assert span(SLICES, (0, 64)) == Span(2, 1)
    assert span(SLICES, (0, 1, 2, 3, 64, 65, 66, 67)) == Span(8, 4, ((4, 1.0),))
    assert permutation_span(SLICES, [(0, 1), (1, 64)]) == Span(2, 1)


@pytest.mark.parametrize(
    ("kind", "inside", "across"),
    [
        # A slice sums or gathers in itself; each chip sends its quarter across.
        ("all-reduce", 2 * 1e9 / 1.8e11 * 3 / 4, 2 * 1e9 / 2 / 4 / 6.25e9),
        ("all-gather", 1e9 / 1.8e11 * 3 / 4, 1e9 / 2 / 4 / 6.25e9),
        ("all-to-all", 1e9 / 2 * 4 / (4 * 1.8e11), 1e9 / 2 / 6.25e9),
        ("collective-permute", 0.0, 1e9 / 6.25e9),
    ],
)
def test_between_slices_the_time_of_their_links_is_added(kind, inside, across):
    v5p, where = ideal("v5p"), Span(8, 4, ((4, 1.0),))
    found = collective_seconds(v5p, kind, 1e9, where)
    assert found == pytest.approx(inside + across)
    sent = level_bytes(v5p, kind, 1e9, where)
    assert sent[v5p.links[1]] == pytest.approx(across * 6.25e9)
    assert (sent[v5p.links[0]] > 0) == (inside > 0)


def test_the_links_between_slices_take_no_time_of_one_slice():
    v5p, where = ideal("v5p"), Span(4, 4, ((4, 1.0),))
    for kind in KINDS:
        assert level_bytes(v5p, kind, 1e9, where)[v5p.links[1]] == 0


def test_a_ring_of_neighbors_sends_in_one_direction_at_half_of_the_bandwidth():
    v5p, pairs = ideal("v5p"), [(0, 1), (1, 2), (2, 3), (3, 0)]
    where = permutation_span(TORUS, pairs)
    found = collective_seconds(v5p, "collective-permute", 1e9, where)
    assert found == pytest.approx(1e9 / 0.9e11)


def test_pairs_that_share_a_link_take_as_long_as_all_of_them():
    v5p, where = ideal("v5p"), permutation_span(TORUS, [(0, 2), (1, 3)])
    found = collective_seconds(v5p, "collective-permute", 1e9, where)
    assert found == pytest.approx(2 * 1e9 / 0.9e11)


@pytest.mark.parametrize(
    ("pairs", "domains"), [([(0, 1), (1, 0)], 1), ([(0, 1), (1, 8)], 2)]
)
def test_the_slowest_pair_of_a_permutation_decides(pairs, domains):
    assert permutation_span(HOSTS, pairs).domains == domains


@pytest.mark.parametrize(
    ("kind", "nbytes"),
    [("all-reduce", 1500), ("all-gather", 750), ("collective-permute", 1000)],
)
def test_the_least_that_a_device_sends(kind, nbytes):
    assert sent_bytes(kind, 1000, 4) == nbytes


def test_one_device_sends_nothing():
    assert collective_seconds(HOSTS.machine, "all-reduce", 1e9, Span(1, 1)) == 0


@given(
    kind=st.sampled_from(KINDS),
    sent=st.integers(1, 10**10),
    hosts=st.sampled_from([1, 2, 4]),
    name=st.sampled_from(["h100", "a100", "gb200"]),
)
def test_more_bytes_and_slower_links_never_take_less_time(kind, sent, hosts, name):
    found = machine(name)
    where = Span(4 * hosts, 4)
    seconds = collective_seconds(found, kind, sent, where)
    assert seconds > 0
    assert collective_seconds(found, kind, 2 * sent, where) > seconds
    slow = [dataclasses.replace(x, bandwidth=x.bandwidth / 2) for x in found.links]
    slower = dataclasses.replace(found, links=tuple(slow))
    assert collective_seconds(slower, kind, sent, where) >= seconds


@given(
    kind=st.sampled_from(KINDS),
    group=st.sampled_from([range(8), range(16), (0, 8), range(0, 16, 2), (0, 1)]),
)
def test_the_slower_level_decides_how_long_a_collective_takes(kind, group):
    found, where = ideal("h100"), span(HOSTS, group)
    levels = level_bytes(found, kind, 1e9, where)
    longest = max(sent / link.rate for link, sent in levels.items())
    assert collective_seconds(found, kind, 1e9, where) == pytest.approx(longest)
    assert (levels[found.links[-1]] > 0) == (where.domains > 1)
