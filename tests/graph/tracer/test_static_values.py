# SPDX-License-Identifier: Apache-2.0
"""Which static values are alike. That programs follow is tested in test_recompiling."""

import functools
from dataclasses import dataclass
from enum import Enum

import jax.numpy as jnp
import numpy as np
import pytest

from tessera.graph.tracer.static_values import StaticValue


class Mode(Enum):
    TRAIN = 1


@dataclass(frozen=True)
class Layer:
    size: int

    def apply(self, x):
        return x


def closing_over(value):
    return lambda x: (x, value)


def recursive():
    def descend(n):
        return n and descend(n - 1)

    return descend


def mutual():
    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n != 0 and even(n - 1)

    return even


def unassigned():
    def function():
        return later

    if not function:
        later = None
    return function


def with_default(value):
    def function(x, y=value, *, z=value):
        return x

    return function


def alike(one, other):
    same = StaticValue.of(one) == StaticValue.of(other)
    assert same == StaticValue.of(one).is_equivalent(other)
    assert not same or hash(StaticValue.of(one)) == hash(StaticValue.of(other))
    return same


ARRAY = jnp.ones(2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: 1,
        lambda: "text",
        lambda: float("nan"),
        lambda: Mode.TRAIN,
        lambda: np.dtype("float32"),
        lambda: jnp.bfloat16,
        lambda: Layer(2),
        lambda: Layer(2).apply,
        lambda: closing_over([1, {"a": (2.0, None)}]),
        lambda: closing_over(ARRAY),
        lambda: closing_over(closing_over(Layer(3))),
        lambda: with_default({"a": 1}),
        lambda: functools.partial(closing_over(1), 2, b=[3], a=4),
        lambda: functools.partial(closing_over, ARRAY),
        recursive,
        mutual,
    ],
    ids=range(16),
)
def test_what_is_made_anew_is_alike(make):
    assert alike(make(), make())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        ("1", 1),
        (complex(0, 0.0), complex(0, -0.0)),
        (Layer(2), Layer(3)),
        (Layer(2).apply, Layer(3).apply),
        (closing_over(1), closing_over(True)),
        (closing_over([1]), closing_over((1,))),
        (closing_over({"a": 1}), closing_over({"a": 2})),
        (closing_over(jnp.ones(2)), closing_over(jnp.ones(2))),
        (closing_over(np.ones(2)), closing_over(np.ones(2))),
        (closing_over(object()), closing_over(object())),
        (with_default(1), with_default(2)),
        (functools.partial(max, 1), functools.partial(max, 2)),
        (functools.partial(max, 1), functools.partial(min, 1)),
        (functools.partial(max, key=len), functools.partial(max)),
        (unassigned(), unassigned()),
        (object(), object()),
    ],
    ids=range(19),
)
def test_what_may_behave_otherwise_is_not(one, other):
    assert not alike(one, other)
    assert alike(one, one)
    assert alike(other, other)


def test_a_function_that_is_changed_is_another():
    one, other = closing_over(1), closing_over(1)
    assert alike(one, other)
    other.option = 2
    assert not alike(one, other)


def test_what_has_no_hash_is_no_static_value_and_like_none():
    with pytest.raises(TypeError):
        StaticValue.of({1})
    assert not StaticValue.of(frozenset({1})).is_equivalent({1})


@dataclass(unsafe_hash=True)
class Number:
    """Compares and hashes by a number that may change."""

    number: int


def test_a_value_that_changes_in_place_is_another():
    number = Number(1)
    before = StaticValue.of(number)
    assert before.is_equivalent(number)
    number.number = 2
    assert not before.is_equivalent(number)
    assert before != StaticValue.of(number)
    assert not before.is_equivalent(Number(2))
    number.number = 1
    assert before.is_equivalent(number)
    assert before.is_equivalent(Number(1))


def test_a_function_whose_variable_changes_is_another():
    def counting():
        count = 0

        def step():
            nonlocal count
            count += 1

        return step

    step = counting()
    before = StaticValue.of(step)
    assert before.is_equivalent(step)
    step()
    assert not before.is_equivalent(step)


NOTEBOOK = """
scale, table = 1.0, [1.0]


def helper(x):
    return x * scale + table[0]


def make():
    return lambda x: helper(x)
"""


@pytest.mark.parametrize(
    "change",
    [
        "scale = 2.0",
        "table.append(2.0)",
        "table = jnp.ones(1)",
        "def helper(x): return x",
    ],
)
def test_a_new_function_is_another_if_what_it_reads_of_its_module_changed(change):
    module = {"jnp": jnp}
    exec(NOTEBOOK, module)
    one = StaticValue.of(module["make"]())
    assert one.is_equivalent(module["make"]())
    exec(change, module)
    assert not one.is_equivalent(module["make"]())


def test_functions_of_other_modules_do_not_change():
    module = {"closing_over": closing_over, "np": np}
    exec("def make(): return lambda: closing_over(np)", module)
    one = StaticValue.of(module["make"]())
    assert one.is_equivalent(module["make"]())
