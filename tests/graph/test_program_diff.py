# SPDX-License-Identifier: Apache-2.0
"""What a pass changed, and not what is called otherwise because of it."""

import re

import jax
import jax.numpy as jnp

import tessera as ts
from tessera.graph.program_diff import diff_programs

W, X = jnp.ones((8, 4)), jnp.ones((4, 8))


def text(function, *args):
    return ts.function(function).trace(*args).as_text()


def changed(diff):
    """The lines of a diff, without its header, hunks and the lines of the source."""
    lines = [line.split("  # ")[0] for line in diff.splitlines()[2:]]
    return [line for line in lines if not line.startswith("@@")]


def test_a_program_does_not_differ_from_itself():
    program = text(lambda w, x: jnp.tanh(x @ w), W, X)
    assert diff_programs(program, program, name="nothing") == ""


def test_an_equation_that_is_put_in_renames_nothing_else():
    old = "    c:f32[] = sin b\n    d:f32[] = cos c\n    e:f32[] = neg d"
    new = "    c:f32[] = sin b\n    d:f32[] = exp c\n    e:f32[] = cos d\n"
    new += "    f:f32[] = neg e"
    assert changed(diff_programs(old, new, name="pass")) == [
        "-    d:f32[] = cos c",
        "+    d':f32[] = exp c",
        "+    d:f32[] = cos d'",
    ]


def test_another_operand_is_a_difference_though_the_operation_is_the_same():
    old = "{ lambda ; a:f32[] b:f32[]. let\n    c:f32[] = add a b\n  in (c,) }"
    new = old.replace("add a b", "add b b")
    assert changed(diff_programs(old, new, name="pass")) == [
        "-    c:f32[] = add a b",
        "+    c:f32[] = add b b",
    ]


def test_the_same_line_of_a_path_with_spaces_is_no_difference():
    old = "    c:f32[] = sin b  # /my own/run 1.py:3:4 (step)\n  in (c,) }"
    new = "    c:f32[] = sin b     # /my own/run 1.py:3:9\n  in (c,) }"
    assert diff_programs(old, new, name="pass") == ""


def test_an_input_that_is_added_leaves_the_names_of_the_others():
    old = "{ lambda ; b:f32[]. let\n    c:f32[] = sin b\n  in (c,) }"
    new = "{ lambda ; a:f32[] b:f32[]. let\n    c:f32[] = sin a\n  in (c,) }"
    assert changed(diff_programs(old, new, name="pass")) == [
        "-{ lambda ; b:f32[]. let",
        "+{ lambda ; b:f32[] b':f32[]. let",
    ]


def test_names_of_operations_and_settings_are_no_variables():
    old = "    exp:f32[] = exp b\n    c:f32[] = mul[name=exp] exp b\n  in (c,) }"
    new = f"    a:f32[] = neg b\n{old}"
    assert changed(diff_programs(old, new, name="pass")) == ["+    a:f32[] = neg b"]


def test_the_settings_of_an_equation_are_in_one_line_with_it():
    def step(w, x):
        with ts.autocast(dtype="bf16"):
            return jnp.sum(x @ w)

    lines = changed(ts.function(step).trace(W, X).diff("autocast"))
    assert [line[0] for line in lines] == ["-", "+", "+", "+"]
    assert all(line.count("[") == line.count("]") for line in lines)
    assert "= dot_general[dimension_numbers=" in lines[0]
    assert lines[0].endswith("] b a")
    assert lines[-1].endswith("] c' d'")


def test_a_change_inside_of_a_loop_is_shown_alone():
    def step(w, x):
        def body(h, _):
            with ts.autocast(dtype="bf16"):
                return jnp.tanh(h @ w @ x), None

        return jax.lax.scan(body, x, length=3)[0]

    lines = changed(ts.function(step).trace(W, X).diff("autocast"))
    assert sum("convert_element_type" in line for line in lines) == 3
    assert not any("tanh" in line for line in lines)
    assert not any("scan" in line for line in lines)


def test_the_lines_of_the_source_are_kept():
    def step(x):
        loss = jnp.sum(jnp.sin(x))
        return ts.grad(loss, x)

    diff = ts.function(step).trace(X).diff("differentiate_losses")
    added = [line for line in diff.splitlines() if re.match(r"\+ .* = ", line)]
    assert added
    assert all(f"# {__file__}:" in line for line in added)
