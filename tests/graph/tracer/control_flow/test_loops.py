# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: SIM108 - branches are what is tested
"""``while`` and ``for`` that Python runs, and jumps that only the program knows."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tessera as ts
from tessera import op
from tessera.errors import BranchError, ControlFlowError, UndifferentiableError
from tessera.jax_compat import jaxprs

X = jnp.arange(4.0)


def primitives(function, *args):
    program = function.trace(*args).graph.program
    return [equation.primitive.name for equation in jaxprs.equations(program)]


def test_a_while_that_python_knows_is_run_by_python():
    @ts.function
    def function(x, flag):
        count = 0
        while count < 3:
            x = jnp.sin(x)
            count += 1
        if flag:
            x = -x
        return x

    assert primitives(function, X, True).count("sin") == 3
    names = primitives(function, X, jnp.array(True))
    assert (names.count("sin"), names.count("while")) == (3, 0)


def test_a_for_over_a_static_range_is_unrolled_and_may_break():
    @ts.function
    def function(x, limit):
        names = ["a", "b", "c", "d"]
        found = {}
        for i in range(4):
            if x[i] > limit:
                break
            x = x + 1.0
        for i, name in enumerate(names):
            found[name] = x[i]
        return found, x

    found, x = function(X, jnp.float32(2.5))
    np.testing.assert_array_equal(x, X + 2)
    assert float(found["d"]) == 5
    _, x = function(X, jnp.float32(50))
    np.testing.assert_array_equal(x, X + 4)


def test_a_loop_over_dicts_that_may_break_changes_them():
    @ts.function
    def function(x):
        layers = [{"n": 1}, {"n": 1}, {"n": 1}]
        for layer in layers:
            if x > 1:
                break
            layer["n"] = 5
        return [layer["n"] for layer in layers]

    for x, expected in ((0.0, [5, 5, 5]), (2.0, [1, 1, 1])):
        assert [int(n) for n in function(jnp.float32(x))] == expected


def test_a_for_over_the_rows_of_an_array_is_unrolled():
    @ts.function
    def function(x, flag):
        total, last = 0.0, x[0]
        for i, (row, other) in enumerate(zip(x, -x, strict=True)):
            if flag:
                total += row.sum() * i
            last = other
        return total, last

    x = jnp.arange(6.0).reshape(3, 2)
    total, last = function(x, jnp.array(True))
    assert float(total) == (1 * (2 + 3) + 2 * (4 + 5))
    np.testing.assert_array_equal(last, -x[2])
    assert primitives(function, x, jnp.array(True)).count("cond") == 3


def test_a_loop_over_rows_may_break_and_return():
    @ts.function
    def first_above(x, limit):
        index = -1
        for i, value in list(enumerate(x)):
            if value > limit:
                index = i
                break
        for value in x:
            if value > limit + 1:
                return value, index
        return -1.0, index

    for limit in (0.5, 2.5, 9.0):
        value, index = first_above(X, jnp.float32(limit))
        above = [i for i in range(4) if i > limit]
        assert int(index) == (above[0] if above else -1)
        assert float(value) == next((v for v in range(4) if v > limit + 1), -1)


def test_the_variable_of_a_loop_that_is_left_keeps_its_item():
    @ts.function
    def function(x, limit):
        value, row = -1.0, {"n": -1.0}
        for value, row["n"] in [(v, i) for i, v in enumerate(x)]:
            if value > limit:
                break
        return value, row["n"]

    for limit, expected in ((0.5, (1, 1)), (2.5, (3, 3)), (9.0, (3, 3))):
        assert tuple(map(int, function(X, jnp.float32(limit)))) == expected


def test_a_break_that_python_knows_leaves_the_rest_of_an_iterator():
    @ts.function
    def function(x, flag):
        values = iter([1.0, 2.0, 3.0])
        for value in values:
            if value == 2.0:
                break
        rest = next(values)
        return x[0] + rest if flag else x[0]

    assert float(function(X, jnp.array(True))) == 3


def test_what_a_loop_over_rows_assigns_is_there_afterwards():
    @ts.function
    def function(x, flag):
        for row in x:
            last = row if flag else -row
        return last

    assert float(function(X, jnp.array(True))) == 3


def test_a_for_over_rows_that_fills_a_list_is_unrolled():
    @ts.function
    def function(x, limit):
        kept = []
        for i, row in enumerate(x):
            kept.append(row if row > limit else limit)
            kept[i] = kept[i] * 2
        return kept

    found = function(X, jnp.float32(1.5))
    assert [float(v) for v in found] == [3, 3, 4, 6]


def test_parameters_that_a_loop_uses_are_declared_once():
    w = ts.dist.tensor((4, 4), name="w")

    @ts.graph.training_step
    def step(x, n):
        for i in range(2):
            if i >= n:
                break
            x = op.transformer_block(x, depth=1, num_heads=2) @ w
        return x

    step(jnp.ones((1, 2, 4)), jnp.int32(2))
    assert sorted(step.params) == ["block", "block_1", "w"]


# --- gradients


def test_gradients_through_branches_and_loops():
    @ts.function
    def function(w, x, flag):
        if flag:
            y = jnp.sin(w * x)
        else:
            y = w * x
        total = 0.0
        for value in y:
            total += value * w
        return ts.grad(total, w), ts.grad(y.sum(), w)

    def total(w, flag):
        y = jnp.sin(w * X) if flag else w * X
        return (y * w).sum()

    for flag in (True, False):
        found, other = function(jnp.float32(0.5), X, jnp.array(flag))
        np.testing.assert_allclose(found, jax.grad(total)(0.5, flag), rtol=1e-6)
        summed = jax.grad(lambda w: (jnp.sin(w * X) if flag else w * X).sum())  # noqa: B023
        np.testing.assert_allclose(other, summed(0.5), rtol=1e-6)


def test_a_gradient_in_a_branch_of_a_loss_in_it_and_of_one_from_before():
    @ts.function
    def function(w, x, flag):
        before = jnp.sum(w**2 * x)
        if flag:
            inner = jnp.sum(jnp.sin(w) * x)
            gradient = ts.grad(inner, w) + ts.grad(before, w)
        else:
            gradient = jnp.zeros_like(w)
        return gradient

    w = jnp.ones(4)
    found = function(w, X, jnp.array(True))
    np.testing.assert_allclose(found, jnp.cos(w) * X + 2 * w * X, rtol=1e-6)
    np.testing.assert_array_equal(function(w, X, jnp.array(False)), 0 * w)


def test_a_gradient_in_a_loop_that_may_break():
    @ts.function
    def descend(w, n):
        for i in range(4):
            if i >= n:
                break
            loss = jnp.sum((w - 3.0) ** 2)
            w = w - 0.25 * ts.grad(loss, w)
        return w

    np.testing.assert_allclose(descend(jnp.zeros(2), jnp.int32(3)), [2.625, 2.625])


def test_no_gradient_goes_through_a_loop_of_unknown_length():
    @ts.function
    def function(w, n):
        if n > 1:
            w = w + 1.0
        total = jax.lax.fori_loop(0, n, lambda _, total: total + w * w, 0.0)
        return ts.grad(total, w)

    with pytest.raises(UndifferentiableError) as caught:
        function(jnp.float32(1), jnp.int32(3))
    line = function.body.__code__.co_firstlineno
    assert str(caught.value) == (
        "[T317] a gradient cannot go through a loop whose number of iterations is not "
        "known before it runs\n"
        f"  got: the loop at {__file__}:{line + 4}\n"
        f"  got: ts.grad was called at {__file__}:{line + 5}\n"
        "  fix: loop over a Python number, such as an upper bound, with `if` and "
        "`break`, or use jax.lax.scan\n"
        "  fix: or take the gradient inside of the loop\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T317.html"
    )


# --- what cannot be


def by_condition(x, n):
    while n > 0:  # here
        n = n - 1
        x = x + 1.0
    return x


def by_break(x, n):
    count = 0
    while True:  # here
        count += 1
        if count > n:
            break
    return x


def by_static_condition_and_break(x, n):
    count = 0
    while count < 3:  # here
        count += 1
        if count > n:
            break
    return x


def in_a_branch(x, n):
    if n > 1:
        return by_condition(x, n)
    return x


@pytest.mark.parametrize(
    "function", [by_condition, by_break, by_static_condition_and_break, in_a_branch]
)
def test_a_while_that_turns_as_often_as_the_program_decides_is_refused(function):
    with pytest.raises(ControlFlowError) as caught:
        ts.function(function)(X, jnp.int32(0))
    looping = by_condition if function is in_a_branch else function
    lines, first = inspect.getsourcelines(looping)
    (line,) = [i for i, text in enumerate(lines, first) if "# here" in text]
    assert str(caught.value) == (
        f"[T319] how often the `while` at {__file__}:{line} turns is only known when "
        "the program runs\n"
        "  got: a condition that is bool[], or a `break` on such a one\n"
        "  fix: use jax.lax.while_loop, or `for i in range(limit)` with `if` and "
        "`break`, where `limit` is a number of Python\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T319.html"
    )


RANGES = {
    "a loop": lambda n: list(range(n)),
    "a step": lambda n: range(8, 0, -n),
    "its length": lambda n: len(range(n)),
    "enumerate": lambda n: [*enumerate(range(n))],
}


@pytest.mark.parametrize("use", RANGES.values(), ids=RANGES)
def test_a_range_of_a_traced_number_is_refused(use):
    @ts.function
    def function(x, n):
        if n > 1:
            x = x + 1.0
        for _ in use(n):
            x = x + 1.0
        return x

    with pytest.raises(ControlFlowError, match="Python needs a value at") as caught:
        function(X, jnp.int32(2))
    assert "for loops jax.lax.fori_loop and jax.lax.while_loop" in caught.value.fix


def test_what_a_turn_after_a_break_leaves_has_one_type():
    @ts.function
    def function(x, n):
        for i in range(3):
            if i > n:
                break
            x = jnp.concatenate([x, x])
        return x

    with pytest.raises(BranchError, match="'x' has another type on each side of"):
        function(X, jnp.int32(2))


def test_static_loops_with_an_else_continue_and_nested_breaks():
    def plain(limit):
        total = 0
        for i in range(4):
            count = 0
            while count < 2:
                count += 1
                total += count
            for j in range(3):
                if j + i > limit:
                    break
                if j == 1:
                    continue
                total = total + j
            else:
                total = total + 100
            if total > 250:
                return total
        return -total

    function = ts.function(plain)
    for limit in range(6):
        assert int(function(jnp.int32(limit))) == plain(limit)
