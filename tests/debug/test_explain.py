# SPDX-License-Identifier: Apache-2.0
"""``graph.trace``: one stage, one pass, or everything, as text."""

import re

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera import graph, op
from tessera.debug.explain import Explanation
from tessera.errors import OperandError, UnknownPassError

# What was compiled elsewhere has the lines of elsewhere.
pytestmark = pytest.mark.usefixtures("compiled_here")

W, X = jnp.ones((8, 4)), jnp.ones((4, 8))


def step(w, x):
    with ts.autocast(dtype="bf16"):
        h = jnp.tanh(x @ w)
    loss = jnp.sum(h**2)
    return loss, ts.grad(loss, w)


@pytest.fixture(scope="module")
def traced():
    mesh = ts.Mesh(["dp", "tp"], devices=range(8), shape=(2, 4))
    function = ts.function(step, mesh=mesh, in_specs={"w": P(None, "tp"), "x": P("dp")})
    return graph.trace(function, W, X)


# --- one stage


def test_each_stage_is_shown_alone(traced):
    titles = {
        "trace": ["1 trace"],
        "passes": ["2 passes"],
        "lower": ["3 lower: each operation with its layout"],
        "compile": ["4 compile: each collective", "4 compile: memory"],
    }
    for name, expected in titles.items():
        text = traced.stage(name).as_text()
        assert re.findall(r"^=== (.*) ===$", text, re.MULTILINE) == expected


def test_a_stage_computes_nothing_that_comes_after_it(monkeypatch):
    traced = graph.trace(ts.function(step), W, X)

    def refuse(_):
        raise AssertionError("it was lowered")

    monkeypatch.setattr(Explanation, "lowered", property(refuse))
    assert "tanh" in str(traced.stage("trace"))
    assert "reduce_precision" in str(traced.stage("passes"))


def test_the_full_text_is_the_summary_and_the_stages_in_order(traced):
    stages = [str(traced.stage(name)) for name in ("trace", "passes", "lower")]
    full = traced.as_text(full=True)
    assert full.startswith("\n\n".join([traced.summary(), *stages]))
    assert repr(traced) == str(traced) == traced.as_text()


def test_the_summary_has_phases_collectives_by_axis_and_memory(traced):
    text = re.sub("  +", "  ", str(traced))
    assert text.startswith("step step on dp × tp mesh, 2 × 4\n\nphase  size  time\n")
    for phase in ("trace", "differentiate_losses", "lower", "compile"):
        row = rf"^ *{phase}  \d+ (equations|operations|instructions)  [\d.]+ [mµ]?s$"
        assert re.search(row, text, re.MULTILINE), phase
    assert "axes  collective  operations  calls  bytes per device\n" in text
    assert re.search(r"^tp  all-reduce  \d+  \d+  [\d.]+ \w+$", text, re.MULTILINE)
    assert "memory per device, compiled for cpu\n" in text
    # What takes pages is not in it.
    assert "tanh" not in text
    assert len(text.splitlines()) < 30
    assert "\x1b" not in text


def test_a_skipped_pass_is_marked_in_the_summary():
    function = ts.function(step, skip_passes=["autocast"])
    text = graph.trace(function, W, X).summary()
    assert re.search(r"  autocast +\d+ equations +skipped", text)


def test_the_lowered_program_has_a_layout_for_each_operation(traced):
    text = str(traced.stage("lower"))
    for operation in ("dot_general", "tanh"):
        first = next(re.finditer(rf"stablehlo.{operation} .*", text))[0]
        assert '[{"dp"}, {"tp"}]' in first


def test_on_one_device_the_lowered_program_has_no_layouts():
    text = str(graph.trace(ts.function(step), W, X).stage("lower"))
    assert text.startswith("=== 3 lower: one device, every array is whole ===")
    assert "stablehlo.tanh" in text
    assert "sdy" not in text


def test_the_layouts_of_a_mesh_of_other_machines_are_shown(large_mesh):
    many = ts.function(step, mesh=large_mesh, in_specs={"x": P(None, "pp")})
    text = str(graph.trace(many, W, X).stage("lower"))
    assert '{"pp"}' in text


def test_showing_the_layouts_leaves_the_program_as_it_is(traced):
    before = traced.lowered.as_text()
    str(traced.stage("lower"))
    assert traced.lowered.as_text() == before
    assert "all-reduce" in str(traced.stage("compile"))


def test_the_compiled_module_is_shown_where_it_is_asked_for(traced):
    assert "HloModule" not in str(traced.stage("compile"))
    assert "HloModule" in traced.stage("compile", hlo=True).as_text()
    assert "HloModule" in traced.as_text(hlo=True)


def test_a_stage_that_does_not_exist_is_an_error_that_lists_them(traced):
    with pytest.raises(UnknownPassError) as caught:
        traced.stage("lowered")
    assert str(caught.value).startswith("[T307] a step has no stage 'lowered'")
    assert "lower" in str(caught.value)


# --- one pass


def test_the_diff_of_all_passes_is_that_of_each(traced):
    names = ("differentiate_losses", "autocast", "widen_sums")
    diffs = (traced.diff(name) for name in (*names, "assign_output_layouts"))
    assert traced.diff() == "\n".join(diffs)
    assert "--- before schedule_pipelines" not in traced.diff()


# --- a model and a batch

BATCH = {"input": jnp.ones((8, 4)), "labels": jnp.zeros(8, jnp.int32)}


def test_a_model_is_traced_with_the_input_of_a_batch():
    traced = graph.trace(lambda x: jnp.tanh(op.matmul(x, W.T)), BATCH)
    text = traced.stage("trace").as_text()
    assert text.startswith("=== 1 trace of batch['input'] ===")
    assert "x: float32[8,4]" in text


def test_a_model_that_takes_a_batch_gets_the_whole():
    traced = graph.trace(lambda batch: batch["input"][batch["labels"]], BATCH)
    text = traced.stage("trace").as_text()
    assert text.startswith("=== 1 trace ===")
    assert "batch/labels: int32[8]" in text


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (lambda x: op.matmul(x, W), {"images": BATCH["input"]}),
        (lambda x: op.matmul(x, jnp.ones((5, 5))), BATCH),
    ],
)
def test_a_model_that_can_take_neither_is_refused_for_what_it_was_given(model, batch):
    with pytest.raises(OperandError) as caught:
        graph.trace(model, batch)
    field = next(iter(batch))
    assert str(caught.value) == (
        "[T401] an operation takes arrays, not a dict\n"
        f"  got: dict of {', '.join(map(repr, batch))}\n"
        f"  fix: pass one of its arrays, such as batch[{field!r}]\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T401.html"
    )


def test_what_a_step_does_wrong_with_its_batch_is_its_own_error():
    with pytest.raises(KeyError, match="lables"):
        graph.trace(lambda batch: batch["lables"].sum(), BATCH)
