# SPDX-License-Identifier: Apache-2.0
"""What branches and loops change of what the call itself made: both ways count."""

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


# --- containers that are assigned anew on one way


def test_a_nested_dict_that_one_way_replaces_keeps_the_update_of_the_other():
    def function(x, flag):
        state = {"opt": {"m": x}}
        if flag:
            state["opt"] = {"m": x * 10.0}
        else:
            state["opt"]["m"] += 1.0
        return state["opt"]["m"]

    assert [float(v) for v in both(function, X)] == [20, 3]


def test_the_state_of_an_optimizer_that_one_way_replaces_is_written_back():
    @ts.function
    def step(state, flag):
        if flag:
            state["opt"] = {"m": jnp.zeros(())}
        else:
            state["opt"]["m"] += 1.0
        return state["opt"]["m"] * 1.0

    for flag, expected in ((YES, 0), (NO, 6)):
        state = {"opt": {"m": jnp.float32(5)}}
        assert float(step(state, flag)) == expected
        assert float(state["opt"]["m"]) == expected


def test_another_name_of_a_replaced_dict_sees_what_its_own_way_did():
    def function(x, flag):
        state = {"opt": {"m": x}}
        opt = state["opt"]
        if flag:
            state["opt"] = {"m": x * 10.0}
        else:
            state["opt"]["m"] += 1.0
        return opt["m"], state["opt"]["m"]

    first, second = both(function, X)
    assert [float(v) for v in first] == [2, 20]
    assert [float(v) for v in second] == [3, 3]


def test_a_container_that_is_one_of_two_is_not_changed():
    @ts.function
    def function(x, flag):
        state = {"opt": {"m": x}}
        opt = state["opt"]
        if flag:
            state["opt"] = {"m": x * 10.0}
        state["opt"]["m"] += 1.0
        return opt["m"]

    line = function.body.__code__.co_firstlineno + 6
    with pytest.raises(ControlFlowError) as caught:
        function(X, YES)
    assert str(caught.value) == (
        f"[T319] \"state['opt']\" is changed at {__file__}:{line}, and this call has "
        "not made it\n"
        "  got: a dict that is global, closed over or a library's, or one of two that "
        "a branch chose between\n"
        "  fix: pass it as an argument and assign into that, or return the new value\n"
        "  fix: change a copy, such as dict(x), list(x) or x.copy()\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T319.html"
    )


def test_an_argument_that_is_one_of_two_is_not_changed():
    @ts.function
    def function(state, flag):
        if flag:
            state = dict(state)
        state["n"] = state["n"] + 1.0
        return state["n"]

    with pytest.raises(ControlFlowError, match="'state' is changed at"):
        function({"n": X}, YES)


def test_a_copy_of_what_is_one_of_two_may_be_changed():
    def function(x, flag):
        state = {"n": x}
        if flag:
            state = {"n": x * 10.0}
        state = dict(state)
        state["n"] += 1.0
        return state["n"]

    assert [float(v) for v in both(function, X)] == [21, 3]


def test_containers_that_both_ways_make_are_read():
    def function(x, flag):
        if flag:
            first = {"n": x}
            second = first
        else:
            first = {"n": -x}
            second = first
        return first["n"] + second["n"]

    assert [float(v) for v in both(function, X)] == [4, -4]


@pytest.mark.parametrize("copies", [False, True])
def test_containers_that_both_ways_make_are_not_changed(copies):
    @ts.function
    def function(x, flag):
        if flag:
            first = {"n": x}
            second = first
        else:
            first = {"n": -x}
            second = dict(first) if copies else first
        first["n"] += 1.0
        return second["n"]

    with pytest.raises(ControlFlowError, match="one of two that a branch chose"):
        function(X, YES)


def test_a_dict_that_each_turn_makes_anew_is_carried():
    @ts.function
    def function(x, n):
        state = {"n": x}
        for _ in range(n):
            state = {"n": state["n"] + 1.0}
        return state["n"]

    assert float(function(X, jnp.int32(3))) == 5


def test_a_dict_that_turns_replace_and_change_is_refused():
    @ts.function
    def function(state, n):
        first = state
        while n > 0:
            state["n"] = state["n"] + 1.0
            state = dict(state)
            n = n - 1
        return first["n"]

    with pytest.raises(ControlFlowError, match="'state' is changed at"):
        function({"n": X}, jnp.int32(2))


def test_what_is_returned_early_has_the_changes_of_its_way():
    def function(x, flag):
        state = {"n": x}
        for _ in range(2):
            if flag:
                state["n"] = state["n"] * 10.0
                return state
        return {"n": state["n"] + 1.0}

    assert [float(v["n"]) for v in both(function, X)] == [20, 3]


def test_whether_a_merged_container_is_another_one_is_refused():
    @ts.function
    def function(x, flag):
        first = {"n": x}
        second = first
        if flag:
            first = {"n": -x}
        return x if first is second else -x

    with pytest.raises(ControlFlowError, match="whether two objects are one is asked"):
        function(X, YES)


@pytest.mark.parametrize("other", [None, "text", (), 3])
def test_whether_a_merged_container_is_something_else_is_known(other):
    def function(x, flag):
        first = {"n": x}
        if flag:
            first = {"n": -x}
        return x if first is other or first is not first else first["n"]

    assert [float(v) for v in both(function, X)] == [-2, 2]


def test_whether_a_merged_array_is_another_one_is_refused():
    @ts.function
    def function(x, flag):
        first = x + 1.0
        second = first
        if flag:
            first = x * 2.0
        return x if first is not second else -x

    with pytest.raises(ControlFlowError, match="whether two objects are one is asked"):
        function(X, YES)


# --- closures


def test_a_variable_that_a_called_function_assigns_is_one_of_the_branch():
    def function(x, flag):
        count = 0

        def bump(by):
            nonlocal count
            count = count + by
            return count

        if flag:
            bump(2)
        return x * count

    assert [float(v) for v in both(function, X)] == [4, 0]


def test_a_variable_that_a_called_function_assigns_is_carried_by_a_loop():
    @ts.function
    def function(x, n):
        count = 0

        def bump():
            nonlocal count
            count = count + 1

        while n > 0:
            bump()
            n = n - 1
        return x * count

    assert float(function(X, jnp.int32(3))) == 6


def test_a_partial_of_a_method_changes_its_object():
    class Counter:
        def __init__(self, n):
            self.n = n

        def add(self, by):
            self.n = self.n + by

    import functools

    def function(x, flag):
        counter = Counter(x)
        if flag:
            functools.partial(counter.add, by=1.0)()
        return counter.n

    assert [float(v) for v in both(function, X)] == [3, 2]


def test_functions_that_a_loop_makes_see_the_variable_as_it_is_at_the_end():
    def function(x, flag):
        calls = []
        for i in range(3):
            scale = i * 10
            calls.append(lambda: i + scale)  # noqa: B023 - what is tested
        if flag:
            x = x + 1.0
        return x, [call() for call in calls]

    for _, values in both(function, X):
        assert values == [22, 22, 22]


def test_functions_that_branches_make_see_what_their_variable_became():
    def function(x, flag):
        value = x if flag else -x
        call = lambda: value  # noqa: E731 - what is tested
        if flag:
            value = value * 10.0
        return call()

    assert [float(v) for v in both(function, X)] == [20, -2]


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


# --- operands that change something


def test_the_second_operand_changes_something_only_where_python_evaluates_it():
    def function(x, flag):
        count = 0

        def bump():
            nonlocal count
            count = count + 1
            return True

        y = flag and bump()
        z = flag or bump()
        return count, y, z

    values = both(function, X)
    assert [[int(v) for v in each] for each in values] == [[1, 1, 1], [1, 0, 1]]


def test_the_middle_of_a_chain_of_comparisons_is_evaluated_once():
    def function(x, flag):
        count = 0

        def bump():
            nonlocal count
            count = count + 1
            return x

        holds = 0 < bump() < 5
        return count, holds and flag

    values = both(function, X)
    assert [[int(v) for v in each] for each in values] == [[1, 1], [1, 0]]
