# SPDX-License-Identifier: Apache-2.0
"""Sizes of symbols, solved from the shapes of several arrays."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tessera.annotations.dims import Dim
from tessera.annotations.sizes import Constraint, solve


def solved(*equations):
    """Solve equations such as ``B=4``, each with a source of its own."""
    pairs = [equation.split("=") for equation in equations]
    return solve(
        Constraint(Dim(d), int(size), f"at {i}") for i, (d, size) in enumerate(pairs)
    )


def test_a_symbol_has_the_size_that_all_agree_on():
    solution = solved("B=4", "S=8", "B=4", "_=3", "_=5", "_any=1", "_any=2")
    assert (solution.sizes, solution.problems) == ({"B": 4, "S": 8}, [])


def test_who_does_not_agree_is_named_with_the_size():
    solution = solved("B=4", "B=8", "B=4", "B=3")
    assert solution.problems == ["B is 4 by at 0 and at 2, 8 by at 1, 3 by at 3"]


def test_a_size_has_to_be_met():
    assert solved("8=8", "2*3=6").problems == []
    assert solved("8=7").problems == ["at 0 is 7, not 8"]


@pytest.mark.parametrize(
    ("equations", "known"),
    [
        (["D=8", "3*D*H=48"], {"D": 8, "H": 2}),
        (["3*D*H=48", "D=8"], {"D": 8, "H": 2}),
        (["A*B=6", "B*C=15", "C=5"], {"A": 2, "B": 3, "C": 5}),
    ],
    ids=str,
)
def test_a_product_with_one_unknown_is_solved(equations, known):
    solution = solved(*equations)
    assert (solution.sizes, solution.problems) == (known, [])


@pytest.mark.parametrize(
    ("equations", "problem"),
    [
        (["D=8", "3*D=25"], "3*D is 24 with D = 8, and 25 by at 1"),
        (["3*D=25"], "3*D is 25 by at 0, which is no multiple of 3"),
        (["S=2", "S+5=3"], "S+5 is 7 with S = 2, and 3 by at 1"),
        (["S+5=8", "S+5=9"], "S+5 is 8 by at 0, 9 by at 1"),
        (["2*S=6", "S+5=9"], "S+5 is 8 with S = 3, and 9 by at 1"),
        (["S=9", "S//2=5"], "S//2 is 4 with S = 9, and 5 by at 1"),
        (["3*D=24", "2*D=18"], "D is 8 by at 0, 9 by at 1"),
        (["3*D*H=24", "D*H=7"], "D*H is 8 by at 0, 7 by at 1"),
        (["3*D*H=24", "H*D=7"], "D*H is 8 by at 0, 7 by at 1"),
        (["3*D*H=25", "D*H=8"], "3*D*H is 25 by at 0, which is no multiple of 3"),
        (["D*D=9", "2*D*D=16"], "D*D is 9 by at 0, 8 by at 1"),
        (["A=2", "A*B*C=9"], "A*B*C is 9 by at 1, which is no multiple of 2"),
        (["A=0", "A*B=9"], "A*B is 9 by at 1, which is no multiple of 0"),
    ],
    ids=str,
)
def test_an_expression_that_is_not_met_says_why(equations, problem):
    assert solved(*equations).problems == [problem]


def test_products_of_several_unknowns_are_compared():
    assert solved("3*D*H=24", "D*H=8", "2*H*D=16").problems == []


def test_a_product_of_several_unknowns_is_checked_when_one_is_known():
    assert solved("3*D*H=24", "D*H=8", "H=2").sizes == {"D": 4, "H": 2}


def test_what_no_size_can_be_said_of_is_let_through():
    assert solved("A+B=5", "S//2=4", "S+1=4", "D*D=9").problems == []
    assert solved("D=0", "3*D*H=0").sizes == {"D": 0}


def test_a_division_by_nothing_is_no_size():
    assert solved("S=0", "8//S=4").problems == [
        "8//S is no size with S = 0, and 4 by at 1"
    ]


@given(
    st.integers(1, 9), st.integers(0, 9), st.integers(1, 5), st.permutations(range(4))
)
def test_true_equations_in_any_order_agree(d, h, factor, order):
    equations = [
        f"D={d}",
        f"{factor}*D*H={factor * d * h}",
        f"H+D={h + d}",
        f"D*H={d * h}",
    ]
    solution = solved(*(equations[i] for i in order))
    assert solution.problems == []
    assert solution.sizes == {"D": d, "H": h}
