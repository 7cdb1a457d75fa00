# SPDX-License-Identifier: Apache-2.0
"""pipeline_parallel: stages whose weights are arguments, against one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera import dist, graph
from tessera.errors import (
    PipelineFormError,
    PipelineSizeError,
    UndecidedRoleError,
    UnknownAxisError,
)

DRAW = np.random.default_rng(0)
PP = dist.Mesh(["pp"], devices=range(2))


def normal(*shape):
    return jnp.asarray(DRAW.normal(size=shape) / shape[0] ** 0.5, jnp.float32)


X, Y = normal(8, 4), normal(8, 4)
WEIGHTS = {"one": {"w": normal(4, 4), "b": normal(4)}, "two": normal(4, 4)}


@graph.stage("one")
def one(x, weights):
    return jnp.tanh(x @ weights["w"] + weights["b"])


@graph.stage("two")
def two(x, weight, scale):
    return x @ weight * scale


def chain(x, weights, scale):
    return two(one(x, weights["one"]), weights["two"], scale)


strategy = ts.distribute(strategy="pipeline_parallel", mesh_axes=["pp"], batch="x")
model = strategy(chain)


def step_with(function):
    @ts.function
    def step(x, y, weights, scale):
        loss = jnp.mean((function(x, weights, scale) - y) ** 2)
        return loss, ts.grad(loss, weights)

    return step


def assert_alike(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6),
        found,
        expected,
    )


@pytest.mark.full
def test_it_gives_what_one_device_gives():
    scale = jnp.float32(2.0)
    with PP:
        found = step_with(model)(X, Y, WEIGHTS, scale)
        assert_alike(model(X, WEIGHTS, scale), chain(X, WEIGHTS, scale))
        assert_alike(model(X, weights=WEIGHTS, scale=2.0), chain(X, WEIGHTS, 2.0))
    assert_alike(found, step_with(chain)(X, Y, WEIGHTS, scale))


def test_weights_are_stored_in_parts_and_rows_in_microbatches():
    with PP:
        traced = model.trace(X, WEIGHTS, jnp.float32(2.0))
        step = step_with(model).trace(X, Y, WEIGHTS, jnp.float32(2.0))
    specs = {value.name: value.spec for value in traced.graph.inputs}
    assert specs["weights/two"] == specs["weights/one/b"] == P("pp")
    assert specs["x"] == specs["scale"] == P()
    assert "1f1b" in step.as_text()


def test_other_names_for_weights():
    strategy = ts.distribute("pipeline_parallel", params=["first", "last"])

    @strategy
    def named(x, first, last):
        return two(one(x, first), last, 1.0)

    with PP:
        found = named(X, WEIGHTS["one"], WEIGHTS["two"])
    assert_alike(found, chain(X, WEIGHTS, 1.0))


def swapped(weights, batch):
    """Names that say the opposite of what a step does, as many rows as weights."""
    return two(one(weights, batch["one"]), batch["two"], 1.0)


SQUARE = {"one": {"w": normal(8, 8), "b": normal(8)}, "two": normal(8, 8)}


def test_names_and_sizes_say_nothing():
    rows = normal(8, 8)

    def step_with(function):
        @ts.function
        def step(batch, weights):
            loss = jnp.sum(function(weights, batch) ** 2)
            return loss, ts.grad(loss, batch)

        return step

    with PP:
        piped = ts.distribute("pipeline_parallel", batch="weights")(swapped)
        found = step_with(piped)(SQUARE, rows)
    assert_alike(found, step_with(swapped)(SQUARE, rows))


@pytest.mark.parametrize("said", [{"batch": "weights"}, {"params": "batch"}])
def test_one_of_the_roles_has_to_be_said(said):
    rows = normal(8, 8)
    with PP:
        with pytest.raises(UndecidedRoleError) as caught:
            ts.distribute("pipeline_parallel")(swapped)(rows, SQUARE)
        strategy = ts.distribute("pipeline_parallel", **said)
        named = strategy(swapped)
        assert_alike(named(rows, SQUARE), swapped(rows, SQUARE))
    assert "batch=[...] of graph.pipeline or ts.distribute" in str(caught.value)
    specs = {v.name: v.spec for v in named.last.traced.graph.inputs}
    assert specs["batch/two"] == P("pp")
    assert specs["weights"] == P()


def test_stages_may_own_their_parameters():
    table = dist.tensor((4, 4), init="ones", name="table")
    first = graph.stage("first")(lambda x: x @ jnp.asarray(table))
    last = graph.stage("last")(lambda x: jnp.tanh(x))
    piped = ts.distribute("pipeline_parallel")(lambda x: last(first(x)))
    with PP:
        assert_alike(piped(X), jnp.tanh(X @ jnp.ones((4, 4))))


def test_a_stage_inside_of_a_stage_is_a_part_of_it():
    inner = graph.stage("inner")(lambda x: x * 2.0)
    outer = graph.stage("outer")(lambda x: inner(x) + 1.0)
    last = graph.stage("last")(lambda x: jnp.tanh(x))
    piped = ts.distribute("pipeline_parallel")(lambda x: last(outer(x)))
    with PP:
        assert_alike(piped(X), jnp.tanh(X * 2.0 + 1.0))


def test_a_function_that_is_no_chain_of_stages_is_refused(dp_mesh):
    with PP:
        with pytest.raises(PipelineSizeError, match="0 stages, 2 devices"):
            ts.distribute("pipeline_parallel")(lambda x: x)(X)
        twice = ts.distribute("pipeline_parallel")(
            lambda x: two(two(x, WEIGHTS["two"], 1.0), WEIGHTS["two"], 1.0)
        )
        with pytest.raises(PipelineFormError):
            twice(X)
    with dp_mesh, pytest.raises(UnknownAxisError, match="an axis 'pp'"):
        model(X, WEIGHTS, 1.0)
