# SPDX-License-Identifier: Apache-2.0
"""Losses of a pipeline, which are sums over rows, and metrics, which need not be."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tessera as ts
from tessera import errors, graph, op
from tessera.tracing import scope
from tests.graph.pipelines import (
    BATCH,
    KEY,
    ONE,
    ROWS,
    TWO,
    WIDTH,
    WORDS,
    Pipe,
    built,
    cases,
    chain,
    close,
    dense,
    pipes,
    same_as_one_device,
    unpiped,
    weight,
)

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


@pytest.mark.full
@pytest.mark.parametrize("name", cases(LOSSES, "mean", "with_regulariser"))
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
    assert "test_pipeline_losses.py:" in text
    assert "use schedule='gpipe'" in text


@pytest.mark.full
@pytest.mark.parametrize(
    "name", cases(["variance", "contrastive", "log_of_mean"], "log_of_mean")
)
def test_under_gpipe_a_loss_may_mix_rows(name):
    same_as_one_device(with_loss(MIXED[name][0]), BATCH, schedule="gpipe")


@pytest.mark.full
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


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_with_64_bits_a_loss_is_as_exact_as_its_dtype(dtype):
    tolerance = {"float64": 1e-14, "float32": 1e-6}[dtype]
    with jax.enable_x64(True):
        x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(dtype)

        def step(pipe: Pipe, x: Any) -> Any:
            loss = jnp.square(chain(pipe, jnp.sin)(x)).mean()
            return loss, ts.grad(loss, x)

        got = ts.function(partial(step, pipes()), mesh=TWO)(x)
        want = ts.function(partial(step, unpiped))(x)
    assert {array.dtype for array in (*got, *want)} == {np.dtype(dtype)}
    close(got, want, tolerance)
