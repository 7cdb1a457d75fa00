# SPDX-License-Identifier: Apache-2.0
"""The loop that runs the passes: order, skipping, verifying, timing, diffs."""

import jax
import jax.numpy as jnp
import pytest

import tessera as ts
from tessera.errors import UnknownPassError
from tessera.graph import pass_runner
from tessera.graph.pass_runner import PASSES, run_passes
from tessera.jax_compat import jaxprs

NAMES = [
    "schedule_pipelines",
    "differentiate_losses",
    "autocast",
    "widen_sums",
    "orient_matmuls",
    "assign_output_layouts",
]


@pytest.fixture
def graph():
    """A small graph in which every numeric pass has something to do."""

    @ts.function
    def step(w, x):
        with ts.autocast("bf16"):
            loss = jnp.sum((x @ w) ** 2)
        return ts.grad(loss, w)

    return step.trace(jnp.ones((3, 2)), jnp.ones((4, 3))).origin.graph


def primitives(graph):
    return [equation.primitive.name for equation in jaxprs.equations(graph.program)]


def test_the_passes_are_named_after_their_modules():
    assert [apply.__name__ for apply in PASSES] == NAMES
    for apply in PASSES:
        assert apply.__module__ == f"tessera.graph.passes.{apply.__name__}"


def test_every_pass_leaves_a_record_after_the_given_graph(graph):
    records = run_passes(graph)
    assert [record.name for record in records] == ["trace", *NAMES]
    assert records[0].graph is graph
    assert all(record.seconds > 0 for record in records[1:])
    assert not any(record.skipped for record in records)


def test_a_pass_that_is_skipped_changes_nothing_and_says_so(graph):
    records = run_passes(graph, skip=["autocast"])
    assert [r.name for r in records if r.skipped] == ["autocast"]
    before, skipped = records[2:4]
    assert skipped.graph is before.graph
    assert "convert_element_type" not in primitives(records[-1].graph)
    assert "convert_element_type" in primitives(run_passes(graph)[-1].graph)


def test_a_pass_that_does_not_exist_cannot_be_skipped(graph):
    with pytest.raises(UnknownPassError) as caught:
        run_passes(graph, skip=["autocast_matmul"])
    assert str(caught.value) == (
        "[T307] there is no pass 'autocast_matmul' to skip\n"
        "  fix: did you mean 'autocast'? Known: 'schedule_pipelines', "
        "'differentiate_losses', 'autocast', "
        "'widen_sums', 'orient_matmuls', 'assign_output_layouts'\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T307.html"
    )


def test_a_function_refuses_such_a_name_when_it_is_declared():
    with pytest.raises(UnknownPassError, match="there is no pass 'remat'"):
        ts.function(jnp.sin, skip_passes=["remat"])


def test_a_function_skips_the_passes_that_it_declares():
    def product(x):
        with ts.autocast("bf16"):
            return x @ x

    x = jnp.full((1, 1), 1.01)  # bf16 has no such number
    assert ts.function(product)(x) != x @ x
    assert ts.function(product, skip_passes=["autocast"])(x) == x @ x


def test_a_diff_shows_the_lines_that_a_pass_changed(graph):
    records = run_passes(graph)
    diff = records[2].diff(records[1].graph)
    assert diff.startswith("--- before differentiate_losses\n")
    assert any(
        line.startswith("-") and "gradient[" in line for line in diff.split("\n")
    )
    assert records[-1].diff(records[-2].graph) == ""


def test_a_pass_that_breaks_the_graph_is_named(graph, monkeypatch):
    def drop_an_input(graph):
        def without_last(*values):
            return jaxprs.evaluate(graph.program, *values, jnp.ones((4, 3)))

        kept = [jaxprs.struct(v.aval) for v in jaxprs.inputs(graph.program)[:-1]]
        program = jax.make_jaxpr(without_last)(*kept)
        return graph.with_program(program)

    monkeypatch.setattr(pass_runner, "PASSES", (*PASSES, drop_an_input))
    with pytest.raises(AssertionError) as caught:
        run_passes(graph)
    assert caught.value.__notes__ == [
        "the graph was well formed before the pass 'drop_an_input'"
    ]


def test_a_graph_that_is_broken_before_the_passes_is_no_pass_fault(graph):
    with pytest.raises(AssertionError) as caught:
        run_passes(graph.with_outputs(()))
    assert not hasattr(caught.value, "__notes__")


def test_running_the_passes_renders_no_program(graph, monkeypatch):
    monkeypatch.setattr(jaxprs, "pretty", lambda program: pytest.fail("rendered"))
    run_passes(graph)
