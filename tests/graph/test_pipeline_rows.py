# SPDX-License-Identifier: Apache-2.0
"""Stages that mix the rows of a microbatch, and losses that depend on their number."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tessera as ts
from tessera import graph
from tessera.errors import PipelineFormError, RandomNumbersError
from tests.graph.pipelines import KEY, TWO, Pipe, chain, close, normal, pipes, same

ROWS, WIDTH = 8, 8
X, Y = normal(ROWS, WIDTH), normal(ROWS, WIDTH, seed=1)
SQUARE, BIAS = normal(WIDTH, WIDTH, seed=2), normal(WIDTH, seed=5)
NUMBERS = np.random.default_rng(6).integers(0, ROWS, ROWS, np.int32)

MIXING: dict[str, tuple[Callable[..., Any], str]] = {
    "batch_norm": (lambda x: x - x.mean(0), "reduce_sum mixes the rows"),
    "time_first": (
        lambda x: jax.lax.scan(lambda c, r: (c + r, c + r), jnp.zeros(WIDTH), x)[1],
        "scan depends on the number of rows",
    ),
    "numbered": (
        lambda x: x * jnp.arange(x.shape[0], dtype=x.dtype)[:, None],
        "iota numbers the rows",
    ),
    "numbered_by_numpy": (
        lambda x: x * np.arange(x.shape[0], dtype=np.float32)[:, None],
        "an array that it makes depends on the number of rows",
    ),
    "divided": (lambda x: x / x.shape[0], "div depends on the number of rows"),
    "power": (lambda x: x ** x.shape[0], "integer_pow depends on the number of rows"),
    "branch": (
        lambda x: jnp.sin(x) if x.shape[0] > 4 else jnp.cos(x),
        "it does other things for another number of rows",
    ),
    "reversed": (lambda x: x[::-1], "rev mixes the rows"),
    "scaled_by_their_number": (
        lambda x: x * (jnp.asarray(BIAS) * (1.0 / x.shape[0])),
        "mul depends on the number of rows",
    ),
}


@pytest.mark.parametrize("name", MIXING)
def test_a_stage_that_does_not_keep_rows_apart_says_so(name):
    first, why = MIXING[name]
    start = "a stage of pipeline '<lambda>' sees one microbatch at a time, and its rows"
    with pytest.warns(ts.TesseraWarning) as caught:
        chain(pipes(), first).trace(X)
    assert str(caught[0].message).startswith(f"{start} are not independent: {why}")


ALONE: dict[str, Callable[..., Any]] = {
    "own_entry": lambda x: x[jnp.arange(len(x)), jnp.argmax(x, 1)][:, None] + x,
    "own_row_set": lambda x: x.at[jnp.arange(len(x)), 0].set(1.0),
    "sorted": lambda x: jnp.sort(x, 1),
    "flattened": lambda x: jax.nn.relu(x.reshape(-1, 2)).reshape(x.shape),
    "normalized": lambda x: (x - x.mean(1, keepdims=True)) / x.shape[1],
}


@pytest.mark.parametrize("name", ALONE)
def test_a_stage_that_keeps_rows_apart_says_nothing(name):
    want = 2.0 * ALONE[name](jnp.asarray(X))
    close(chain(pipes(), ALONE[name])(X), want)


# --- the number of rows


def test_a_power_of_the_number_of_rows_in_the_loss_is_refused():
    """The number stands in the equation, and is that of one microbatch there."""

    def make(pipe: Pipe) -> Any:
        model = chain(pipe, lambda x, w: x @ w, batch="x")

        def step(w: Any, x: Any) -> Any:
            out = model(x, w)
            loss = (out ** out.shape[0]).sum()
            return ts.grad(loss, w)

        return step

    step = ts.function(make(pipes()), mesh=TWO)
    with pytest.raises(PipelineFormError, match="integer_pow depends on the size of"):
        step.trace(SQUARE, X).passes  # noqa: B018 - raises


@pytest.mark.full
def test_microbatches_of_one_row_take_what_stands_along_an_axis():
    """JAX looks up otherwise where there is one row."""

    def make(pipe: Pipe) -> Any:
        model = chain(pipe, lambda x, w: x @ w, batch="x")

        def step(w: Any, x: Any, labels: Any) -> Any:
            scores = jax.nn.log_softmax(model(x, w))
            loss = -jnp.take_along_axis(scores, labels[:, None], 1).mean()
            return loss, ts.grad(loss, w)

        return step

    same(make, SQUARE, X, NUMBERS, microbatches=ROWS)
    same(make, SQUARE, X[:2], NUMBERS[:2], microbatches=2)
    same(make, SQUARE, X[:5], NUMBERS[:5], microbatches=5)


@pytest.mark.full
def test_pipelines_of_a_step_may_have_other_numbers_of_microbatches():
    def make(pipe: Pipe, counts: tuple[int, int]) -> Any:
        models = [
            chain(
                partial(pipe, **{"microbatches": count} if pipe is piped else {}),
                f,
                batch="x",
            )
            for count, f in zip(
                counts, (lambda x, w: x @ w, lambda x, b: x * b), strict=True
            )
        ]

        def step(w: Any, b: Any, x: Any, y: Any) -> Any:
            first = jnp.square(models[0](x, w) - y).mean()
            second = jnp.sin(models[1](y, b)).sum()
            return first, second, ts.grad(first, w), ts.grad(second, b)

        return step

    piped = partial(graph.pipeline, mesh=TWO)
    whole = make(lambda **_: lambda body: body, (0, 0))
    want = ts.function(whole)(SQUARE, BIAS, X, Y)
    for counts in ((2, 4), (4, 2)):
        step = ts.function(make(piped, counts), mesh=TWO)
        close(step(SQUARE, BIAS, X, Y), want)
    step = ts.function(make(piped, (2, 3)), mesh=TWO)
    with pytest.raises(PipelineFormError, match="have microbatches of unlike sizes"):
        step.trace(SQUARE, BIAS, X.repeat(3, 0), Y.repeat(3, 0)).passes  # noqa: B018


# --- random numbers in stages

SHAPED = {
    "normal": lambda x: x + jax.random.normal(KEY, x.shape),
    "dropout": lambda x: jnp.where(jax.random.bernoulli(KEY, 0.5, x.shape), x, 0),
    "noise_of_each_row": lambda x: x * jax.random.normal(KEY, (x.shape[-1],)),
}


@pytest.mark.parametrize("name", SHAPED)
def test_microbatches_do_not_draw_the_same_numbers(name):
    with pytest.raises(RandomNumbersError, match="every microbatch draws the same"):
        chain(pipes(), SHAPED[name]).trace(X)


def test_a_key_of_each_row_gives_the_numbers_of_one_device():
    def of_each_row(x, keys):
        return x + jax.vmap(lambda key: jax.random.normal(key, (WIDTH,)))(keys)

    def make(pipe):
        return chain(pipe, of_each_row, batch=["x", "keys"])

    same(make, X, jax.random.split(KEY, ROWS))
