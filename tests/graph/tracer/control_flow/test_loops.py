# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: SIM108 - branches are what is tested
"""``while`` and ``for`` over what is only known when the program runs."""

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


def test_a_while_on_a_traced_condition():
    @ts.function
    def halvings(x):
        count = 0
        while x > 1:
            x = x / 2
            count += 1
        return x, count

    x, count = halvings(jnp.float32(20))
    assert (float(x), int(count)) == (0.625, 5)
    assert primitives(halvings, jnp.float32(20)).count("while") == 1
    assert halvings.num_programs() == 1


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


def test_a_while_with_break_continue_and_return():
    @ts.function
    def function(n, limit):
        total = 0
        while n > 0:
            n = n - 1
            if n % 2 == 0:
                continue
            total += n
            if total > limit:
                break
            if n == 5:
                return total * 100
        return total

    def expected(n, limit):
        total = 0
        while n > 0:
            n = n - 1
            if n % 2 == 0:
                continue
            total += n
            if total > limit:
                break
            if n == 5:
                return total * 100
        return total

    for n, limit in ((10, 15), (10, 100), (4, 100), (0, 1)):
        found = function(jnp.int32(n), jnp.int32(limit))
        assert int(found) == expected(n, limit)


def test_a_for_over_a_traced_range():
    @ts.function
    def function(x, n):
        total = 0.0
        for i in range(n):
            total += x[i] * i
        for i in range(n, 0, -2):
            total = total + i
        for _ in range(1, n):
            total = total + 100.0
        return total

    for n in (0, 1, 4):
        expected = sum(float(X[i]) * i for i in range(n))
        expected += sum(range(n, 0, -2)) + 100 * len(range(1, n))
        assert float(function(X, jnp.int32(n))) == expected
    assert function.num_programs() == 1


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


def test_what_a_loop_over_rows_assigns_is_there_afterwards():
    @ts.function
    def function(x, flag):
        for row in x:
            last = row if flag else -row
        return last

    assert float(function(X, jnp.array(True))) == 3


@pytest.mark.parametrize("use", [len, list, reversed, enumerate])
def test_a_traced_range_can_only_be_looped_over(use):
    @ts.function
    def function(x, n):
        return x if use(range(n)) else -x

    with pytest.raises(ControlFlowError, match="the number of iterations is not known"):
        function(X, jnp.int32(3))


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


def test_loops_in_branches_and_branches_in_loops():
    @ts.function
    def collatz(n):
        steps = 0
        while n != 1:
            if n % 2 == 0:
                n = n // 2
            else:
                n = 3 * n + 1
            steps += 1
        if steps > 10:
            while steps > 10:
                steps -= 1
        return steps

    assert [int(collatz(jnp.int32(n))) for n in (1, 6, 27)] == [0, 8, 10]


def test_entries_of_dicts_are_carried():
    @ts.function
    def function(state, n):
        rows = [jnp.float32(0), jnp.float32(1)]
        while state["n"] < n:
            state["n"] = state["n"] + 1
            rows[0], rows[1] = rows[1], rows[0] + rows[1]
        return rows[0]

    state = {"n": jnp.int32(0), "other": X}
    assert float(function(state, jnp.int32(10))) == 55
    assert int(state["n"]) == 10


def test_what_is_carried_takes_the_dtype_that_it_gets():
    @ts.function
    def function(x, n):
        total, count = 0, 0
        for _ in range(n):
            total += x[1]
            count += 1
        return total, count

    total, count = function(X.astype(jnp.bfloat16), jnp.int32(3))
    assert (total.dtype, count.dtype) == (jnp.bfloat16, jnp.int32)


def test_parameters_that_a_loop_uses_are_declared_once():
    w = ts.dist.tensor((4, 4), name="w")

    @ts.graph.training_step
    def step(x, n):
        for _ in range(n):
            x = op.transformer_block(x, depth=1, num_heads=2) @ w
        return x

    step(jnp.ones((1, 2, 4)), jnp.int32(2))
    assert sorted(step.params) == ["block", "w"]


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


def test_a_gradient_in_a_loop():
    @ts.function
    def descend(w, n):
        for _ in range(n):
            loss = jnp.sum((w - 3.0) ** 2)
            w = w - 0.25 * ts.grad(loss, w)
        return w

    np.testing.assert_allclose(descend(jnp.zeros(2), jnp.int32(3)), [2.625, 2.625])


def test_no_gradient_goes_through_a_loop_of_unknown_length():
    @ts.function
    def function(w, n):
        total = 0.0
        for _ in range(n):
            total += w * w
        return ts.grad(total, w)

    with pytest.raises(UndifferentiableError) as caught:
        function(jnp.float32(1), jnp.int32(3))
    line = function.body.__code__.co_firstlineno
    assert str(caught.value) == (
        "[T317] a gradient cannot go through a loop whose number of iterations is not "
        "known before it runs\n"
        f"  got: the loop at {__file__}:{line + 3}\n"
        f"  got: ts.grad was called at {__file__}:{line + 5}\n"
        "  fix: loop over a Python number, such as an upper bound, with `if` and "
        "`break`, or use jax.lax.scan\n"
        "  fix: or take the gradient inside of the loop\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T317.html"
    )


# --- what cannot be


def test_what_changes_its_type_is_named():
    @ts.function
    def function(x, n):
        while n > 0:
            x = jnp.concatenate([x, x])
            n = n - 1
        return x

    with pytest.raises(BranchError) as caught:
        function(X, jnp.int32(2))
    line = function.body.__code__.co_firstlineno + 2
    assert str(caught.value) == (
        f"[T318] 'x' has another type after the `while` at {__file__}:{line}\n"
        "  got: x: float32[4] before, float32[8] after an iteration\n"
        "  fix: give it the same shape and dtype on both ways, e.g. with .astype or "
        "jnp.broadcast_to\n"
        "  fix: what is no array, nor a tree of arrays, has to be the same on both "
        "ways\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T318.html"
    )


def test_lists_do_not_grow_in_a_loop_of_unknown_length():
    @ts.function
    def function(x, n):
        rows = []
        for _ in range(n):
            rows.append(x)
        return rows

    with pytest.raises(BranchError) as caught:
        function(X, jnp.int32(2))
    assert caught.value.got == "rows[0]: nothing before, float32[4] after an iteration"


def test_a_variable_of_a_loop_that_may_not_turn():
    @ts.function
    def function(x, n):
        for i in range(n):
            last = x[i]
        return last

    with pytest.raises(BranchError, match="'last' has a value on one way only through"):
        function(X, jnp.int32(2))


def test_a_comprehension_over_a_traced_range():
    @ts.function
    def function(x, n):
        return [x[i] for i in range(n)]

    with pytest.raises(ControlFlowError, match="the number of iterations is not known"):
        function(X, jnp.int32(2))


def test_a_range_of_a_float():
    @ts.function
    def function(x):
        total = x[1] if x[1] > 0 else -x[1]
        for _ in range(x[0]):
            total += 1.0
        return total

    with pytest.raises(ControlFlowError, match="takes whole numbers"):
        function(X)


def test_a_condition_of_a_loop_changes_something_as_often_as_python_asks():
    @ts.function
    def function(x, n):
        count = 0

        def bump():
            nonlocal count
            count = count + 1
            return count

        while bump() < n:
            x = x + 1.0
        return x, count

    for n in (0, 1, 3):
        x, count = function(jnp.float32(0), jnp.int32(n))
        assert (float(x), int(count)) == (max(n - 1, 0), max(n, 1))
