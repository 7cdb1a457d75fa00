# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: SIM108 - branches are what is tested
"""``if``, ``and``, ``or``, ``not`` and the conditional expression on traced values."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tessera as ts
from tessera import _jax
from tessera.errors import BranchError, ControlFlowError

pytestmark = pytest.mark.usefixtures("quick_compile")

X = jnp.arange(3.0)
YES, NO = jnp.array(True), jnp.array(False)


def primitives(function, *args):
    program = function.trace(*args).graph.program
    return [equation.primitive.name for equation in _jax.equations(program)]


def line_of(function, text):
    """``file.py:12`` of the line of a function's source that has some text."""
    import inspect

    lines, first = inspect.getsourcelines(function)
    (place,) = [i for i, line in enumerate(lines) if text in line]
    return f"{__file__}:{first + place}"


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
        c = 0 < x < 2
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


def test_max_min_any_all_and_casts_of_traced_numbers():
    @ts.function
    def function(x, y):
        both = all([x > 0, y > 0])
        one = any(v > 2 for v in (x, y))
        return max(x, y, 1.0), min(x, y), both, one, int(y), bool(x), float(int(y))

    found = function(jnp.float32(0.5), jnp.float32(2.9))
    assert [v.item() for v in found[:5]] == [
        np.float32(2.9),
        0.5,
        True,
        True,
        2,
    ]
    assert found[5].dtype == jnp.bool_
    assert found[6].dtype == jnp.float32


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


def test_attributes_of_objects():
    class Counter:
        def __init__(self, n):
            self.n = n

        def add(self):
            self.n = self.n + 1

    @ts.function
    def function(n, flag):
        counter = Counter(n)
        if flag:
            counter.add()
            counter.n = counter.n * 10
        return counter.n

    assert [int(function(jnp.int32(1), f)) for f in (YES, NO)] == [20, 1]


def test_closures_and_nonlocals():
    @ts.function
    def function(x, flag):
        count = 0

        def bump(by):
            nonlocal count
            if flag:
                count = count + by

        bump(2)
        bump(3)
        return x * count

    np.testing.assert_array_equal(function(X, YES), X * 5)


def clipped(x, limit):
    if jnp.max(x) > limit:
        return x * (limit / jnp.max(x))
    return x


class Model:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, x):
        if x[0] > 0:
            return self.scaled(x)
        return x

    def scaled(self, x):
        return x * self.scale if x[1] > 0 else -x


def test_functions_methods_objects_and_partials_that_are_called():
    @ts.function
    def function(x, model):
        helper = functools.partial(clipped, limit=1.0)
        return helper(model(x)), model.scaled(x), (lambda v: v if v[0] > 0 else -v)(x)

    found = function(X, Model(2.0))
    np.testing.assert_allclose(found[0], X * 0.5)
    np.testing.assert_array_equal(found[1], X * 2)
    np.testing.assert_array_equal(found[2], -X)


def test_functions_that_jax_calls():
    @ts.function
    def function(x):
        def sign(v):
            if v > 1:
                return v * 10
            return v

        def step(carry, v):
            if v > carry:
                carry = v
            return carry, carry

        mapped = jax.vmap(sign)(x)
        tree = jax.tree.map(lambda v: v if v[0] > 0 else -v, {"a": x})
        return mapped, jax.lax.scan(step, x[0], x)[0], tree

    mapped, largest, tree = function(X)
    np.testing.assert_array_equal(mapped, [0, 1, 20])
    assert float(largest) == 2
    np.testing.assert_array_equal(tree["a"], -X)


def test_a_helper_that_is_jitted_is_converted_with_the_rest():
    @jax.jit
    def helper(x):
        return x if x[1] > 0 else -x

    @ts.function
    def function(x):
        return helper(x)

    np.testing.assert_array_equal(function(X), X)


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


def test_an_optimizer_that_skips_steps_is_one_program():
    optimizer = optax.adam(0.1)

    @ts.function
    def step(params, state, x):
        loss = jnp.sum((params["w"] * x) ** 2)
        gradients = ts.grad(loss, params)
        if jnp.isfinite(loss):
            updates, state = optimizer.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    params = {"w": jnp.ones(3)}
    with jax.numpy_dtype_promotion("standard"):  # as Optax has it
        once, state = step(params, optimizer.init(params), X)
        again, state = step(once, state, X * jnp.inf)
    np.testing.assert_array_equal(again["w"], once["w"])
    assert int(state[0].count) == 1
    assert step.num_programs() == 1


def test_super_in_a_method():
    class Base:
        def double(self, x):
            return x * 2.0

    class Derived(Base):
        def double(self, x):
            if x[0] > 0:
                return super().double(x)
            return x + super().double(x)

    @ts.function
    def function(x):
        return Derived().double(x)

    np.testing.assert_array_equal(function(X), X * 3)


def test_functions_of_tessera_inside():
    @ts.function
    def inner(x):
        if x[0] > 0:
            x = x * 2.0
        return x

    @ts.function
    def outer(x, flag):
        if flag:
            x = inner(x)
        return x

    np.testing.assert_array_equal(outer(X + 1, YES), (X + 1) * 2)
    np.testing.assert_array_equal(jax.jit(lambda x: outer(x, YES))(X + 1), (X + 1) * 2)


def test_a_method_as_a_ts_function():
    class Trainer:
        def __init__(self):
            self.rate = 0.5

        @ts.function
        def step(self, x):
            return x * self.rate if x[0] > 0 else x

    np.testing.assert_array_equal(Trainer().step(X + 1), (X + 1) * 0.5)


def test_an_error_in_a_branch_shows_the_users_line():
    import traceback

    @ts.function
    def function(x, flag):
        if flag:
            x = x @ jnp.ones((5, 5))  # the line
        return x

    with pytest.raises(TypeError) as caught:
        function(X, YES)
    frames = traceback.extract_tb(caught.value.__traceback__)
    (found,) = [f for f in frames if f.line == "x = x @ jnp.ones((5, 5))  # the line"]
    assert f"{found.filename}:{found.lineno}" == line_of(function.body, "the line")
    assert found.name == "function"


def test_an_error_that_a_branch_raises_says_that_both_are_traced():
    @ts.function
    def function(x, flag):
        if flag:  # here
            raise KeyError("mine")
        return x

    with pytest.raises(KeyError, match="mine") as caught:
        function(X, NO)
    assert caught.value.__notes__[0] == (
        "This was traced as a part of the `if` at "
        f"{line_of(function.body, '# here')}, whether it runs or not"
    )


def test_equations_in_a_branch_carry_the_users_lines():
    @ts.function
    def function(x, flag):
        if flag:
            x = jnp.sin(x)  # in the branch
        return x

    program = function.trace(X, YES).graph.program
    (branch,) = [e for e in _jax.equations(program) if e.primitive.name == "cond"]
    assert _jax.source_line(branch) == line_of(function.body, "if flag")
    (sine,) = [
        equation
        for inner in _jax.inner_programs(branch)
        for equation in _jax.equations(inner)
        if equation.primitive.name == "sin"
    ]
    assert _jax.source_line(sine) == line_of(function.body, "in the branch")


# --- what does not agree


def test_sides_of_another_type_are_named_with_both_types():
    @ts.function
    def function(x, flag):
        if flag:  # here
            y, z = x, {"a": x}
        else:
            y, z = x.astype(jnp.bfloat16), {"a": x[:2]}
        return y, z

    with pytest.raises(BranchError) as caught:
        function(X, YES)
    where = line_of(function.body, "# here")
    assert str(caught.value) == (
        "[T318] 'y', \"z['a']\" have another type on each side of the `if` at "
        f"{where}\n"
        "  got: y: float32[3] if it holds, bfloat16[3] if not\n"
        "  got: z['a']: float32[3] if it holds, float32[2] if not\n"
        "  fix: give it the same shape and dtype on both ways, e.g. with .astype or "
        "jnp.broadcast_to\n"
        "  fix: what is no array, nor a tree of arrays, has to be the same on both "
        "ways\n"
        "  docs: docs/errors/T318.md"
    )


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (None, "y: float32[3] if it holds, None if not"),
        ("text", "y: float32[3] if it holds, 'text' if not"),
        ({"a": X}, "y: float32[3] if it holds, a dict of 'a' if not"),
        ([X, X], "y: float32[3] if it holds, a list of 2 if not"),
        (2, "y: float32[3] if it holds, the Python number 2 if not"),
    ],
)
def test_sides_of_another_structure(other, text):
    @ts.function
    def function(x, flag):
        if flag:
            y = x
        else:
            y = other
        return y

    with pytest.raises(BranchError) as caught:
        function(X, YES)
    assert caught.value.got == text


def test_entries_that_one_side_adds():
    @ts.function
    def function(state, flag):
        if flag:
            state["new"] = state["old"]
        return state["old"]

    with pytest.raises(BranchError) as caught:
        function({"old": X}, YES)
    assert caught.value.got == "state['new']: float32[3] if it holds, nothing if not"


def test_a_variable_of_one_side_may_not_be_used_afterwards():
    @ts.function
    def function(x, flag):
        if flag:  # here
            y = x
        return y  # there

    with pytest.raises(BranchError) as caught:
        function(X, YES)
    assert str(caught.value) == (
        "[T318] 'y' has a value on one way only through the `if` at "
        f"{line_of(function.body, '# here')}, and is used at "
        f"{line_of(function.body, '# there')}\n"
        "  fix: give it a value before, or on both ways\n"
        "  docs: docs/errors/T318.md"
    )


def test_a_variable_of_one_side_that_nobody_uses_is_no_mistake():
    @ts.function
    def function(x, flag):
        if flag:
            temporary = x.astype(jnp.bfloat16)
            x = temporary.astype(jnp.float32) + 1.0
        return x

    np.testing.assert_array_equal(function(X, YES), X + 1)


def test_a_value_on_one_way_and_none_on_the_other():
    @ts.function
    def function(x, flag):
        if flag:
            return x

    with pytest.raises(BranchError, match="returns a value on one way through it"):
        function(X, YES)


def test_a_condition_of_several_numbers():
    @ts.function
    def function(x):
        if x > 1:  # here
            x = -x
        return x

    with pytest.raises(ControlFlowError) as caught:
        function(X)
    assert str(caught.value) == (
        "[T319] the condition of the `if` at "
        f"{line_of(function.body, '# here')} is an array, not one number\n"
        "  got: bool[3]\n"
        "  fix: reduce it with .all() or .any(), or choose for each element with "
        "jnp.where\n"
        "  docs: docs/errors/T319.md"
    )


def test_a_branch_on_a_mesh(dp_mesh):
    @ts.function(mesh=dp_mesh, in_specs={"x": ts.ShardSpec((0,), ("dp",))})
    def function(x, flag):
        if flag:
            x = x * 2.0
        return x

    x = jnp.arange(8.0)
    np.testing.assert_array_equal(function(x, YES), x * 2)
    assert not function.last.collectives.rows
