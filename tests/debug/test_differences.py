# SPDX-License-Identifier: Apache-2.0
"""What counts as a difference, where it is, and how a report says so."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.debug.differences import Difference, Report, difference
from tessera.debug.intermediates import EnclosingLoop, Site
from tessera.mesh import Mesh

F32, I32 = np.dtype(np.float32), np.dtype(np.int32)
SITE = Site(
    number=4,
    operation="mul",
    shape=(2, 3),
    dtype=F32,
    path="encoder/block",
    source="/somewhere/project/train.py:12",
    epsilon=2.0**-23,
)
ONES = np.ones((2, 3), np.float32)


def compare(expected, value, **tolerance):
    site = replace(SITE, shape=expected.shape, dtype=expected.dtype)
    return difference(site, expected, value, **tolerance)


def changed(index, by, array=ONES):
    other = array.copy()
    other[index] += by
    return other


def test_equal_values_are_no_difference():
    assert compare(ONES, ONES) is None


def test_half_of_the_digits_may_differ_by_default():
    assert compare(ONES, changed((1, 2), 1e-4)) is None
    found = compare(ONES, changed((1, 2), 1e-3))
    assert (found.index, found.count) == ((1, 2), 1)
    assert found.allowed == pytest.approx(2 * 2**-11.5)
    assert (found.value, found.expected) == (pytest.approx(1.001), 1.0)


def test_small_numbers_beside_large_ones_may_differ_by_what_those_may():
    values = np.array([1000.0, 0.0], np.float32)
    assert compare(values, values + np.float32(0.1)) is None
    assert compare(values[1:], values[1:] + np.float32(0.1)) is not None


def test_an_explicit_tolerance_is_used():
    off = changed((0, 0), 0.01)
    assert compare(ONES, off, rtol=0.02, atol=0.0) is None
    assert compare(ONES, off, rtol=0.0, atol=0.02) is None
    assert compare(ONES, off, rtol=0.005, atol=0.0) is not None


def test_integers_and_booleans_have_to_be_equal():
    numbers = np.arange(6, dtype=np.int32)
    loose = {"rtol": 1.0, "atol": 10.0}
    assert compare(numbers, numbers, **loose) is None
    found = compare(numbers, numbers + 1, **loose)
    assert (found.error, found.count) == (1.0, 6)
    mask = np.array([True, False])
    assert compare(mask, ~mask).count == 2


def test_values_that_are_not_finite_have_to_be_equal():
    odd = np.array([np.nan, np.inf, -np.inf, 1.0], np.float32)
    assert compare(odd, odd) is None
    for place, number in ((0, 1.0), (1, 1.0), (2, np.inf), (3, np.nan)):
        other = odd.copy()
        other[place] = number
        found = compare(odd, other)
        assert (found.error, found.index, found.count) == (math.inf, (place,), 1)


@pytest.mark.filterwarnings("error")
@given(
    st.lists(st.floats(width=32), min_size=1, max_size=5),
    st.lists(st.floats(width=32), min_size=1, max_size=5),
)
def test_any_two_arrays_can_be_compared(some, others):
    size = min(len(some), len(others))
    one = np.array(some[:size], np.float32)
    two = np.array(others[:size], np.float32)
    found = compare(one, two, rtol=0.0, atol=0.0)
    same = np.array_equal(one, two, equal_nan=True)
    assert (found is None) == same


def test_complex_numbers_are_compared_by_their_distance():
    one = np.array([1 + 1j], np.complex64)
    assert compare(one, one + np.complex64(3 + 4j)).error == pytest.approx(5.0)


def test_another_shape_is_a_difference():
    found = difference(SITE, ONES, np.ones((8, 3)))
    assert found.shape == (8, 3)
    assert found.as_lines()[-1] == "shape      [8, 3], not [2, 3]"


@pytest.mark.parametrize(("is_reversed", "first"), [(False, 1), (True, 3)])
def test_in_a_loop_the_first_iteration_in_time_counts(is_reversed, first):
    site = replace(SITE, loops=(EnclosingLoop(2, 4, is_reversed),))
    expected = np.ones((4, 2, 3), np.float32)
    value = changed(([1, 2, 3], 0, 1), np.array([5, 7, 9]), expected)
    found = difference(site, expected, value)
    assert (found.iterations, found.index) == ((first,), (0, 1))
    assert found.error == {1: 5, 3: 9}[first]
    time = 0 if is_reversed else 1
    assert found.when == (2, time, 4)


# --- the report

MESHES = Mesh(["tp"], devices=range(1)), Mesh(["tp"], devices=range(4))
FOUND = Difference(
    site=SITE,
    when=(4,),
    error=0.5,
    allowed=0.001,
    index=(1, 2),
    value=1.5,
    expected=1.0,
    count=3,
)


def report(first=None, **facts):
    known = {"name": "step", "reference": MESHES[0], "mesh": MESHES[1]}
    counts = {"compared": 10, "alone": 0}
    return Report(first=first, **known | counts | facts)


def test_a_report_names_the_first_difference_and_its_line():
    inside = "dot_general at /somewhere/project/layers.py:7"
    first = replace(FOUND, site=replace(SITE, inside=inside))
    assert report(first, alone=1).as_text() == (
        "step step, compared with tp mesh, 1\n"
        "tp mesh, 4: the first difference\n"
        "  operation  mul: float32[2,3] in encoder/block\n"
        "  line       project/train.py:12\n"
        "  inside     made by dot_general at project/layers.py:7\n"
        "  error      0.5, allowed 0.001, in 3 of 6 elements\n"
        "  largest    at [1, 2]: 1.5, not 1\n"
        "  1 operation has no counterpart"
    )


def test_a_report_of_no_difference_says_how_much_was_compared():
    assert report().agrees
    assert report().first is None
    assert str(report()) == (
        "step step, compared with tp mesh, 1\n"
        "tp mesh, 4: no difference in 10 operations"
    )
    line = repr(report(alone=2)).splitlines()[-1]
    assert line == "  2 operations have no counterpart"


def test_a_scalar_and_an_iteration_are_named():
    looped = replace(FOUND, site=replace(SITE, shape=()), index=(), iterations=(2, 0))
    line = looped.as_lines()[-1]
    assert line == "largest    at the only element of iteration 2, 0: 1.5, not 1"
