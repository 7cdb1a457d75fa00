# SPDX-License-Identifier: Apache-2.0
"""``graph.trace``: the phases of a step, as text."""

import re

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera import graph, op
from tessera.debug.explain import Explanation
from tessera.errors import OperandError

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


def test_what_is_traced_is_not_lowered_before_it_is_asked_for(monkeypatch):
    traced = graph.trace(ts.function(step), W, X)

    def refuse(_):
        raise AssertionError("it was lowered")

    monkeypatch.setattr(Explanation, "lowered", property(refuse))
    assert "tanh" in traced.traced.as_text()
    assert "bfloat16" in traced.traced.diff("autocast")


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
    assert repr(traced) == str(traced) == traced.as_text()


def test_a_skipped_pass_is_marked_in_the_summary():
    function = ts.function(step, skip_passes=["autocast"])
    text = str(graph.trace(function, W, X))
    assert re.search(r"  autocast +\d+ equations +skipped", text)


def test_the_lowered_program_has_a_layout_for_each_operation(traced):
    text = traced.layouts()
    for operation in ("dot_general", "tanh"):
        first = next(re.finditer(rf"stablehlo.{operation} .*", text))[0]
        assert '[{"dp"}, {"tp"}]' in first


def test_on_one_device_the_lowered_program_has_no_layouts():
    text = graph.trace(ts.function(step), W, X).layouts()
    assert "stablehlo.tanh" in text
    assert "sdy" not in text


def test_the_layouts_of_a_mesh_of_other_machines_are_shown(large_mesh):
    many = ts.function(step, mesh=large_mesh, in_specs={"x": P(None, "pp")})
    text = graph.trace(many, W, X).layouts()
    assert '{"pp"}' in text


def test_showing_the_layouts_leaves_the_program_as_it_is(traced):
    before = traced.lowered.as_text()
    traced.layouts()
    assert traced.lowered.as_text() == before
    assert "all-reduce" in traced.compiled.collectives.as_text()


# --- a model and a batch

BATCH = {"input": jnp.ones((8, 4)), "labels": jnp.zeros(8, jnp.int32)}


def test_a_model_is_traced_with_the_input_of_a_batch():
    traced = graph.trace(lambda x: jnp.tanh(op.matmul(x, W.T)), BATCH)
    assert "\ntraced with batch['input']\n" in traced.as_text()
    assert "x: float32[8,4]" in traced.traced.as_text()


def test_a_model_that_takes_a_batch_gets_the_whole():
    traced = graph.trace(lambda batch: batch["input"][batch["labels"]], BATCH)
    assert "traced with" not in traced.as_text()
    assert "batch/labels: int32[8]" in traced.traced.as_text()


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
