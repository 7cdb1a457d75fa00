# SPDX-License-Identifier: Apache-2.0
import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from tessera.analysis import replica_groups
from tessera.analysis.replica_groups import axes_of


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{}", ((0, 1, 2, 3),)),
        ("{{0},{1},{2},{3}}", ((0,), (1,), (2,), (3,))),
        ("[2,2]<=[4]", ((0, 1), (2, 3))),
        ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("[1,4]<=[4]", ((0, 1, 2, 3),)),
        ("mesh['axis_0'=2,'axis_1'=2] {'axis_1'}", ((0, 1), (2, 3))),
        ("mesh['dp'=2,'tp'=2] {'tp','dp'}", ((0, 2, 1, 3),)),
        ("mesh['dp'=1,'tp'=4] {'dp','tp'}", ((0, 1, 2, 3),)),
        ("mesh[dp=2,tp=2] {dp}", ((0, 2), (1, 3))),
        ("mesh['x'=4] {}", ((0,), (1,), (2,), (3,))),
        # Devices in another order, listed or as a transposition.
        ("mesh['x'=2,'y'=2], device_ids=(0,2,1,3) {'y'}", ((0, 2), (1, 3))),
        ("mesh['x'=2,'y'=2], device_ids=([2,2]T(1,0)) {'y'}", ((0, 2), (1, 3))),
        # Parts of an axis: the second half of x = 2 × 2, and both halves of it.
        ("mesh['x'=4] {'x':(2)2}", ((0, 1), (2, 3))),
        ("mesh['x'=4] {'x':(1)2}", ((0, 2), (1, 3))),
        ("mesh['x'=4] {'x':(2)2,'x':(1)2}", ((0, 2, 1, 3),)),
    ],
)
def test_every_syntax_names_the_same_devices(text, groups):
    assert replica_groups.parse(text, 4) == groups


def test_parts_of_two_axes():
    text = "mesh['a'=8,'b'=8,'c'=16] {'a':(2)4,'b':(2)4}"
    groups = replica_groups.parse(text, 1024)
    grid = np.arange(1024).reshape(2, 4, 2, 4, 16).transpose(0, 2, 4, 1, 3)
    assert groups == tuple(map(tuple, grid.reshape(-1, 16).tolist()))


def test_an_unknown_syntax_is_refused():
    with pytest.raises(ValueError, match="in an unknown syntax: '<0,1>'"):
        replica_groups.parse("<0,1>", 2)


@st.composite
def meshes_and_axes(draw):
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    shape = {f"axis_{i}": size for i, size in enumerate(sizes)}
    chosen = draw(st.sets(st.sampled_from(sorted(shape))))
    return shape, tuple(axis for axis in shape if axis in chosen)


@given(meshes_and_axes())
def test_groups_written_in_any_syntax_find_their_axes(case):
    shape, axes = case
    sizes = tuple(shape.values())
    order = [i for i, axis in enumerate(shape) if axis not in axes]
    order += [i for i, axis in enumerate(shape) if axis in axes]
    size = math.prod(shape[axis] for axis in axes)
    total = math.prod(sizes)
    grid = np.arange(total).reshape(sizes).transpose(order).reshape(-1, size)
    numbers = ",".join(str(n) for n in sizes)
    mesh = ",".join(f"'{axis}'={n}" for axis, n in shape.items())
    names = ",".join(f"'{axis}'" for axis in axes)
    texts = (
        "{" + ",".join("{" + ",".join(map(str, row)) + "}" for row in grid) + "}",
        f"[{total // size},{size}]<=[{numbers}]T({','.join(map(str, order))})",
        f"mesh[{mesh}] {{{names}}}",
    )
    expected = tuple(axis for axis in axes if shape[axis] > 1)
    for text in texts:
        groups = replica_groups.parse(text, total)
        assert groups == tuple(map(tuple, grid.tolist()))
        assert axes_of(groups, shape) == expected


def test_parts_of_an_axis_lie_along_it():
    assert axes_of(((0, 1), (2, 3), (4, 5), (6, 7)), {"dp": 2, "tp": 4}) == ("tp",)
    assert axes_of(((0, 5), (1, 4), (2, 7), (3, 6)), {"dp": 2, "tp": 4}) == ("dp", "tp")


def test_axes_come_in_the_meshs_order_whatever_the_groups_order():
    assert axes_of(((0, 2, 1, 3),), {"dp": 2, "tp": 2}) == ("dp", "tp")


@pytest.mark.parametrize(
    ("pairs", "axes"),
    [
        ("{{0,1},{1,0}}", ("tp",)),
        ("{{0,2},{1,3}}", ("dp",)),
        ("{{0,1},{1,2},{2,3},{3,0}}", ("dp", "tp")),
        ("{{0,0},{1,1}}", ()),
        ("{{0,1},{4,5}}", ("?",)),
        ("{}", ()),
    ],
)
def test_a_permutation_runs_over_the_axes_in_which_it_moves(pairs, axes):
    pairs = replica_groups.parse_pairs(pairs)
    assert axes_of(pairs, {"dp": 2, "tp": 2}) == axes
