# SPDX-License-Identifier: Apache-2.0
"""Changes of sets, deques, NumPy arrays and objects that the call itself made."""

import collections
import operator
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tessera as ts
from tessera.errors import ControlFlowError

X = jnp.float32(2.0)
YES, NO = jnp.array(True), jnp.array(False)


def both(function, *args):
    """The results for both values of the condition, as Python numbers."""
    compiled = ts.function(function)
    return [compiled(*args, flag) for flag in (YES, NO)]


# --- other containers


def test_counters_are_changed_on_the_way_that_is_taken():
    def function(x, flag):
        votes = collections.Counter(a=1)
        rows = collections.defaultdict(list, a=[x])
        if flag:
            votes["a"] += 6
            rows["a"][0] = -x
        return votes["a"], rows["a"][0]

    found = [[float(v) for v in values] for values in both(function, X)]
    assert found == [[7, -2], [1, 2]]


def test_dicts_keep_the_order_of_their_keys():
    def function(x, flag):
        table = {"b": x, "a": x * 2.0, "c": x}
        if flag:
            table["a"] = x * 3.0
            table["b"] = x * 4.0
        return [*table.values()]

    found = [[float(v) for v in values] for values in both(function, X)]
    assert found == [[8, 6, 2], [2, 4, 2]]


def adds_in_two_orders(table, x, flag):
    if flag:
        table["m"], table["n"] = x, x
    else:
        table["n"], table["m"] = x, x


def moves_a_key_to_the_end(table, x, flag):
    if flag:
        table["b"] = table.pop("b")


def moves_a_key_on_both_ways(table, x, flag):
    del table["b"]
    if flag:
        del table["a"]
        table["b"], table["a"] = x, x
    else:
        table["b"] = x


def moves_a_key_by_its_method(table, x, flag):
    if flag:
        table.move_to_end("b")


ORDERS = (
    *(adds_in_two_orders, moves_a_key_to_the_end, moves_a_key_on_both_ways),
    moves_a_key_by_its_method,
)


@pytest.mark.parametrize("change", ORDERS)
def test_keys_that_branches_leave_in_two_orders_are_refused(change):
    @ts.function
    def function(x, flag):
        table = collections.OrderedDict(b=x, a=x, c=x)
        if change is not moves_a_key_by_its_method:
            table = dict(table)
        change(table, x, flag)
        return {str(i): x * (key < "c") for i, key in enumerate(table)}

    for flag in (YES, NO):
        with pytest.raises(ControlFlowError, match="the order of a dict's keys"):
            function(X, flag)


def test_keys_that_both_branches_add_in_one_order_keep_it():
    def function(x, flag):
        table = {}
        if flag:
            table["m"], table["a"] = x, x * 2.0
        else:
            table["m"], table["a"] = x * 3.0, x * 4.0
        return [*table.values()]

    found = [[float(v) for v in values] for values in both(function, X)]
    assert found == [[2, 4], [6, 8]]


class Rows(list):
    total = 0.0


class OwnAttributes(dict):
    def __init__(self, **entries):
        super().__init__(**entries)
        self.__dict__ = self


def test_attributes_of_a_list_from_before_are_not_changed_in_a_branch():
    def function(x, flag):
        rows = Rows()
        rows.total = 0.0
        if flag:
            rows.total = 1.0
        return x + rows.total

    with pytest.raises(ControlFlowError, match="a Rows that is"):
        ts.function(function)(X, YES)


def test_a_dict_whose_entries_are_attributes_is_merged():
    def function(x, flag):
        table = OwnAttributes(loss=x)
        if flag:
            table.loss = x * 3.0
        return table["loss"]

    assert [float(value) for value in both(function, X)] == [6, 2]


class Slots:
    __slots__ = ("n",)


class Tally:
    def __init__(self, n):
        self.n = n

    @property
    def bumped(self):
        self.n = self.n + 1.0
        return self.n

    def __add__(self, by):
        self.n = by
        return self

    def __enter__(self):
        self.n = self.n * 3.0

    def __exit__(self, *error):
        pass


def enter(tally):
    with tally:
        pass


def add_in_place(values):
    values |= {2}


OTHERS = {
    "deque.append": (lambda: collections.deque([1]), lambda it: it.append(2)),
    "an item of a deque": (
        lambda: collections.deque([1]),
        lambda it: it.__setitem__(0, 2),
    ),
    "set.add": (lambda: {1}, lambda it: it.add(2)),
    "a set in place": (lambda: {1}, add_in_place),
    "map of set.add": (lambda: {1}, lambda it: [*map(it.add, [2])]),
    "slots": (Slots, lambda it: setattr(it, "n", 1)),
    "object.__setattr__": (Slots, lambda it: object.__setattr__(it, "n", 1)),
    "a namespace": (SimpleNamespace, lambda it: setattr(it, "n", 1)),
    "a property": (lambda: Tally(1.0), lambda it: it.bumped),
    "an operator": (lambda: Tally(1.0), lambda it: it + 2.0),
    "a context": (lambda: Tally(1.0), enter),
    "a method given to map": (lambda: Tally(1.0), lambda it: [*map(it.__add__, [2.0])]),
}


@pytest.mark.parametrize(("make", "change"), OTHERS.values(), ids=OTHERS)
def test_what_is_no_dict_or_list_is_not_changed_in_a_branch(make, change):
    @ts.function
    def function(x, flag):
        values = make()
        if flag:
            change(values)
        return x

    with pytest.raises(ControlFlowError, match="is changed at"):
        function(X, NO)

    @ts.function
    def own(x, flag):
        change(make())
        if flag:
            change(make())
            x = x + 1.0
        return x

    assert [float(own(X, flag)) for flag in (YES, NO)] == [3, 2]


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


def test_libraries_change_lists_that_the_call_has_made():
    def function(x, flag):
        rows = [1.0, 3.0]
        if flag:
            operator.setitem(rows, 0, x)
        else:
            operator.setitem(rows, 1, x)
        return rows

    found = both(function, X)
    assert [[float(v) for v in each] for each in found] == [[2, 3], [1, 2]]


def test_straight_code_changes_any_object_that_the_call_has_made():
    def function(x, flag):
        tally, seen = Tally(x), {1}
        tally.n = tally.bumped * 2.0
        seen.add(2)
        return tally.n + len(seen) if flag else tally.n

    assert [float(v) for v in both(function, X)] == [8, 6]


def test_what_slices_and_jax_make_may_be_changed():
    def function(x, flag):
        def body(carry, _):
            carry["n"] = carry["n"] * 2.0
            return carry, None

        def keep(**options):
            options["x"] = x
            return options

        rows = [x, x][:1] * 2
        carry, _ = jax.lax.scan(body, {"n": x}, None, length=2)
        kept = keep()
        if flag:
            rows[1] = carry["n"] = kept["x"] = x * 10.0
        return *rows, carry["n"], kept["x"]

    found = [[float(v) for v in values] for values in both(function, X)]
    assert found == [[2, 20, 20, 20], [2, 2, 8, 2]]
