# SPDX-License-Identifier: Apache-2.0
"""Which leaves of a call are the arrays of its program, and which are static."""

import numpy as np
import pytest

from tessera.graph.call_kinds import CallKind, Program
from tessera.graph.tracer.arguments import ProgramMismatch, flatten_args

X, Y = np.ones(2), np.ones(3)


def kind_of(*args, **kwargs):
    call = flatten_args(["a", "b", "c"][: len(args)], args, kwargs)
    return CallKind.of(Program(call, None, None, None), call)


def test_a_program_takes_the_arrays_of_a_call_in_their_order():
    kind = kind_of({"y": Y, "k": 3}, (X, "s"), None, z=Y, e=1.5)
    found = kind.arrays_of([3, Y, X, "s", 1.5, Y])
    assert [id(array) for array in found] == [id(Y), id(X), id(Y)]
    kind.check([3, Y, X, "s", 1.5, Y])


def test_leaves_that_are_all_arrays_are_not_copied():
    leaves = [X, Y]
    assert kind_of(X, Y).arrays_of(leaves) is leaves


@pytest.mark.parametrize("other", [4, 3.0, True, "3", X, None, {3}], ids=str)
def test_a_static_leaf_of_another_value_is_a_mismatch(other):
    kind = kind_of(X, {"y": Y, "k": 3})
    kind.check([X, 3, Y])
    with pytest.raises(ProgramMismatch):
        kind.check([X, other, Y])


def test_a_value_that_is_not_equal_to_itself_is_still_the_same():
    nan = float("nan")
    kind_of(X, nan).check([X, nan])
    kind_of(X, nan).check([X, float("nan")])
