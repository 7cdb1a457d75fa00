# SPDX-License-Identifier: Apache-2.0
"""What ``graph.pipeline`` refuses."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tessera as ts
from tessera import dist, errors, graph, op
from tessera.graph.pipelining import schedule as schedule_of
from tessera.mesh import Mesh
from tests.graph.pipelines import BATCH, ROWS, TWO, WIDTH, dense, normal


def model_of(*names: str, called: Any, **options: Any) -> Any:
    """A pipeline of stages by name, whose function calls them as it is told."""
    stages = {name: dense(name) for name in {*names, *called}}
    if len(called) > len(set(called)):  # no step has two parameters of one name
        stages = {name: graph.stage(name)(jnp.tanh) for name in stages}
    chain = [stages[name] for name in names]

    @graph.pipeline(stages=chain, **{"mesh": TWO, "microbatches": 4} | options)
    def model(x: Any) -> Any:
        for name in called:
            x = stages[name](x)
        return x

    return model


def refused(kind: type[errors.TesseraError], call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def test_a_pipelined_function_that_changes_an_argument_is_refused():
    """It runs for each microbatch, on other devices: the change would be lost."""
    stages = [graph.stage(name)(jnp.tanh) for name in ("first", "second")]

    @graph.pipeline(stages=stages, mesh=TWO, batch="x")
    def model(x: Any, state: Any) -> Any:
        state["calls"] = state["calls"] + 1
        return stages[1](stages[0](x))

    state = {"calls": jnp.int32(0)}
    text = refused(errors.WriteBackError, lambda: model(jnp.ones((ROWS, 4)), state))
    assert text == (
        "[T320] the pipelined function 'model' changes its arguments, which cannot be "
        "given back\n"
        "  got: another value of 'state/calls'\n"
        "  fix: in a stage of a pipeline return what is new\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T320.html"
    )
    assert state == {"calls": 0}


@pytest.mark.parametrize("called", [["b", "a"], ["a"], ["a", "b", "b"], []])
def test_each_stage_is_called_once_and_in_order(called):
    model = model_of("a", "b", called=called)
    text = refused(errors.PipelineFormError, lambda: model.trace(BATCH["x"]))
    ran = ", ".join(map(repr, called)) or "none"
    assert text == (
        "[T312] a pipelined function runs each of its stages once, in the order of "
        "stages=\n"
        f"  got: it ran {ran}; stages: 'a', 'b'\n"
        "  fix: call them one after the other on each other's results, or list them in "
        "the order of the calls\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T312.html"
    )


def test_there_is_a_stage_for_each_device():
    text = refused(errors.PipelineSizeError, lambda: model_of(*"abc", called="abc"))
    assert text == (
        "[T311] the stages of a pipeline do not fit the devices of axis 'pp'\n"
        "  got: 3 stages, 2 devices\n"
        "  fix: use 2 stages, or a multiple of 2 with schedule='interleaved', or "
        "another mesh\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T311.html"
    )
    with pytest.raises(errors.PipelineSizeError):
        model_of(*"abc", called="abc", schedule="interleaved")
    for schedule in ("dualpipev", schedule_of("interleaved", 2, 2, 2)):
        with pytest.raises(errors.PipelineSizeError, match="use 4 stages"):
            model_of("a", "b", called="ab", schedule=schedule)


def test_a_policy_of_residuals_is_one_of_remat():
    model = partial(model_of, "first", "last", called=["first", "last"])
    text = refused(errors.SettingValueError, lambda: model(remat="nome"))
    assert text.startswith("[T502] there is no checkpoint policy 'nome'")
    assert "did you mean 'none'?" in text


def test_the_mesh_has_the_axis_of_the_pipeline():
    mesh = Mesh(["tp", "dp"], devices=range(4), shape=(2, 2))
    text = refused(
        errors.UnknownAxisError, lambda: model_of("a", "b", called="ab", mesh=mesh)
    )
    assert text.startswith("[T103]")
    assert "'pp'" in text
    assert "tp" in text


def test_stages_are_made_by_graph_stage():
    text = refused(
        errors.PipelineFormError,
        lambda: graph.pipeline(stages=[dense("a"), jnp.sin], mesh=TWO),
    )
    assert "a stage of a pipeline is made by graph.stage" in text


def test_a_pipeline_needs_a_mesh_at_last():
    model = model_of("a", "b", called="ab", mesh=None)
    assert refused(errors.NoMeshError, lambda: model.trace(BATCH["x"]))
    with TWO:
        assert model.trace(BATCH["x"]).graph.mesh == TWO


def test_microbatches_divide_the_batch():
    model = model_of("a", "b", called="ab", microbatches=5)
    text = refused(errors.BatchSizeError, lambda: model.trace(BATCH["x"]))
    assert "16 rows, 5 microbatches: 16 % 5 = 1" in text
    assert "use a batch of 15 or 20 rows, or 4 or 8 microbatches" in text


def test_fewer_microbatches_than_stages_is_a_warning():
    model = model_of("a", "b", called="ab", microbatches=1)
    with pytest.warns(ts.TesseraWarning) as caught:
        model.trace(BATCH["x"])
    assert str(caught[0].message) == (
        "1 microbatches for 2 pipeline stages: under '1f1b' the devices wait for 50 % "
        "of the time; use at least 2 microbatches, better several times as many"
    )
    assert len(caught) == 1


def chain_of(body: Callable[..., Any]) -> Any:
    first = graph.stage("first")(lambda x: jnp.argmax(x, -1))
    last = graph.stage("last")(lambda x: x)
    return graph.pipeline(stages=[first, last], mesh=TWO)(partial(body, first, last))


def test_what_stages_hand_on_is_floating_point():
    model = chain_of(lambda first, last, x: last(first(x)).astype(jnp.float32))
    text = refused(errors.PipelineFormError, lambda: model.trace(BATCH["x"]))
    assert "stage 'first' sends an array that is not floating point" in text
    assert "int32[8, 3]" in text


@pytest.mark.parametrize(
    ("result", "got"),
    [
        (lambda x: x.sum(), "float32[]"),
        (lambda x: x > 0, "bool[8, 3, 5] for 8 rows"),
    ],
)
def test_results_have_a_row_for_each_row_of_the_batch(result, got):
    first, last = (graph.stage(name)(lambda x: x) for name in ("first", "last"))
    model = graph.pipeline(stages=[first, last], mesh=TWO)(
        lambda x: result(last(first(x)))
    )
    text = refused(errors.PipelineFormError, lambda: model.trace(BATCH["x"]))
    assert got in text


def test_something_has_rows():
    model = model_of("a", "b", called="ab")
    text = refused(errors.PipelineFormError, lambda: model.trace(jnp.float32(1.0)))
    assert "a pipeline has no batch to split into microbatches" in text


@pytest.mark.parametrize("where", ["scan", "cond"])
def test_a_pipeline_is_called_at_the_level_of_the_step(where):
    model = model_of("a", "b", called="ab")
    x = normal(ROWS, WIDTH)

    def step(x: Any) -> Any:
        if where == "scan":
            return jax.lax.scan(lambda x, _: (model(x), None), x, length=2)[0]
        return jax.lax.cond(x.sum() > 0, model, lambda x: x, x)

    traced = graph.training_step(mesh=TWO)(step).trace(x)
    text = refused(errors.PipelineFormError, lambda: traced.passes)
    assert f"a pipelined function is called inside {where}" in text
    assert "test_pipeline_misuse.py:" in text


def test_one_call_has_one_gradient():
    model = model_of("a", "b", called="ab")

    @graph.training_step(mesh=TWO)
    def step(x):
        out = model(x)
        return graph.backward(out.mean()), graph.backward(out.sum())

    text = refused(errors.PipelineFormError, lambda: step.trace(BATCH["x"]).passes)
    assert "2 gradients of losses that depend on one call" in text


def test_the_rows_of_a_pipeline_are_those_of_the_step():
    model = model_of("a", "b", called="ab")

    @graph.training_step(mesh=TWO)
    def step(x):
        return graph.backward(model(x.reshape(-1, 5)).mean())

    text = refused(errors.PipelineFormError, lambda: step.trace(BATCH["x"]))
    assert text == (
        "[T312] a step with a pipeline cannot be traced for another number of rows\n"
        "  got: 12 of 48 rows in each argument that may be a batch: 48 rows in 48\n"
        "  fix: give the pipeline the rows of the step's arguments, as many and in the "
        "same order\n"
        "  fix: or say which arguments are batches: graph.training_step(batch=...)\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T312.html"
    )


def test_jax_grad_does_not_look_inside():
    model = model_of("a", "b", called="ab")

    @graph.training_step(mesh=TWO)
    def step(x):
        return jax.grad(lambda x: model(x).sum())(x)

    text = refused(errors.OutsideTraceError, lambda: step.trace(BATCH["x"]))
    assert "jax.grad cannot look inside a pipeline" in text


def test_a_kernel_in_a_stage_splits_nothing_over_the_pipeline():
    @op.kernel(layouts={"x": dist.ShardSpec((0,), ("pp",))})
    def doubled(x: Any) -> Any:
        return 2.0 * x

    first = graph.stage("first")(lambda x: doubled(x))
    last = graph.stage("last")(jnp.tanh)
    model = graph.pipeline(stages=[first, last], mesh=TWO)(lambda x: last(first(x)))
    with TWO:
        text = refused(errors.PipelineFormError, lambda: model.trace(BATCH["x"]).passes)
    assert "a kernel in a stage of a pipeline splits arrays over the pipeline's" in text
    assert "test_pipeline_misuse.py:" in text
