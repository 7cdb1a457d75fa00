# SPDX-License-Identifier: Apache-2.0
"""What the stages of a pipeline may be, and what they may hand on."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tessera as ts
from tessera import dist, graph, op
from tessera.mesh import Mesh
from tests.graph.pipelines import (
    LENGTH,
    ONE,
    ROWS,
    WIDTH,
    WORDS,
    Pipe,
    cases,
    dense,
    normal,
    same_as_one_device,
    unpiped,
    weight,
    words,
)


@pytest.mark.full
def test_an_embedding_may_be_the_first_stage_and_a_head_the_last():
    def make(pipe: Pipe) -> Any:
        @graph.stage("embedding")
        def embedding(tokens: Any, positions: Any) -> Any:
            return weight("tokens", WORDS, WIDTH)[tokens] + jnp.take(
                weight("positions", LENGTH, WIDTH), positions, axis=0
            )

        @graph.stage("head")
        def head(x: Any) -> Any:
            return jnp.tanh(x) @ weight("kernel", WIDTH, WORDS)

        @pipe(stages=[embedding, head], batch=["tokens", "positions"])
        def model(tokens: Any, positions: Any) -> Any:
            return head(embedding(tokens, positions))

        def step(batch: Any) -> Any:
            positions = jnp.broadcast_to(
                jnp.arange(LENGTH, dtype=jnp.int32), batch["tokens"].shape
            )
            out = model(batch["tokens"], positions)
            loss = op.cross_entropy(out, batch["labels"])
            return graph.backward(loss), loss

        return step

    batch = {"tokens": words(ROWS, LENGTH), "labels": words(ROWS, LENGTH, seed=1)}
    mesh = Mesh(["dp", "pp"], devices=range(4), shape=(2, 2))
    same_as_one_device(make, batch, mesh, schedule="zero_bubble")


def encoder_and_decoder(pipe: Pipe) -> Any:
    """Other shapes in each stage, several arrays between them, and side inputs."""
    scale = dist.tensor((WIDTH,), init="normal", name="scale")

    @graph.stage("encoder")
    def encoder(x: Any) -> Any:
        hidden = jnp.tanh(x @ weight("kernel", 5, WIDTH))
        return {"memory": hidden.mean(1), "hidden": hidden}

    @graph.stage("decoder")
    def decoder(found: Any, targets: Any, scale: Any) -> Any:
        read = targets @ weight("kernel", 7, WIDTH) * scale
        mixed = jnp.einsum("bsd,btd->bst", read, found["hidden"])
        return mixed, jnp.sin(found["memory"] @ weight("out", WIDTH, 2))

    @pipe(stages=[encoder, decoder], batch=["x", "targets", "rows"])
    def model(x: Any, targets: Any, rows: Any, scale: Any) -> Any:
        mixed, out = decoder(encoder(x), targets, scale)
        shift = rows[:, None].astype(jnp.float32)
        return mixed + x[:, None, :, 0], out + shift  # the input skips the stages

    def step(batch: Any) -> Any:
        mixed, out = model(batch["x"], batch["y"], batch["rows"], scale * 2.0)
        loss = jnp.square(mixed).mean() + jnp.sum(out * batch["weights"])
        return graph.backward(loss), loss

    return step


@pytest.mark.full
@pytest.mark.parametrize("schedule", cases(["1f1b", "zero_bubble"], "zero_bubble"))
def test_stages_may_have_other_shapes_and_hand_on_several_arrays(schedule):
    batch = {
        "x": normal(ROWS, LENGTH, 5),
        "y": normal(ROWS, 4, 7, seed=1),
        "rows": np.arange(ROWS, dtype=np.int32),
        "weights": normal(ROWS, 2, seed=2),
    }
    step = same_as_one_device(encoder_and_decoder, batch, schedule=schedule)
    assert "scale" in step.params, "an argument without rows has a gradient, too"


@pytest.mark.full
def test_a_weight_may_be_shared_by_stages():
    def make(pipe: Pipe) -> Any:
        table = dist.tensor((WORDS, WIDTH), init="normal", name="table")
        first, last = dense("first"), dense("last")

        @pipe(stages=[first, last])
        def model(tokens: Any) -> Any:
            return last(first(table[tokens])) @ table.T

        def step(batch: Any) -> Any:
            loss = op.cross_entropy(model(batch["tokens"]), batch["labels"])
            return graph.backward(loss), loss

        return step

    batch = {"tokens": words(ROWS, LENGTH), "labels": words(ROWS, LENGTH, seed=1)}
    same_as_one_device(make, batch, schedule="zero_bubble")


@pytest.mark.full
def test_a_captured_tensor_keeps_its_declared_layout():
    mesh = Mesh(["pp", "tp"], devices=range(4), shape=(2, 2))

    def make(pipe: Pipe) -> Any:
        on = ONE if pipe is unpiped else mesh

        def tensor(name: str, *layout: str) -> Any:
            spec = None if on is ONE else dist.ShardSpec((1,), layout)
            return dist.tensor((WIDTH, WIDTH), spec, on, init="normal", name=name)

        wide, split = tensor("wide", "tp"), tensor("split", "pp")

        @graph.stage("a")
        def a(x: Any) -> Any:
            return jnp.tanh(x @ wide)

        @graph.stage("b")
        def b(x: Any) -> Any:
            return jnp.tanh(x @ split)

        @pipe(stages=[a, b])
        def model(x: Any) -> Any:
            return b(a(x))

        return lambda x: graph.backward(model(x).mean())

    step = same_as_one_device(make, normal(ROWS, WIDTH), mesh)
    grads = step(normal(ROWS, WIDTH))
    assert [grads[name].sharding.spec[1] for name in ("wide", "split")] == ["tp", "pp"]


@pytest.mark.full
def test_layers_may_come_before_the_pipeline_and_after_it():
    def make(pipe: Pipe) -> Any:
        first, last = dense("first"), dense("last")
        model = pipe(stages=[first, last])(lambda x: last(first(x)))
        embedding, head = dense("embedding"), dense("head", WORDS)

        def step(batch: Any) -> Any:
            out = head(model(embedding(batch["x"])))
            loss = op.cross_entropy(out, batch["labels"])
            grads = graph.backward(loss)
            return grads, loss, (out * out).mean()

        return step

    batch = {"x": normal(ROWS, 5), "labels": words(ROWS)}
    mesh = Mesh(["pp", "dp"], devices=range(4), shape=(2, 2))
    same_as_one_device(make, batch, mesh)


@pytest.mark.full
def test_a_stage_may_call_jitted_functions_and_constrain_layouts():
    mesh = Mesh(["pp", "dp", "tp"], devices=range(8), shape=(2, 2, 2))

    def make(pipe: Pipe) -> Any:
        first, last = dense("first"), dense("last")
        spec = dist.ShardSpec((0, 1), ("dp", "tp"))

        @ts.function(out_specs=None if pipe is unpiped else spec)
        def constrained(x: Any) -> Any:
            return jnp.sin(x)

        @graph.stage("middle")
        def middle(x: Any) -> Any:
            return jax.lax.scan(lambda x, _: (constrained(x), None), x, length=2)[0]

        @pipe(stages=[first, last])
        def model(x: Any) -> Any:
            return last(constrained(middle(jax.jit(first)(x))))

        return lambda x: graph.backward(model(x).mean())

    same_as_one_device(make, normal(ROWS, WIDTH), mesh)


@pytest.mark.full
def test_a_stage_may_look_up_scatter_and_run_kernels():
    """Over dims that are split: XLA ends the process where it partitions those."""
    mesh = Mesh(["pp", "dp", "tp"], devices=range(8), shape=(2, 2, 2))

    def make(pipe: Pipe) -> Any:
        on = ONE if pipe is unpiped else mesh

        def tensor(name: str, dim: int, *shape: int) -> Any:
            spec = dist.ShardSpec((dim,), ("tp",))
            return dist.tensor(shape, spec, on, init="normal", name=name)

        table, head = tensor("table", 0, WORDS, WIDTH), tensor("head", 1, WIDTH, WORDS)
        square = tensor("square", 0, WIDTH, WIDTH)
        layouts = {
            "x": dist.ShardSpec((0, 2), ("dp", "tp")),
            "w": dist.ShardSpec((0,), ("tp",)),
        }

        @op.kernel(layouts=layouts)
        def product(x: Any, w: Any) -> Any:
            return dist.all_reduce(x @ w, axis="tp")

        @graph.stage("first")
        def first(tokens: Any) -> Any:
            x = jnp.tanh(table[tokens])
            rows = jnp.arange(len(x), dtype=jnp.int32)[:, None]
            sums = jnp.zeros((len(x), WORDS), x.dtype).at[rows, tokens].add(x[..., 0])
            found = jnp.take_along_axis(sums, tokens, 1)
            return x.at[:, 0, 1].add(1.0) + found[..., None]

        @graph.stage("last")
        def last(x: Any) -> Any:
            return jnp.sin(product(x, square)) @ head

        @pipe(stages=[first, last])
        def model(tokens: Any) -> Any:
            return last(first(tokens))

        def step(batch: Any) -> Any:
            out = model(batch["tokens"])
            losses = optax.softmax_cross_entropy_with_integer_labels(
                out, batch["labels"]
            )
            return graph.backward(losses.mean()), losses.mean()

        return step

    batch = {"tokens": words(ROWS, LENGTH), "labels": words(ROWS, LENGTH, seed=1)}
    same_as_one_device(make, batch, mesh, schedule="zero_bubble")
