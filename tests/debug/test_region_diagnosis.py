# SPDX-License-Identifier: Apache-2.0
"""Whether the values of devices are blocks, copies or partial sums of a whole value."""

import numpy as np
import pytest

from tessera.debug.region_diagnosis import summed_axes

SIZES = {"dp": 2, "tp": 4}
WHOLE = np.arange(1.0, 33.0).reshape(4, 8)
EXACT = np.zeros_like(WHOLE)


def rows(block_of):
    """The value of each device of the mesh, from its coordinates along dp and tp."""
    return np.stack([block_of(i, j) for i in range(2) for j in range(4)])


@pytest.mark.parametrize(
    "block_of",
    [
        lambda i, j: WHOLE,
        lambda i, j: WHOLE[i * 2 : i * 2 + 2],
        lambda i, j: WHOLE[:, j * 2 : j * 2 + 2],
        lambda i, j: WHOLE[i * 2 : i * 2 + 2, j * 2 : j * 2 + 2],
        lambda i, j: WHOLE[j : j + 1],
    ],
    ids=["copies", "rows", "columns", "tiles", "single rows"],
)
def test_blocks_and_copies_are_no_partial_sums(block_of):
    assert summed_axes(WHOLE, rows(block_of), SIZES, EXACT) == ()


def test_the_order_of_the_blocks_does_not_matter():
    reversed_rows = rows(lambda i, j: WHOLE[3 - j : 4 - j])
    assert summed_axes(WHOLE, reversed_rows, SIZES, EXACT) == ()


def test_partial_sums_are_recognized_with_the_axes_that_add_them_up():
    quarter = rows(lambda i, j: WHOLE * (j + 1) / 10)
    assert summed_axes(WHOLE, quarter, SIZES, EXACT + 1e-12) == ("tp",)
    eighth = rows(lambda i, j: WHOLE / 8)
    assert summed_axes(WHOLE, eighth, SIZES, EXACT + 1e-12) == ("dp", "tp")


def test_blocks_may_be_partial_sums_too():
    both = rows(lambda i, j: WHOLE[i * 2 : i * 2 + 2] / 4)
    assert summed_axes(WHOLE, both, SIZES, EXACT) == ("tp",)


def test_other_values_have_no_axes():
    assert summed_axes(WHOLE, rows(lambda i, j: WHOLE + j), SIZES, EXACT) is None
    first_rows_alone = rows(lambda i, j: WHOLE[:2])
    assert summed_axes(WHOLE, first_rows_alone, SIZES, EXACT) is None
    assert summed_axes(WHOLE, rows(lambda i, j: WHOLE[:3]), SIZES, EXACT) is None
    assert summed_axes(WHOLE, rows(lambda i, j: WHOLE[0]), SIZES, EXACT) is None


def test_numbers_may_differ_by_what_is_allowed():
    near = rows(lambda i, j: WHOLE + 0.01 * j)
    assert summed_axes(WHOLE, near, SIZES, EXACT + 0.04) == ()
    assert summed_axes(WHOLE, near, SIZES, EXACT + 0.02) is None


def test_a_scalar_has_one_block():
    one = np.array(6.0)
    assert summed_axes(one, np.full(8, 6.0), SIZES, np.zeros(())) == ()
    assert summed_axes(one, np.full(8, 1.5), SIZES, np.zeros(())) == ("tp",)
