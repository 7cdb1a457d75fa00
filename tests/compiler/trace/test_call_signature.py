# SPDX-License-Identifier: Apache-2.0
"""Ways to write one call, and how a program takes its arguments from each."""

import inspect

import jax
import numpy as np
import pytest

from tessera.compiler.trace.arguments import ProgramMismatch, flatten_args
from tessera.compiler.trace.call_signature import CallSignature

X, Y = np.ones(2), np.ones(3)
ARRAY = np.ones(4)


def function(a, /, b, c=3, *rest, d=4, e=ARRAY, **more): ...


FORM = CallSignature(inspect.signature(function), "function")


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((X, Y), {}), ((X,), {"b": Y}), ((X, Y, 3), {}), ((X,), {"d": 4, "b": Y, "c": 3})],
)
def test_a_call_has_one_form(args, kwargs):
    positional, named = FORM.normalize(args, kwargs)
    assert positional[0] is X
    assert positional[1] is Y
    assert (positional[2:], named) == ((3,), {"d": 4})


def test_more_arguments_keep_their_places():
    assert FORM.normalize((1, 2, 3, 4, 5), {"z": 6}) == (
        (1, 2, 3, 4, 5),
        {"d": 4, "z": 6},
    )


def test_a_default_with_an_array_or_without_a_hash_stays_the_functions():
    def other(a, b=(1, ARRAY), c={1}, d=None, e=[2, "x"]): ...  # noqa: B006

    assert CallSignature(inspect.signature(other), "other").normalize((0,), {}) == (
        (0,),
        {"d": None, "e": [2, "x"]},
    )


def test_a_wrong_call_is_a_type_error_as_in_python():
    with pytest.raises(TypeError, match="missing a required argument: 'b'"):
        FORM.normalize((X,), {})


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((X, Y), {}, (X, Y, None, None)),
        ((X, Y, 3), {"d": 4}, (X, Y, None, None)),
        ((X,), {"d": 4, "b": Y}, (X, Y, None, None)),
        ((X, Y, 3, ARRAY), {"z": Y, "e": X}, (X, Y, None, ARRAY, None, X, Y)),
    ],
)
def test_a_program_takes_what_its_form_has_in_its_order(args, kwargs, expected):
    found = roles_of(args, kwargs).arrays_of(jax.tree.leaves((args, kwargs)))
    wanted = [id(array) for array in expected if array is not None]
    assert [id(array) for array in found] == wanted


def roles_of(args, kwargs):
    call = flatten_args(("a", "b", "c"), *FORM.normalize(args, kwargs))
    tree = jax.tree.structure((args, kwargs))
    return FORM.pattern(args, kwargs).leaf_roles(call, tree)


def test_leaves_in_the_programs_order_are_not_copied():
    leaves = [X, Y]
    assert roles_of((X, Y), {}).arrays_of(leaves) is leaves


@pytest.mark.parametrize("other", [4, 3.0, True, "3", X, None, {3}], ids=str)
def test_a_static_leaf_of_another_value_is_a_mismatch(other):
    roles = roles_of((X, {"y": Y, "k": 3}), {})
    roles.check([X, 3, Y])
    with pytest.raises(ProgramMismatch):
        roles.check([X, other, Y])


def test_a_value_that_is_not_equal_to_itself_is_still_the_same():
    nan = float("nan")
    roles_of((X, nan), {}).check([X, nan])
    roles_of((X, nan), {}).check([X, float("nan")])
