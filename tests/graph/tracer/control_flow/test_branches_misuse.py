# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: SIM108 - branches are what is tested
"""Branches whose sides do not agree; the lines that errors and equations have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tessera as ts
from tessera.errors import BranchError, ControlFlowError
from tessera.jax_compat import jaxprs

X = jnp.arange(3.0)
YES, NO = jnp.array(True), jnp.array(False)


def line_of(function, text):
    """``file.py:12`` of the line of a function's source that has some text."""
    import inspect

    lines, first = inspect.getsourcelines(function)
    (place,) = [i for i, line in enumerate(lines) if text in line]
    return f"{__file__}:{first + place}"


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


def test_equations_in_a_branch_carry_the_users_lines():
    @ts.function
    def function(x, flag):
        if flag:
            x = jnp.sin(x)  # in the branch
        return x

    program = function.trace(X, YES).graph.program
    (branch,) = [e for e in jaxprs.equations(program) if e.primitive.name == "cond"]
    assert jaxprs.source_line(branch) == line_of(function.body, "if flag")
    (sine,) = [
        equation
        for inner in jaxprs.inner_programs(branch)
        for equation in jaxprs.equations(inner)
        if equation.primitive.name == "sin"
    ]
    assert jaxprs.source_line(sine) == line_of(function.body, "in the branch")


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
        "  docs: https://tessera-spmd.github.io/tessera/errors/T318.html"
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
        "  docs: https://tessera-spmd.github.io/tessera/errors/T318.html"
    )


def test_a_conditional_expression_of_different_types_is_refused_where_it_stands():
    @ts.function
    def function(x, flag):
        return [x if flag else "text"][0]

    with pytest.raises(BranchError, match="'its value' has another type"):
        function(X, YES)


@pytest.mark.parametrize("use", [lambda get: get(), lambda get: jax.tree.map(get, 1)])
def test_a_function_inside_does_not_read_a_variable_of_one_side(use):
    @ts.function
    def function(x, flag):
        if flag:
            y = x
        else:
            y = x[:1]
        return use(lambda *_: y)

    with pytest.raises(BranchError, match="'y' has another type on each side"):
        function(X, YES)


def test_a_generator_inside_does_not_read_a_variable_of_one_side():
    @ts.function
    def function(x, flag):
        if flag:
            y = x
        else:
            y = x[:1]

        def values():
            yield y + 1.0

        return list(values())

    with pytest.raises(BranchError, match="'y' has another type on each side"):
        function(X, YES)


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
        "  docs: https://tessera-spmd.github.io/tessera/errors/T319.html"
    )
