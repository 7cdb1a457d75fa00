# SPDX-License-Identifier: Apache-2.0
"""Exceptions in branches and loops that are traced whether they run or not."""

import contextlib

import jax.numpy as jnp
import numpy as np
import pytest

import tessera as ts
from tessera.errors import BranchError, ControlFlowError

X = jnp.arange(3.0)
YES, NO = jnp.array(True), jnp.array(False)


class Quiet:
    """A context that drops every exception."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return True


def uncaught(x, flag):
    if flag:
        raise ValueError("mine")
    return x


def caught(x, flag):
    try:
        if flag:
            raise ValueError("mine")
    except ValueError:
        x = -x
    return x


def caught_by_anything(x, flag):
    try:
        if flag:
            raise ValueError("mine")
    except:  # noqa: E722 - what must not hide the refusal
        x = -x
    return x


def turned_into_another(x, flag):
    try:
        if flag:
            raise ValueError("mine")
    except ValueError as error:
        raise KeyError("other") from error
    return x


def suppressed(x, flag):
    with contextlib.suppress(ValueError):
        if flag:
            raise ValueError("mine")
        x = -x
    return x


def dropped_by_a_context(x, flag):
    with Quiet():
        if flag:
            raise ValueError("mine")
        x = -x
    return x


def in_a_function_that_is_called(x, flag):
    try:
        uncaught(x, flag)
    except ValueError:
        x = -x
    return x


def in_a_loop(x, flag):
    for row in x:
        try:
            if row > 1 and flag:
                raise ValueError("mine")
        except ValueError:
            x = -x
    return x


def of_a_missing_entry(x, flag):
    table = {"a": x}
    try:
        y = table["b"] if flag else table["a"]
    except KeyError:
        y = -x
    return y


@pytest.mark.parametrize(
    "function",
    [
        uncaught,
        caught,
        caught_by_anything,
        turned_into_another,
        suppressed,
        dropped_by_a_context,
        in_a_function_that_is_called,
        in_a_loop,
        of_a_missing_entry,
    ],
    ids=lambda function: function.__name__,
)
def test_an_exception_that_leaves_a_traced_branch_is_refused(function):
    with pytest.raises(ControlFlowError, match="is raised in the"):
        ts.function(function)(X, NO)


def test_the_refusal_names_the_exception_its_line_and_the_branch():
    with pytest.raises(ControlFlowError) as caught:
        ts.function(uncaught)(X, NO)
    line = uncaught.__code__.co_firstlineno
    assert str(caught.value) == (
        f"[T319] ValueError at {__file__}:{line + 2} is raised in the `if` at "
        f"{__file__}:{line + 1}, which is traced whether it runs or not\n"
        "  got: mine\n"
        "  fix: give back a value that tells, and raise outside, or use "
        "jax.experimental.checkify\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T319.html"
    )
    assert repr(caught.value.__cause__) == "ValueError('mine')"


def test_an_exception_that_is_caught_inside_of_the_branch_is_python():
    @ts.function
    def function(x, flag):
        if flag:
            try:
                x = {"a": x}["b"]
            except KeyError:
                x = -x
        return x

    np.testing.assert_array_equal(function(X, YES), -X)
    np.testing.assert_array_equal(function(X, NO), X)


def test_an_exception_outside_of_branches_is_python():
    @ts.function
    def function(x, flag):
        try:
            y = {"a": x}["b"]
        except KeyError:
            y = -x
        finally:
            x = x * 2.0
        return y + x if flag else y

    np.testing.assert_array_equal(function(X, YES), X)


@pytest.mark.parametrize("error", [Exception, TypeError])
def test_a_handler_around_an_if_does_not_hide_that_its_condition_is_traced(error):
    @ts.function
    def function(x, flag):
        try:
            y = x if flag else -x
        except error:
            y = x * 0.0
        return y

    np.testing.assert_array_equal(function(X, YES), X)
    np.testing.assert_array_equal(function(X, NO), -X)


def test_a_handler_does_not_hide_that_python_needs_a_value():
    @ts.function
    def function(x, n):
        try:
            y = [x, -x][n]
        except Exception:
            y = x * 0.0
        return y

    with pytest.raises(ControlFlowError) as caught:
        function(X, jnp.int32(1))
    line = function.body.__code__.co_firstlineno + 3
    assert f"Python needs a value at {__file__}:{line}" in str(caught.value)


def test_a_handler_does_not_hide_that_branches_disagree():
    @ts.function
    def function(x, flag):
        y = x
        try:
            if flag:
                y = x[:1]
            x = x + y
        except Exception:
            x = x * 0.0
        return x

    with pytest.raises(BranchError, match="'y' has another type"):
        function(X, YES)


def test_a_handler_does_not_hide_that_an_iterator_is_left():
    @ts.function
    def function(x, flag):
        try:
            for _ in iter([1.0, 2.0]):
                if flag:
                    break
        except Exception:
            x = x * 0.0
        return x

    with pytest.raises(ControlFlowError, match="an iterator is left by a `break`"):
        function(X, YES)


def test_a_jump_out_of_a_finally_block_is_not_converted():
    @ts.function
    def function(x, flag):
        try:
            x = x * 2.0
        finally:
            return x if flag else -x  # noqa: B012 - what is tested

    with pytest.raises(ControlFlowError, match="a jump leaves its finally block"):
        function(X, YES)
