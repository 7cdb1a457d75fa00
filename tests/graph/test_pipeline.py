# SPDX-License-Identifier: Apache-2.0
"""``graph.pipeline``: the numbers of the same function on one device, and its mistakes.

A step is written once, over a function ``pipe`` that makes a pipeline of stages, or
leaves them alone: what runs on one device knows nothing of microbatches.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tessera as ts
from tessera import _jax, dist, errors, graph, op, scope
from tessera.graph.pipelining import Op, custom
from tessera.mesh import Mesh

pytestmark = pytest.mark.usefixtures("quick_compile")

ONE = Mesh(["dp", "tp"], devices=[0], shape=(1, 1))
TWO = Mesh(["pp"], devices=range(2))
KEY = jax.random.key(1)
ROWS, LENGTH, WIDTH, WORDS = 16, 3, 8, 12

Pipe = Callable[..., Any]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def words(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, WORDS, shape, np.int32)


def weight(name: str, *shape: int) -> Any:
    """A parameter of the stage that is being traced."""
    return scope.parameter(name, shape, init="normal")


def dense(name: str, size: int = WIDTH) -> Any:
    """A stage with a bias, so that no gradient is zero."""

    @graph.stage(name)
    def stage(x: Any) -> Any:
        x = x @ weight("kernel", x.shape[-1], size) + weight("bias", size)
        return x + jnp.tanh(x)

    return stage


def unpiped(stages: Any) -> Any:
    del stages
    return lambda body: body


def built(make: Callable[[Pipe], Any], mesh: Mesh, **options: Any) -> Any:
    """A step on a mesh; ``make`` gives its body from a way to make pipelines."""
    pipe = unpiped if mesh is ONE else partial(graph.pipeline, mesh=mesh, **options)
    return graph.training_step(module="step", mesh=mesh)(make(pipe))


def close(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    there = jax.tree_util.tree_leaves_with_path(want)
    for (path, x), y in zip(there, jax.tree.leaves(got), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert np.linalg.norm(x) > 0, path
        apart = np.linalg.norm(y - x) / np.linalg.norm(x)
        assert apart <= tolerance, (jax.tree_util.keystr(path), apart)


def same_as_one_device(
    make: Callable[[Pipe], Any], batch: Any, mesh: Mesh = TWO, **options: Any
) -> Any:
    """Check a step's results beside those of one device; return the step."""
    plain, piped = built(make, ONE), built(make, mesh, **{"microbatches": 4} | options)
    results = []
    for step, on in ((plain, ONE), (piped, mesh)):
        with on:  # as kernels want it
            step.init(KEY, batch)
            results.append(step(batch))
    close(results[1], results[0])
    return piped


# --- schedules and meshes


def transformer(pipe: Pipe, *, stages: int = 2) -> Any:
    """Masked cross-entropy of transformer stages, and a metric of their output."""

    def block(name: str) -> Any:
        return graph.stage(name)(lambda x: op.transformer_block(x, num_heads=2))

    chain = [block(f"block_{i}") for i in range(stages)]

    @pipe(stages=chain)
    def model(x: Any) -> Any:
        for stage in chain:
            x = stage(x)
        return x

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


SCHEDULES = ["gpipe", "1f1b", "zero_bubble", "zero_bubble_fused"]


@pytest.mark.parametrize("schedule", [*SCHEDULES, own_table()], ids=name_of)
def test_a_pipeline_computes_what_one_device_does(schedule):
    step = same_as_one_device(transformer, sentences(), schedule=schedule)
    assert step.num_programs() == 1


def test_a_device_may_have_several_stages():
    same_as_one_device(
        partial(transformer, stages=4), sentences(), schedule="interleaved"
    )


@pytest.mark.parametrize(
    ("axes", "schedule"),
    [(("pp", "dp", "tp"), "1f1b"), (("fsdp", "pp", "tp"), "zero_bubble")],
)
def test_the_other_axes_of_the_mesh_work_inside_the_stages(axes, schedule):
    mesh = Mesh(axes, devices=range(8), shape=(2, 2, 2))
    step = same_as_one_device(transformer, sentences(), mesh, schedule=schedule)
    assert step.last is not None
    axes_used = {axis for row in step.last.collectives.rows for axis in row.axes}
    assert axes_used == set(axes)


def test_gradients_are_summed_over_dp_once_in_a_step():
    mesh = Mesh(["pp", "dp"], devices=range(4), shape=(2, 2))
    step = built(transformer, mesh, microbatches=4)
    rows = step.compile(sentences()).collectives.rows
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
    np.testing.assert_allclose(model(x), want, atol=1e-6)


def products(program: Any) -> int:
    """How many matrix products a program has, in all branches."""
    count = 0
    for equation in _jax.equations(program):
        count += equation.primitive.name == "dot_general"
        count += sum(map(products, _jax.inner_programs(equation)))
    return count


def products_by_kind(program: Any) -> list[int]:
    """Those of forwards, backwards and weight gradients in the body of the loop."""
    for equation in _jax.equations(program):
        for inner in _jax.inner_programs(equation):
            if equation.primitive.name == "scan":
                bodies = _jax.equations(inner)
                return [
                    sum(map(products, _jax.inner_programs(e)))
                    for e in bodies
                    if e.primitive.name == "cond"
                ]
            if found := products_by_kind(inner):
                return found
    return []


@pytest.mark.parametrize(
    ("schedule", "expected"),
    # Of two stages: each runs forward, and forward anew in its backward; the second has
    # a gradient of its input; both have one of their weights. As nothing waits for the
    # first one's backward, all of that is put off.
    [("1f1b", [2, 2 + 1 + 2]), ("zero_bubble", [2, 1 + 1, 1 + 2])],
)
def test_zero_bubble_computes_gradients_of_weights_by_themselves(schedule, expected):
    def make(pipe: Pipe) -> Any:
        first, last = dense("first"), dense("last", 6)
        model = pipe(stages=[first, last])(lambda x: last(first(x)))
        return lambda x: graph.backward(model(x).mean())

    step = built(make, TWO, schedule=schedule, microbatches=4)
    (after,) = (
        record.graph.program
        for record in step.trace(normal(ROWS, 5)).passes
        if record.name == "schedule_pipelines"
    )
    assert products_by_kind(after) == expected


# --- stages that differ


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

        @pipe(stages=[embedding, head])
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

    @pipe(stages=[encoder, decoder])
    def model(x: Any, targets: Any, rows: Any, scale: Any) -> Any:
        mixed, out = decoder(encoder(x), targets, scale)
        shift = rows[:, None].astype(jnp.float32)
        return mixed + x[:, None, :, 0], out + shift  # the input skips the stages

    def step(batch: Any) -> Any:
        mixed, out = model(batch["x"], batch["y"], batch["rows"], scale * 2.0)
        loss = jnp.square(mixed).mean() + jnp.sum(out * batch["weights"])
        return graph.backward(loss), loss

    return step


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_fused"])
def test_stages_may_have_other_shapes_and_hand_on_several_arrays(schedule):
    batch = {
        "x": normal(ROWS, LENGTH, 5),
        "y": normal(ROWS, 4, 7, seed=1),
        "rows": np.arange(ROWS, dtype=np.int32),
        "weights": normal(ROWS, 2, seed=2),
    }
    step = same_as_one_device(encoder_and_decoder, batch, schedule=schedule)
    assert "scale" in step.params, "an argument without rows has a gradient, too"


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
    assert "test_pipeline.py:" in text


# --- losses

Loss = Callable[[Any, Any], Any]


def with_loss(loss: Loss) -> Callable[[Pipe], Any]:
    def make(pipe: Pipe) -> Any:
        first, last = dense("first"), dense("last", WORDS)
        model = pipe(stages=[first, last])(lambda x: last(first(x)))

        def step(batch: Any) -> Any:
            found = loss(model(batch["x"]), batch)
            return graph.backward(found), found

        return step

    return make


BATCH = {
    "x": normal(ROWS, LENGTH, 5),
    "labels": words(ROWS, LENGTH),
    "weights": np.abs(normal(ROWS, LENGTH, seed=4)),
}


def optax_loss(out: Any, batch: Any) -> Any:
    losses = optax.softmax_cross_entropy_with_integer_labels(out, batch["labels"])
    return (losses * batch["weights"]).sum() / batch["weights"].sum()


def share_of_rows(out: Any, batch: Any) -> Any:
    """Each row counts as the softmax over all rows says."""
    shares = jax.nn.softmax(batch["weights"].sum(1))
    return (jnp.square(out).sum((1, 2)) * shares).sum() / len(shares)


def with_regulariser(out: Any, batch: Any) -> Any:
    penalty = scope.parameter("penalty", (3,), init="ones")
    factor = jnp.exp(scope.parameter("factor", (), init="ones"))
    return factor * jnp.abs(out).mean() + 0.1 * jnp.square(penalty).sum()


def of_two_parts(out: Any, batch: Any) -> Any:
    """A vector of sums, of which the loss is a part, and a part in half precision."""
    sums = jnp.einsum("btd,bt->d", out, batch["weights"])
    narrow = out.astype(jnp.bfloat16).mean().astype(jnp.float32)
    return sums[2:5].sum() - 3.0 * jnp.where(len(out) > 1, sums[0], 0.0) + narrow


LOSSES = {
    "mean": lambda out, _: jnp.square(out).mean(),
    "sum_over_rows_of_means": lambda out, _: jax.nn.logsumexp(out, 2).mean(1).sum(),
    "by_the_batch_size": lambda out, _: (jax.nn.softmax(out) ** 3 / len(out)).sum(),
    "masked": lambda out, batch: op.cross_entropy(
        out, jnp.where(batch["weights"] > 0.5, batch["labels"], -100)
    ),
    "optax": optax_loss,
    "share_of_rows": share_of_rows,
    "with_regulariser": with_regulariser,
    "of_two_parts": of_two_parts,
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_may_be_any_sum_over_rows(name):
    tolerance = 2e-3 if name == "of_two_parts" else 2e-5
    plain, piped = (built(with_loss(LOSSES[name]), mesh) for mesh in (ONE, TWO))
    for step in (plain, piped):
        step.init(KEY, BATCH)
    close(piped(BATCH), plain(BATCH), tolerance)


MIXED = {
    "max": (lambda out, _: out.max(), "reduce_max mixes rows of the batch"),
    "variance": (
        lambda out, _: jnp.square(out - out.mean()).sum(),
        "sub of a sum over the batch is not linear in it",
    ),
    "contrastive": (
        lambda out, _: jax.nn.logsumexp(out[:, 0] @ out[:, 0].T),
        "dot_general mixes rows of the batch",
    ),
    "softmax_over_rows": (
        lambda out, _: jax.nn.log_softmax(out, axis=0)[..., 0].sum(),
        "reduce_max mixes rows of the batch",
    ),
    "cumsum": (
        lambda out, _: jnp.square(jnp.cumsum(out, 0)).sum(),
        "cumsum mixes rows of the batch",
    ),
    "log_of_mean": (
        lambda out, _: jnp.log(jnp.square(out).mean()),
        "log of a sum over the batch is not linear in it",
    ),
    "product_of_sums": (
        lambda out, _: out.sum() * jnp.abs(out).sum(),
        "mul of a sum over the batch is not linear in it",
    ),
    "first_row": (lambda out, _: out[0].sum(), "slice mixes rows of the batch"),
    "reversed": (
        lambda out, batch: (out[::-1, :, 0] * batch["weights"]).sum(),
        "rev mixes rows of the batch",
    ),
    "rolled": (
        lambda out, batch: (jnp.roll(out, 1, 0)[..., 0] * batch["weights"]).sum(),
        "slice mixes rows of the batch",
    ),
    "of_one_row_each": (
        lambda out, _: out.at[0].set(0.0).sum(),
        "scatter mixes rows of the batch",
    ),
    "no_loss_of_rows": (
        lambda out, _: jax.lax.stop_gradient(out.mean()) * weight("scale", 1).sum(),
        "stop_gradient of a sum over the batch is not linear in it",
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_a_loss_that_mixes_rows_is_refused_with_its_line(name):
    loss, why = MIXED[name]
    step = built(with_loss(loss), TWO, schedule="1f1b", microbatches=4)
    with pytest.raises(errors.PipelineFormError) as caught:
        step.trace(BATCH).passes  # noqa: B018 - raises
    text = str(caught.value)
    assert text.startswith(
        "[T312] the loss of a pipeline cannot be computed microbatch by microbatch\n"
        f"  got: {why}\n"
    )
    assert "test_pipeline.py:" in text
    assert "use schedule='gpipe'" in text


@pytest.mark.parametrize("name", ["variance", "contrastive", "log_of_mean"])
def test_under_gpipe_a_loss_may_mix_rows(name):
    same_as_one_device(with_loss(MIXED[name][0]), BATCH, schedule="gpipe")


def test_metrics_may_mix_rows():
    def make(pipe: Pipe) -> Any:
        first, last = dense("first"), dense("last")
        model = pipe(stages=[first, last])(lambda x: last(first(x)))

        def step(batch: Any) -> Any:
            out = model(batch["x"])
            largest, spread = out.max(), out.var()
            loss = out.mean()
            doubled = 2.0 * loss
            return graph.backward(loss), largest, spread, doubled + largest

        return step

    same_as_one_device(make, BATCH)


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
        return graph_after.as_text().count("reduce_precision")

    neither = narrowed(stages=False, loss=False)
    stages, loss = narrowed(stages=True, loss=False), narrowed(stages=False, loss=True)
    assert neither == 0
    assert stages > 0
    assert loss > 0
    assert narrowed(stages=True, loss=True) == stages + loss
    same_as_one_device(partial(make, stages=True, loss=False), BATCH)


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
    step = built(transformer, TWO, microbatches=4)
    step.init(KEY, sentences())
    grads, _ = step(sentences())
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
        step = built(transformer, TWO, microbatches=count)
        batch = {
            name: np.repeat(array, 8, axis=0) for name, array in sentences().items()
        }
        return len(step.lower(batch).as_text().splitlines())

    assert lines(8) == lines(64)


# --- the plan


def test_trace_shows_the_pass_and_the_schedule():
    step = built(transformer, TWO, microbatches=4)
    text = graph.trace(step, sentences()).as_text()
    assert "1f1b: 2 stages, 4 microbatches" in text
    assert "--- schedule_pipelines" in text
    assert "collective-permute" in text


# --- wrong use


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
        "  docs: docs/errors/T312.md"
    )


def test_there_is_a_stage_for_each_device():
    text = refused(errors.PipelineSizeError, lambda: model_of(*"abc", called="abc"))
    assert text == (
        "[T311] the stages of a pipeline do not fit the devices of axis 'pp'\n"
        "  got: 3 stages, 2 devices\n"
        "  fix: use 2 stages, or a multiple of 2 with schedule='interleaved', or "
        "another mesh\n"
        "  docs: docs/errors/T311.md"
    )
    with pytest.raises(errors.PipelineSizeError):
        model_of(*"abc", called="abc", schedule="interleaved")


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
    assert "stage 'first' hands on an array that is not floating point" in text
    assert "int32[8, 3]" in text


@pytest.mark.parametrize(
    ("result", "got"),
    [
        (lambda x: x.sum(), "float32[] for a microbatch of 8 rows"),
        (lambda x: x > 0, "bool[8, 3, 5] for a microbatch of 8 rows"),
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
    assert "a pipeline has no batch to cut into microbatches" in text


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
    assert "test_pipeline.py:" in text


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
        "[T312] a step with a pipeline cannot be traced for one microbatch\n"
        "  got: 12 of 48 rows of each argument that has 48: 192 rows in 48\n"
        "  fix: give the pipeline the rows of the step's arguments, as many and in the "
        "same order\n"
        "  docs: docs/errors/T312.md"
    )


def test_jax_grad_does_not_look_inside():
    model = model_of("a", "b", called="ab")

    @graph.training_step(mesh=TWO)
    def step(x):
        return jax.grad(lambda x: model(x).sum())(x)

    text = refused(errors.OutsideTraceError, lambda: step.trace(BATCH["x"]))
    assert "jax.grad cannot look inside a pipeline" in text
