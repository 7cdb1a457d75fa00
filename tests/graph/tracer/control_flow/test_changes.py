# SPDX-License-Identifier: Apache-2.0
"""What branches and loops change of what the call itself made: both ways count."""

import jax.numpy as jnp
import pytest

import tessera as ts
from tessera.errors import ControlFlowError

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
        f"[T319] \"state['opt']\" is changed at {__file__}:{line}, and this code has "
        "not made it\n"
        "  got: a dict that is global, closed over or a library's, or one of two that "
        "a branch chose between\n"
        "  fix: a branch or loop may change variables, and dicts and lists that the "
        "call has made or takes as arguments: return the new value, or assign into "
        "those\n"
        "  fix: change a copy, such as dict(x), list(x) or x.copy()\n"
        "  fix: to show a value each time that the program runs, write print(x)\n"
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
        for i in range(4):
            if i >= n:
                break
            state = {"n": state["n"] + 1.0}
        return state["n"]

    assert float(function(X, jnp.int32(3))) == 5


def test_a_dict_that_turns_replace_and_change_is_refused():
    @ts.function
    def function(state, n):
        first = state
        for i in range(4):
            if i >= n:
                break
            state["n"] = state["n"] + 1.0
            state = dict(state)
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


def test_a_chain_with_is_is_not_converted():
    @ts.function
    def function(x):
        first, second = {"a": x}, {"a": -x}
        one = first if x > 0 else second
        return x if one is first is first else -x

    with pytest.raises(ControlFlowError, match="`is` in a comparison"):
        function(X)


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


def test_a_partial_of_a_method_changes_its_object():
    class Counter:
        def __init__(self, n):
            self.n = n

        def add(self, by):
            self.n = self.n + by

    import functools

    def function(x, flag):
        if flag:
            counter = Counter(x)
            functools.partial(counter.add, by=1.0)()
            x = counter.n
        return x

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


# --- operands that change something


def test_the_second_operand_changes_something_only_where_python_evaluates_it():
    def function(x, flag):
        counts = {"n": 0}

        def bump():
            counts["n"] = counts["n"] + 1
            return True

        y = flag and bump()
        z = flag or bump()
        return counts["n"], y, z

    values = both(function, X)
    assert [[int(v) for v in each] for each in values] == [[1, 1, 1], [1, 0, 1]]
