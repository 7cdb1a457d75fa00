# SPDX-License-Identifier: Apache-2.0
"""The pass ``schedule_pipelines``: what becomes of the call of a pipeline."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tessera as ts
from tessera import errors, graph
from tessera.graph.ir import Graph, verify
from tessera.graph.passes.schedule_pipelines import schedule_pipelines
from tessera.jax_compat import jaxprs
from tessera.mesh import Mesh
from tests.graph.pipelines import cases

MESH = Mesh(["pp"], devices=range(2))
X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
W = np.eye(4, dtype=np.float32)


def model_of(schedule: str = "1f1b") -> Any:
    first, last = (graph.stage(name)(lambda x, w: jnp.tanh(x @ w)) for name in "ab")

    @graph.pipeline(
        stages=[first, last], mesh=MESH, schedule=schedule, microbatches=4, batch="x"
    )
    def model(x: Any, w: Any) -> Any:
        return last(first(x, w), w)

    return model


def traced(step: Any, *arguments: Any) -> Graph:
    """A step's graph before the passes."""
    return ts.function(step, mesh=MESH).trace(*arguments).origin.graph


def names(program: Any) -> list[str]:
    return list(_names(program))


def _names(program: Any) -> Iterator[str]:
    for equation in jaxprs.equations(program):
        yield equation.primitive.name
        for inner in jaxprs.inner_programs(equation):
            yield from _names(inner)


def scheduled(step: Any, *arguments: Any) -> tuple[Graph, list[str]]:
    """The graph after the pass, and the primitives of the step's own level."""
    before = traced(step, *arguments)
    assert before.microbatch is not None
    after = schedule_pipelines(before)
    verify(after)
    assert after.microbatch is None
    return after, [e.primitive.name for e in jaxprs.equations(after.program)]


def test_a_step_without_pipelines_is_left_alone():
    before = traced(lambda x: x.sum(), X)
    assert before.microbatch is None
    assert schedule_pipelines(before) is before


def test_a_step_is_traced_for_one_microbatch_too():
    before = traced(lambda x, w: ts.grad(model_of()(x, w).mean(), w), X, W)
    shapes = [v.aval.shape for v in jaxprs.inputs(before.microbatch)]
    assert shapes == [(2, 4), (4, 4)]


def test_the_way_to_the_loss_is_in_the_loop_and_its_gradient_stays_a_mark():
    def step(x: Any, w: Any) -> Any:
        loss = jnp.exp(model_of()(x, w)).sum()
        return ts.grad(loss, w)

    after, own = scheduled(step, X, W)
    assert "gradient" in own
    assert "custom_vjp_call" in own
    assert "exp" not in own, "it is in the last stage"
    inside = names(after.program)
    assert inside.count("scan") == 1
    assert inside.count("ppermute") == 2
    assert "pipeline" not in inside
    assert "stage_end" not in inside


def test_outputs_leave_the_loop_only_where_something_else_reads_them():
    def step(x: Any, w: Any, *, keep: bool) -> Any:
        out = model_of()(x, w)
        return ts.grad(out.mean(), w), (out.max() if keep else w)

    outputs = []
    for keep in (False, True):
        after, own = scheduled(lambda x, w, k=keep: step(x, w, keep=k), X, W)
        (loop,) = (
            e
            for e in jaxprs.equations(after.program)
            if e.primitive.name == "custom_vjp_call"
        )
        outputs.append([v.aval.shape for v in loop.outvars])
        assert ("reduce_max" in own) == keep
    assert outputs == [[()], [(), (4, 2, 4)]]


@pytest.mark.parametrize(
    "step",
    [
        lambda x, w: model_of()(x, w),
        # Under gpipe it may be differentiated like anything else.
        lambda x, w: ts.grad(jnp.log(jnp.exp(model_of("gpipe")(x, w)).sum()), w),
    ],
    ids=["forward", "gpipe"],
)
def test_without_a_loss_of_its_own_a_call_is_a_loop_of_forwards(step):
    after, own = scheduled(step, X, W)
    assert "shard_map" in own
    assert "custom_vjp_call" not in own
    assert names(after.program).count("ppermute") == 1


def test_a_loss_of_one_microbatch_needs_no_sums():
    first, last = (graph.stage(name)(jnp.tanh) for name in "ab")

    @graph.pipeline(stages=[first, last], mesh=MESH, microbatches=1)
    def model(x: Any) -> Any:
        return last(first(x))

    def step(x: Any) -> Any:
        x = jnp.sin(x)
        return ts.grad(model(x).var(), x)

    with pytest.warns(ts.TesseraWarning):
        _, own = scheduled(step, X)
    assert "shard_map" in own


def test_two_calls_may_each_have_a_loss():
    def step(x: Any, w: Any) -> Any:
        losses = [model_of()(x, w).mean(), model_of()(2.0 * x, w).sum()]
        return [ts.grad(loss, w) for loss in losses]

    after, own = scheduled(step, X, W)
    assert own.count("custom_vjp_call") == 2
    assert names(after.program).count("scan") == 2


def test_a_loss_depends_on_one_call():
    model = model_of()

    def step(x: Any, w: Any) -> Any:
        return ts.grad(model(x, w).mean() + model(2.0 * x, w).sum(), w)

    with pytest.raises(errors.PipelineFormError) as caught:
        schedule_pipelines(traced(step, X, W))
    text = str(caught.value)
    assert "got: a loss that depends on two pipelined calls" in text
    assert "take a gradient of each and add them" in text
    assert "or use schedule='gpipe'" in text


OF_TWO_CALLS = {
    "product": lambda model, x, w: jnp.square(model(x, w) @ model(2.0 * x, w).T).mean(),
    "sum": lambda model, x, w: model(x, w).mean() + jnp.square(model(-x, w)).sum(),
    "chain": lambda model, x, w: jnp.square(model(model(x, w), w)).mean(),
}


def unpiped(x: Any, w: Any) -> Any:
    return jnp.tanh(jnp.tanh(x @ w) @ w)


@pytest.mark.slow(reason="it compiles two pipelines")
@pytest.mark.parametrize("loss", cases(OF_TWO_CALLS, "chain"))
def test_under_gpipe_a_loss_may_depend_on_two_calls(loss):
    body, model = OF_TWO_CALLS[loss], model_of("gpipe")
    found = ts.function(lambda x, w: ts.grad(body(model, x, w), w), mesh=MESH)(X, W)
    expected = jax.grad(lambda w: body(unpiped, X, w))(W)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_under_gpipe_a_call_may_have_two_gradients():
    @ts.function(mesh=MESH)
    def step(x, w):
        out = model_of("gpipe")(x, w)
        return ts.grad(out.mean(), w), ts.grad(jnp.square(out).sum(), w)

    losses = (
        lambda w: unpiped(X, w).mean(),
        lambda w: jnp.square(unpiped(X, w)).sum(),
    )
    for found, loss in zip(step(X, W), losses, strict=True):
        np.testing.assert_allclose(found, jax.grad(loss)(W), rtol=1e-5, atol=1e-6)


def test_a_loss_is_not_differentiated_by_what_the_output_leads_to():
    def step(x: Any, w: Any) -> Any:
        out = model_of()(x, w)
        return ts.grad((out * 2.0).mean(), out)

    with pytest.raises(errors.PipelineFormError) as caught:
        schedule_pipelines(traced(step, X, W))
    text = str(caught.value)
    assert "differentiated by something that a pipeline's output leads to" in text
    assert "test_schedule_pipelines.py:" in text


def test_numbers_are_those_of_the_function_itself():
    def step(x: Any, w: Any) -> Any:
        hidden = jnp.sin(x)
        loss = jnp.square(model_of()(hidden, w)).mean()
        return loss, *ts.grad(loss, (hidden, w))

    def plain(hidden: Any, w: Any) -> Any:
        return jnp.square(jnp.tanh(jnp.tanh(hidden @ w) @ w)).mean()

    got = ts.function(step, mesh=MESH)(X, W)
    want = jax.value_and_grad(plain, (0, 1))(jnp.sin(X), W)
    for a, b in zip(got, jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
