# SPDX-License-Identifier: Apache-2.0
"""Changes of sets, deques, NumPy arrays and objects that the call itself made."""

import collections
import dataclasses
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tessera as ts
from tessera.errors import BranchError, ControlFlowError

X = jnp.float32(2.0)
YES, NO = jnp.array(True), jnp.array(False)


def both(function, *args):
    """The results for both values of the condition, as Python numbers."""
    compiled = ts.function(function)
    return [compiled(*args, flag) for flag in (YES, NO)]


# --- other containers


def test_deques_counters_slots_and_sets_are_changed_on_the_way_that_is_taken():
    class Slots:
        __slots__ = ("n",)

    def function(x, flag):
        window = collections.deque([x, x], maxlen=2)
        votes = collections.Counter(a=1)
        slots = Slots()
        slots.n = x
        seen = {1}
        if flag:
            window.append(x * 10.0)
            votes["a"] += 6
            slots.n = slots.n + 1.0
            seen.add(2)
        else:
            seen.add(2)
        return list(window), votes["a"], slots.n, len(seen)

    (window, votes, slots, seen), other = both(function, X)
    assert ([float(v) for v in window], int(votes), float(slots), seen) == (
        [2, 20],
        7,
        3,
        2,
    )
    assert ([float(v) for v in other[0]], int(other[1]), float(other[2])) == (
        [2, 2],
        1,
        2,
    )


def test_a_set_of_different_elements_is_named():
    @ts.function
    def function(x, flag):
        seen = {1}
        if flag:
            seen.add(2)
        return x * len(seen)

    with pytest.raises(BranchError) as caught:
        function(X, YES)
    assert caught.value.got == (
        "seen that holds 2: the Python number 2 if it holds, nothing if not"
    )


def writes(values):
    values[0] = 1


def writes_in_place(values):
    values += 1


def writes_an_entry_in_place(values):
    rows = {"a": values}
    rows["a"] += 1


WRITES = (
    *(writes, writes_in_place, writes_an_entry_in_place),
    lambda values: values.fill(1),
    lambda values: np.add(1, 2, out=values[:1]),
)


@pytest.mark.parametrize("write", WRITES)
def test_a_numpy_array_from_before_is_not_written_in_a_branch(write):
    @ts.function
    def function(x, flag):
        values = np.zeros(2, np.float32)
        if flag:
            write(values)
        return x + values

    with pytest.raises(ControlFlowError, match="is changed at"):
        function(X, YES)


def test_bytes_from_before_are_not_written_in_a_branch():
    @ts.function
    def function(x, flag):
        data = bytearray(2)
        if flag:
            data[0] = 1
        return x

    with pytest.raises(ControlFlowError, match="'data' is changed at"):
        function(X, YES)


@pytest.mark.parametrize("write", WRITES)
def test_a_numpy_array_that_is_one_of_two_is_not_written(write):
    first, second = np.zeros(2, np.float32), np.ones(2, np.float32)

    @ts.function
    def function(x, flag):
        values = first if flag else second
        write(first)
        return x + values

    with pytest.raises(ControlFlowError, match="is changed at"):
        function(X, YES)
    assert first.sum() == 0


def test_a_numpy_array_that_a_branch_makes_is_its_own():
    def function(x, flag):
        if flag:
            values = np.zeros(2, np.float32)
            values[0] = 1
            x = x + values[0]
        return x

    assert [float(v) for v in both(function, X)] == [3, 2]


def test_a_numpy_array_that_the_call_makes_is_filled_in_straight_code():
    def function(x, flag):
        values = np.zeros((2, 4), np.float32)
        values[:, 0::2] = 1
        values += 1
        return x + values.sum() if flag else x

    assert [float(v) for v in both(function, X)] == [14, 2]


# --- what unconverted code changes


class Tally:
    def __init__(self, n):
        self.n = n

    @property
    def bumped(self):
        self.n = self.n + 1.0
        return self.n

    def __enter__(self):
        self.n = self.n * 3.0

    def __exit__(self, *error):
        pass


def test_properties_contexts_and_libraries_change_what_the_call_has_made():
    def function(x, flag):
        tally, rows = Tally(x), [1.0, 3.0]
        if flag:
            operator.setitem(rows, 0, tally.bumped)
        else:
            with tally:
                operator.setitem(rows, 1, x)
        return tally.n, *rows

    found = both(function, X)
    assert [[float(v) for v in each] for each in found] == [[3, 3, 3], [6, 1, 2]]


@dataclasses.dataclass
class Record:
    n: float
    rows: list = dataclasses.field(default_factory=list)


def test_what_constructors_slices_and_jax_make_may_be_changed():
    def function(x, flag):
        def body(carry, _):
            carry["n"] = carry["n"] * 2.0
            return carry, None

        def keep(**options):
            options["x"] = x
            return options

        record, rows = Record(1.0), [x, x][:1] * 2
        record.rows.append(x)
        carry, _ = jax.lax.scan(body, {"n": x}, None, length=2)
        kept = keep()
        if flag:
            record.n = rows[1] = carry["n"] = kept["x"] = x * 10.0
            record.rows[0] = -x
        return record.n, record.rows[0], *rows, carry["n"], kept["x"]

    found = [[float(v) for v in values] for values in both(function, X)]
    assert found == [[20, -2, 2, 20, 20, 20], [1, 2, 2, 2, 8, 2]]
