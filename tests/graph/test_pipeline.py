# SPDX-License-Identifier: Apache-2.0
"""``graph.pipeline``: the numbers of the same function on one device."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tessera as ts
from tessera import dist, graph, op
from tessera.graph.pipelining import Op, custom
from tessera.jax_compat import jaxprs
from tessera.mesh import Mesh
from tests.graph.pipelines import (
    BATCH,
    KEY,
    LENGTH,
    ROWS,
    TWO,
    WIDTH,
    WORDS,
    Pipe,
    built,
    cases,
    close,
    dense,
    normal,
    same_as_one_device,
    unpiped,
    words,
)

# --- schedules and meshes


def layers(pipe: Pipe, *, stages: int = 2) -> Any:
    """A mean square of dense stages."""
    chain = [dense(f"layer_{i}") for i in range(stages)]

    @pipe(stages=chain)
    def model(x: Any) -> Any:
        for stage in chain:
            x = stage(x)
        return x

    def step(batch: Any) -> Any:
        out = model(batch["x"])
        loss = jnp.square(out).mean()
        return graph.backward(loss), loss

    return step


def transformer(pipe: Pipe) -> Any:
    """Masked cross-entropy of transformer stages, and a metric of their output."""

    def block(name: str) -> Any:
        return graph.stage(name)(lambda x: op.transformer_block(x, num_heads=2))

    first, last = block("first"), block("last")
    model = pipe(stages=[first, last])(lambda x: last(first(x)))

    def step(batch: Any) -> Any:
        out = model(batch["x"])
        loss = op.cross_entropy(out, batch["labels"], ignore_index=-100)
        perplexity = jnp.exp(loss)
        grads = graph.backward(loss)
        return grads, {"perplexity": perplexity, "size": jnp.square(out).mean()}

    return step


def sentences() -> dict[str, np.ndarray]:
    labels = words(ROWS, LENGTH) % WIDTH
    labels[np.random.default_rng(3).random(labels.shape) < 0.4] = -100
    return {"x": normal(ROWS, LENGTH, WIDTH), "labels": labels}


def own_table() -> Any:
    """Two devices that do one microbatch after the other."""
    forward, backward = [Op("F", m) for m in range(4)], [Op("B", m) for m in range(4)]
    rows: list[list[list[Op]]] = []
    for f, b in zip(forward, backward, strict=True):
        rows += [[[f], []], [[], [f, b]], [[b], []]]
    return custom(rows, microbatches=4)


def name_of(schedule: Any) -> str:
    return getattr(schedule, "name", schedule)


SCHEDULES = ["gpipe", "1f1b", "zero_bubble"]


@pytest.mark.full
@pytest.mark.parametrize(
    "schedule",
    [
        *cases(SCHEDULES, "1f1b", "zero_bubble"),
        pytest.param(own_table(), marks=pytest.mark.full),
    ],
    ids=name_of,
)
def test_a_pipeline_of_two_layers_computes_what_one_device_does(schedule):
    step = same_as_one_device(layers, BATCH, schedule=schedule)
    assert step.num_programs() == 1


@pytest.mark.full
def test_a_device_may_have_several_stages():
    same_as_one_device(partial(layers, stages=4), BATCH, schedule="interleaved")


@pytest.mark.full
def test_the_other_axes_of_the_mesh_work_inside_the_stages():
    axes = ("fsdp", "pp", "tp")
    mesh = Mesh(axes, devices=range(8), shape=(2, 2, 2))
    step = same_as_one_device(transformer, sentences(), mesh, schedule="zero_bubble")
    assert step.last is not None
    axes_used = {axis for row in step.last.collectives.rows for axis in row.axes}
    assert axes_used == set(axes)


def test_gradients_are_summed_over_dp_once_in_a_step():
    mesh = Mesh(["pp", "dp"], devices=range(4), shape=(2, 2))
    step = built(layers, mesh, microbatches=4)
    rows = step.compile(BATCH).collectives.rows
    over_dp = [row for row in rows if "dp" in row.axes]
    assert over_dp
    assert all(row.calls == 1 and not row.conditional for row in over_dp)


@pytest.mark.parametrize(("rows", "microbatches", "part"), [(16, 2, 4), (12, 4, 3)])
def test_a_stage_sees_a_devices_part_of_a_microbatch_where_dp_divides_it(
    rows, microbatches, part
):
    mesh = Mesh(["pp", "dp"], devices=range(4), shape=(2, 2))
    first = graph.stage("first")(lambda x: x - x.mean(0))
    last = graph.stage("last")(lambda x: x)

    @graph.pipeline(stages=[first, last], mesh=mesh, microbatches=microbatches)
    def model(x):
        return last(first(x))

    x = normal(rows, 3)
    parts = x.reshape(-1, part, 3)
    want = (parts - parts.mean(1, keepdims=True)).reshape(rows, 3)
    with pytest.warns(ts.TesseraWarning, match="reduce_sum mixes the rows"):
        got = model(x)
    np.testing.assert_allclose(got, want, atol=1e-6)


def products(program: Any) -> int:
    """How many matrix products a program has, in all branches."""
    count = 0
    for equation in jaxprs.equations(program):
        count += equation.primitive.name == "dot_general"
        count += sum(map(products, jaxprs.inner_programs(equation)))
    return count


def products_by_kind(program: Any) -> list[int]:
    """Those of forwards, backwards and weight gradients in the body of the loop."""
    for equation in jaxprs.equations(program):
        for inner in jaxprs.inner_programs(equation):
            if equation.primitive.name == "scan":
                bodies = jaxprs.equations(inner)
                return [
                    sum(map(products, jaxprs.inner_programs(e)))
                    for e in bodies
                    if e.primitive.name == "cond"
                ]
            if found := products_by_kind(inner):
                return found
    return []


@pytest.mark.parametrize(
    ("schedule", "remat", "expected"),
    # Of two stages: the forwards, each in a branch; a gradient of an input; two of
    # weights. With "full" both stages run forward in their backward, and the branch of
    # the last one's forward is not taken.
    [
        ("1f1b", "none", [2, 1 + 2]),
        ("1f1b", "full", [2, 2 + 1 + 2]),
        ("zero_bubble", "none", [2, 1, 2]),
        ("zero_bubble", "full", [2, 2 + 1, 2]),
    ],
)
def test_a_tick_computes_forwards_and_gradients_by_themselves(
    schedule, remat, expected
):
    def make(pipe: Pipe) -> Any:
        first, last = dense("first"), dense("last", 6)
        model = pipe(stages=[first, last])(lambda x: last(first(x)))
        return lambda x: graph.backward(model(x).mean())

    step = built(make, TWO, schedule=schedule, microbatches=4, remat=remat)
    (after,) = (
        record.graph.program
        for record in step.trace(normal(ROWS, 5)).passes
        if record.name == "schedule_pipelines"
    )
    assert products_by_kind(after) == expected


# --- other ways to call it


def test_ts_grad_differentiates_by_weights_that_are_arguments():
    """Also where a weight has as many rows as the batch."""
    first, last = (
        graph.stage(name)(lambda x, w: jnp.tanh(x @ w)) for name in ("first", "last")
    )
    weights = {"first": normal(ROWS, WIDTH), "last": normal(WIDTH, ROWS, seed=1)}

    def step(pipe: Pipe, weights: Any, x: Any) -> Any:
        @pipe(stages=[first, last])
        def model(x: Any) -> Any:
            return last(first(x, weights["first"]), weights["last"])

        loss = jnp.square(model(x)).mean()
        return ts.grad(loss, weights), loss

    x = normal(ROWS, ROWS, seed=2)
    plain = ts.function(partial(step, unpiped))(weights, x)
    pipe = partial(graph.pipeline, mesh=TWO, microbatches=4)
    close(ts.function(partial(step, pipe), mesh=TWO)(weights, x), plain)


BF16_SPACING = 2.0**-7  # of numbers next to each other, relative


@pytest.mark.full
def test_autocast_holds_for_what_it_is_written_around():
    def make(pipe: Pipe, *, stages: bool, loss: bool) -> Any:
        first, last = dense("first"), dense("last")
        model = pipe(stages=[first, last])(lambda x: last(first(x)))
        table = dist.tensor((WIDTH, WORDS), init="normal", name="table")

        def step(batch: Any) -> Any:
            with ts.autocast("bf16", enabled=stages):
                out = model(batch["x"])
            with ts.autocast("bf16", enabled=loss):
                found = op.cross_entropy(out @ table, batch["labels"])
            return graph.backward(found), found

        return step

    def narrowed(*, stages: bool, loss: bool) -> int:
        step = built(partial(make, stages=stages, loss=loss), TWO, microbatches=4)
        graph_after = step.trace(BATCH).passes[-2].graph
        return graph_after.as_text().count("mantissa_bits=7")

    neither = narrowed(stages=False, loss=False)
    stages, loss = narrowed(stages=True, loss=False), narrowed(stages=False, loss=True)
    assert neither == 0
    assert stages > 0
    assert loss > 0
    assert narrowed(stages=True, loss=True) == stages + loss
    same_as_one_device(partial(make, stages=False, loss=True), BATCH)
    # What a stage sends is f32; one device rounds it for the next matmul and keeps it.
    same_as_one_device(
        partial(make, stages=True, loss=False), BATCH, tolerance=BF16_SPACING
    )


def test_a_pipeline_may_be_called_without_a_gradient():
    first, last = dense("first"), dense("last")

    def make(pipe: Pipe) -> Any:
        model = pipe(stages=[first, last])(lambda x: last(first(x)))
        return lambda batch: model(batch["x"])

    same_as_one_device(make, BATCH)


def test_a_pipeline_may_be_called_by_itself():
    first, last = dense("first"), dense("last")

    @graph.pipeline(stages=[first, last], mesh=TWO, microbatches=4)
    def model(x):
        return last(first(x))

    params = model.init(KEY, BATCH["x"])
    assert sorted(params) == ["first", "last"]
    plain = graph.stage("plain")(lambda x: last(first(x)))
    plain.init(KEY, BATCH["x"])
    plain.params = {"plain": jax.tree.map(np.asarray, params)}
    close(model(BATCH["x"]), plain(BATCH["x"]))
    model.params = jax.tree.map(jnp.zeros_like, model.params)
    assert not np.asarray(model(BATCH["x"])).any()


def test_prints_of_a_stage_come_from_its_device(capfd):
    first, last = dense("first"), dense("last")

    @graph.pipeline(stages=[first, last], mesh=TWO, microbatches=2)
    def model(x):
        hidden = first(x)
        jax.debug.print("rows {}", len(hidden))
        return last(hidden)

    jax.block_until_ready(model(BATCH["x"]))
    jax.effects_barrier()
    assert capfd.readouterr().out == "rows 8\n" * 2


# --- what is stored where


def test_no_device_holds_more_than_its_share_of_the_parameters():
    step = built(layers, TWO, microbatches=4)
    step.init(KEY, BATCH)
    grads, _ = step(BATCH)
    for tree in (step.params, grads):
        total = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
        for device in range(2):
            held = sum(
                leaf.addressable_shards[device].data.nbytes
                for leaf in jax.tree.leaves(tree)
            )
            assert held == total / 2
    specs = [leaf.sharding.spec for leaf in jax.tree.leaves(step.params)]
    assert [leaf.sharding.spec for leaf in jax.tree.leaves(grads)] == specs
    assert step.last.memory.arguments < total / 2 + 5_000


def test_a_program_does_not_grow_with_the_microbatches():
    def lines(count: int) -> int:
        step = built(layers, TWO, microbatches=count)
        batch = {name: np.repeat(array, 8, axis=0) for name, array in BATCH.items()}
        return len(step.lower(batch).as_text().splitlines())

    assert lines(8) == lines(64)


# --- the plan


def test_trace_shows_the_pass_and_the_schedule():
    step = built(layers, TWO, microbatches=4)
    explanation = graph.trace(step, BATCH)
    assert "1f1b: 2 stages, 4 microbatches" in explanation.traced.as_text()
    assert explanation.traced.diff("schedule_pipelines")
    assert "collective-permute" in explanation.as_text()
