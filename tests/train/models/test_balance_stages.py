# SPDX-License-Identifier: Apache-2.0
"""Layers over stages: nothing dropped, no stage dearer than it must be."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.errors import PipelineSizeError
from tessera.train.models.balance_stages import balanced, describe

COSTS = st.lists(st.integers(0, 9).map(float), min_size=1, max_size=8)


def every_split(number: int, parts: int) -> list[tuple[range, ...]]:
    cuts = combinations(range(1, number), parts - 1)
    return [
        tuple(map(range, (0, *cut), (*cut, number)))  # type: ignore[arg-type]
        for cut in cuts
    ]


def costs_of(split, costs, first, last) -> list[float]:
    each = [sum(costs[layer] for layer in part) for part in split]
    each[0] += first
    each[-1] += last
    return each


@given(COSTS, st.data(), st.integers(0, 12), st.integers(0, 12))
def test_no_other_split_has_a_cheaper_dearest_part_or_is_as_cheap_and_more_equal(
    costs, data, first, last
):
    parts = data.draw(st.integers(1, len(costs)))
    found = costs_of(balanced(costs, parts, first=first, last=last), costs, first, last)
    others = [
        costs_of(split, costs, first, last) for split in every_split(len(costs), parts)
    ]
    assert max(found) == min(map(max, others))
    squares = [sum(c * c for c in each) for each in others if max(each) == max(found)]
    assert sum(c * c for c in found) == min(squares)


@given(COSTS, st.data())
def test_every_layer_is_in_one_part_in_order_and_no_part_is_empty(costs, data):
    parts = data.draw(st.integers(1, len(costs)))
    split = balanced(costs, parts)
    assert [layer for part in split for layer in part] == list(range(len(costs)))
    assert len(split) == parts
    assert all(split)


def test_equal_layers_are_dealt_out_evenly_the_first_stages_get_the_more():
    sizes = [len(part) for part in balanced([0.1] * 26, 8)]
    assert sizes == [4, 4, 3, 3, 3, 3, 3, 3]


def test_the_embedding_and_the_head_count_as_layers_do():
    costs = [1.0] * 12
    assert [len(p) for p in balanced(costs, 4)] == [3, 3, 3, 3]
    assert [len(p) for p in balanced(costs, 4, first=1.0, last=3.0)] == [3, 4, 4, 1]


def test_hundreds_of_layers_are_no_trouble():
    split = balanced([1.0] * 300, 72, last=5.0)
    assert max(map(len, split)) == 5


def test_the_split_is_told_in_one_line():
    costs = [1.0] * 8
    split = balanced(costs, 3, last=2.0)
    assert describe(split, costs, last=2.0) == (
        "stage 0: layers 0-3, cost 0.40; stage 1: layers 4-6, cost 0.30; "
        "stage 2: layer 7, cost 0.30"
    )
    assert describe(balanced([2.0, 1.0], 2), [2.0, 1.0]) == (
        "stage 0: layer 0, cost 0.67; stage 1: layer 1, cost 0.33"
    )


def test_fewer_layers_than_stages_is_an_error_that_names_the_most():
    with pytest.raises(PipelineSizeError) as caught:
        balanced([1.0] * 3, 4)
    assert str(caught.value) == (
        "[T311] a pipeline has fewer layers than stages, so that a stage would be "
        "empty\n"
        "  got: 3 layers, 4 stages\n"
        "  fix: use at most 3 stages (devices x chunks), or at least 4 layers\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T311.html"
    )


def test_there_is_at_least_one_stage():
    with pytest.raises(PipelineSizeError, match="at least one stage"):
        balanced([1.0], 0)


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_a_cost_is_a_number_that_is_not_negative(wrong):
    with pytest.raises(PipelineSizeError) as caught:
        balanced([1.0, wrong], 1)
    assert str(caught.value) == (
        "[T311] the cost of a layer is a number that is not negative\n"
        f"  got: cost {wrong!r}\n"
        "  fix: give every layer a cost such as its number of operations\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T311.html"
    )
