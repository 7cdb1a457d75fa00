# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: SIM108 - branches are what is tested
"""``if``, ``and``, ``or``, ``not`` and the conditional expression on traced values."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tessera as ts
from tessera.errors import ControlFlowError
from tessera.jax_compat import jaxprs

X = jnp.arange(3.0)
YES, NO = jnp.array(True), jnp.array(False)


def primitives(function, *args):
    program = function.trace(*args).graph.program
    return [equation.primitive.name for equation in jaxprs.equations(program)]


def test_an_if_runs_the_side_that_its_condition_means():
    @ts.function
    def function(x, flag):
        if flag:
            y = x + 1.0
        else:
            y = -x
        return y

    np.testing.assert_array_equal(function(X, YES), X + 1)
    np.testing.assert_array_equal(function(X, NO), -X)
    assert function.num_programs() == 1


def test_it_is_a_cond_of_the_program_and_no_select():
    @ts.function
    def function(x, flag):
        if flag:
            x = jnp.sin(x)
        return x

    names = primitives(function, X, YES)
    assert "cond" in names
    assert not {"select_n", "sin"} & set(names)


def test_an_if_that_python_can_decide_leaves_no_trace():
    @ts.function
    def function(x, flag, traced):
        if flag:
            x = jnp.sin(x)
        if traced:
            x = x + 1.0
        return x

    assert "sin" in primitives(function, X, True, YES)
    assert "sin" not in primitives(function, X, False, YES)


def test_elif_and_nested_ifs():
    @ts.function
    def function(x):
        if x > 10:
            if x > 100:
                y = 3
            else:
                y = 2
        elif x > 5:
            y = 1
        else:
            y = 0
        return y

    results = [int(function(jnp.float32(x))) for x in (200, 50, 7, 1)]
    assert results == [3, 2, 1, 0]


def test_an_early_return_in_a_branch():
    @ts.function
    def function(x):
        if x > 10:
            return x
        x = x * 2
        if x > 10:
            if x > 15:
                return x + 100
            x = x + 1
        return x

    results = [float(function(jnp.float32(x))) for x in (20, 8, 6, 1)]
    assert results == [20, 116, 13, 2]


def test_a_return_of_trees():
    @ts.function
    def function(x, flag):
        if flag:
            return {"a": x, "b": (x, 1.0)}
        return {"a": -x, "b": (x, 2.0)}

    assert float(function(X, NO)["b"][1]) == 2
    np.testing.assert_array_equal(function(X, NO)["a"], -X)


def test_conditions_of_several_parts():
    @ts.function
    def function(x, y, z):
        a = x > 1 and y > 1
        b = x > 1 or not y > 1
        c = x > 0 and x < 2
        d = z is not None and x > z
        return a, b, c, d

    assert [bool(v) for v in function(jnp.float32(1.5), jnp.float32(3), None)] == [
        True,
        True,
        True,
        False,
    ]
    found = function(jnp.float32(0), jnp.float32(3), jnp.float32(-1))
    assert [bool(v) for v in found] == [False, False, False, True]


def test_and_and_or_give_one_of_their_values_as_python_does():
    @ts.function
    def function(x, y):
        return x and y, x or y

    zero, two, three = jnp.float32(0), jnp.float32(2), jnp.float32(3)
    assert [float(v) for v in function(two, three)] == [3, 2]
    assert [float(v) for v in function(zero, three)] == [0, 3]


def test_a_conditional_expression():
    @ts.function
    def function(x, flag):
        return (x if flag else -x) + (1 if flag else 0)

    np.testing.assert_array_equal(function(X, YES), X + 1)
    np.testing.assert_array_equal(function(X, NO), -X)


def test_nested_conditional_expressions():
    @ts.function
    def function(x):
        y = 3 if x > 10 else 2 if x > 5 else (1 if x > 0 else 0)
        return y + (x if (x > 1 if x > 0 else x < -1) else -x)

    found = [float(function(jnp.float32(x))) for x in (20, 6, 0.5, -0.5, -3)]
    assert found == [23, 8, 0.5, 0.5, -3]


def test_a_function_with_a_match_statement_and_a_traced_condition():
    @ts.function
    def function(x, mode):
        match mode:
            case "double" | "twice":
                if x > 0:
                    x = x * 2
            case {"scale": scale}:
                x = x * scale if x > 1 else x
            case [first, *_] if first > 1:
                return x - first
            case _:
                pass
        return x + 1

    x = jnp.float32(3)
    assert float(function(x, "double")) == 7
    assert float(function(-x, "twice")) == -2
    assert float(function(x, {"scale": 4.0})) == 13
    assert float(function(x, (2.0, 1.0))) == 1
    assert float(function(x, None)) == 4


def test_a_pattern_on_a_traced_value_is_refused():
    @ts.function
    def function(x):
        match x:
            case 1:  # here
                return -x
        return x

    with pytest.raises(ControlFlowError, match="Python needs a value"):
        function(jnp.int32(1))


def test_methods_with_private_names():
    class Model:
        def __init__(self, scale):
            self.__scale = scale

        def __scaled(self, x):
            return x * self.__scale

        def __call__(self, x):
            return self.__scaled(x) if x[1] > 0 else -x

    model = Model(3.0)

    @ts.function
    def function(x):
        return model(x)

    np.testing.assert_array_equal(function(X), X * 3)
    np.testing.assert_array_equal(function(-X), X)


def test_loops_with_an_else():
    @ts.function
    def function(x, n):
        found = -2
        for i in range(3):
            if x[i] > n.astype(x.dtype):
                found = i
                break
        else:
            found = -1
        return found

    assert [int(function(X, jnp.int32(n))) for n in (1, 4, 7)] == [2, -1, -1]


def test_an_assignment_expression_in_conditions_and_branches():
    @ts.function
    def function(x, flag):
        if (y := x * 2.0)[1] > 1 and flag:
            y = y + (z := y + 1.0)
        else:
            z = y
        return y, z

    np.testing.assert_array_equal(function(X, YES)[0], X * 4 + 1)
    np.testing.assert_array_equal(function(X, NO)[1], X * 2)


DECIDED_BY_PYTHON = {
    "a chain of comparisons": lambda x: 0 < x < 1,
    "max": lambda x: max(x, 1.0),
    "min": lambda x: min([x, 1.0]),
    "any": lambda x: any(v > 2 for v in (x, x)),
    "all": lambda x: all([x > 0]),
    "int": int,
    "float": float,
    "bool": bool,
}


@pytest.mark.parametrize("use", DECIDED_BY_PYTHON.values(), ids=DECIDED_BY_PYTHON)
@pytest.mark.parametrize("error", [ValueError, Exception])
def test_what_python_decides_by_itself_is_refused(use, error):
    @ts.function
    def function(x):
        y = x if x > 0 else -x
        try:
            return use(y)
        except error:
            return y

    with pytest.raises(ControlFlowError, match="Python needs a value at") as caught:
        function(jnp.float32(0.5))
    assert "jnp.maximum, jnp.minimum, jnp.any, jnp.all and x.astype" in caught.value.fix


def test_what_python_decides_by_itself_is_python_without_traced_values():
    @ts.function
    def function(x, n):
        found = 0 < n < 3, 0 < n <= 1 < n, max(n, 1), min([n, 1], default=4), any([n])
        return x if x > 0 else -x, (*found, all([]), int("7"), float(n), bool(n))

    expected = (True, False, 2, 1, True, True, 7, 2.0, True)
    assert function(jnp.float32(1), 2)[1] == expected


def test_numbers_of_python_take_the_dtype_of_the_other_side():
    @ts.function
    def function(x, flag):
        if flag:
            scale, count = x[1], 1
        else:
            scale, count = 0, 2
        return scale, x * count

    scale, product = function(X.astype(jnp.bfloat16), NO)
    assert (scale.dtype, product.dtype) == (jnp.bfloat16, jnp.bfloat16)


def test_what_both_sides_leave_alone_stays_what_it_is():
    marker = object()

    @ts.function
    def function(x, flag):
        mode, kept = "a", marker
        if flag:
            mode = "b"
            kept = marker
            x = -x
        else:
            mode = "b"
        return x if mode == "b" and kept is marker else None

    np.testing.assert_array_equal(function(X, YES), -X)


def test_trees_of_arrays_meet():
    class Pair(NamedTuple):
        left: jax.Array
        right: list

    @ts.function
    def function(pair, flag):
        if flag:
            pair = Pair(pair.right[0], [pair.left])
        return pair

    found = function(Pair(X, [X + 1]), YES)
    np.testing.assert_array_equal(found.left, X + 1)
    assert isinstance(found, Pair)


def test_dicts_and_lists_that_a_side_assigns_into():
    @ts.function
    def function(x, flag):
        state = {"a": x, "inner": {"n": 0}}
        rows = [x, x]
        if flag:
            state["a"] = x + 1.0
            state["new"] = x
            state["inner"]["n"] += 1
            rows[0] = rows[1] * 2.0
            del state["inner"]
        else:
            state["new"] = -x
            state.pop("inner")
        return state, rows

    state, rows = function(X, YES)
    assert sorted(state) == ["a", "new"]
    np.testing.assert_array_equal(state["a"], X + 1)
    np.testing.assert_array_equal(rows[0], X * 2)
    state, rows = function(X, NO)
    np.testing.assert_array_equal(state["new"], -X)
    np.testing.assert_array_equal(rows[0], X)


def test_a_function_that_is_called_in_a_branch_may_assign_into_what_it_is_given():
    def halve(state):
        state["scale"] *= 0.5

    @ts.function
    def function(scale, flag):
        state = {"scale": scale}
        if flag:
            halve(state)
        return state["scale"]

    assert [float(function(jnp.float32(8), f)) for f in (YES, NO)] == [4, 8]


class Counter:
    def __init__(self, n):
        self.n = n

    def add(self):
        self.n = self.n + 1


def test_attributes_of_objects_that_a_branch_makes():
    @ts.function
    def function(n, flag):
        if flag:
            counter = Counter(n)
            counter.add()
            counter.n = counter.n * 10
            n = counter.n
        counter = Counter(n)
        counter.add()
        return counter.n

    assert [int(function(jnp.int32(1), f)) for f in (YES, NO)] == [21, 2]


def test_attributes_of_objects_from_before_are_not_assigned_in_a_branch():
    @ts.function
    def function(n, flag):
        counter = Counter(n)
        if flag:
            counter.add()  # here
        return counter.n

    with pytest.raises(ControlFlowError) as caught:
        function(jnp.int32(1), YES)
    line = Counter.add.__code__.co_firstlineno + 1
    assert str(caught.value) == (
        f"[T319] 'self' is changed at {__file__}:{line}, and this code has not made "
        "it\n"
        "  got: a Counter that is from outside of the call, or from before the branch "
        "or loop\n"
        "  fix: a branch or loop may change variables, and dicts and lists that the "
        "call has made or takes as arguments: return the new value, or assign into "
        "those\n"
        "  fix: change a copy, such as dict(x), list(x) or x.copy()\n"
        "  fix: to show a value each time that the program runs, write print(x)\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T319.html"
    )


def test_autocast_in_and_around_a_branch():
    @ts.function
    def function(x, flag):
        with ts.autocast(ts.bf16):
            if flag:
                y = x @ x
            else:
                with ts.autocast(ts.bf16, enabled=False):
                    y = x @ x
        return y

    x = jnp.full((1, 1), 1.001)
    assert function(x, YES)[0, 0] == 1
    assert function(x, NO)[0, 0] == x[0, 0] * x[0, 0]


def test_a_branch_on_a_mesh(dp_mesh):
    @ts.function(mesh=dp_mesh, in_specs={"x": ts.ShardSpec((0,), ("dp",))})
    def function(x, flag):
        if flag:
            x = x * 2.0
        return x

    x = jnp.arange(8.0)
    np.testing.assert_array_equal(function(x, YES), x * 2)
    assert not function.last.collectives.rows
