# SPDX-License-Identifier: Apache-2.0
"""Which arguments of a pipeline are its batch: ``batch=`` says it, or there is one.

Each step is compared with the same function on one device, or asks for ``batch=``.
"""

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tessera as ts
from tessera import dist, graph
from tessera.errors import (
    BatchSizeError,
    PipelineFormError,
    SpecFormError,
    UndecidedRoleError,
)
from tests.graph.pipelines import (
    TWO,
    Pipe,
    cases,
    chain,
    close,
    double,
    normal,
    pipes,
    same,
    unpiped,
)

ROWS, WIDTH = 8, 8  # as many as each other, and as many layers, entries, positions
X, Y = normal(ROWS, WIDTH), normal(ROWS, WIDTH, seed=1)
SQUARE, STACK = normal(WIDTH, WIDTH, seed=2), normal(ROWS, WIDTH, WIDTH, seed=3)
TABLE, BIAS = normal(ROWS, WIDTH, seed=4), normal(WIDTH, seed=5)
NUMBERS = np.random.default_rng(6).integers(0, ROWS, ROWS, np.int32)


def trained(
    pipe: Pipe, model: Callable[..., Any], weights: Any, *data: Any
) -> tuple[Any, Any]:
    """A loss that is no mean, and its gradient."""
    loss = jnp.sum(jnp.sin(model(*data, weights)))
    return loss, ts.grad(loss, weights)


# --- weights, as many as the batch has rows

WEIGHTS: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    "layers": (
        lambda x, w: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0],
        X,
        STACK,
    ),
    "table": (lambda numbers, w: w[numbers], NUMBERS, TABLE),
    "matrix": (lambda x, w: x @ w, X, SQUARE),
    "vector": (lambda x, w: x * w, X, BIAS),
    "positions": (lambda x, w: x[:, :, None] + w, X, SQUARE),
    "head": (lambda x, w: x @ w.T, X, TABLE),
}


@pytest.mark.parametrize("microbatches", cases([4, ROWS], 4))
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_as_long_as_the_batch_are_never_cut(name, microbatches):
    first, data, weights = WEIGHTS[name]

    def make(pipe: Pipe) -> Any:
        model = chain(pipe, first, batch=next(iter(signature(first).parameters)))
        return lambda w, x: trained(pipe, model, w, x)

    same(make, weights, data, microbatches=microbatches)


def test_weights_come_first_where_they_are_passed_first():
    def make(pipe: Pipe) -> Any:
        model = chain(pipe, lambda w, x: x @ w, batch="x")

        def step(w: Any, x: Any) -> Any:
            loss = jnp.square(model(w, x)).mean()
            return loss, ts.grad(loss, w)

        return step

    same(make, SQUARE, X)


def test_what_is_made_of_weights_is_a_weight():
    """Cast, transposed, scaled by a captured array: whole all the same."""
    scale = jnp.asarray(normal(WIDTH, seed=7))

    def make(pipe: Pipe) -> Any:
        model = chain(pipe, lambda x, w: x @ w, batch="x")

        def step(w: Any, x: Any) -> Any:
            loss = jnp.square(model(x, w.T * scale)).sum()
            return loss, ts.grad(loss, w)

        return step

    same(make, SQUARE, X)


def test_weights_and_data_may_be_in_one_dict():
    def make(pipe: Pipe) -> Any:
        first = lambda given: given["x"] @ given["deep"]["w"]  # noqa: E731
        model = chain(pipe, first, batch="given/x")

        def step(given: Any) -> Any:
            loss = jnp.square(model(given)).mean()
            return loss, ts.grad(loss, given["deep"])

        return step

    same(make, {"x": X, "deep": {"w": SQUARE}})


def test_declared_parameters_and_captured_tensors_are_weights():
    def make(pipe: Pipe) -> Any:
        table = dist.tensor((ROWS, WIDTH), init="ones", name="table")
        model = chain(pipe, lambda numbers, table: table[numbers], batch="numbers")

        def step(numbers: Any, y: Any) -> Any:
            loss = jnp.square(model(numbers, table * 3.0) * y).mean()
            return loss, graph.backward(loss)

        return step

    same(make, NUMBERS, Y)


def test_moments_that_are_like_weights_are_no_rows():
    """An optimizer's state beside a batch of as many rows, in the same step."""

    def make(pipe: Pipe) -> Any:
        model = chain(pipe, lambda x, w: x @ w, batch="x")

        def step(w: Any, m: Any, x: Any, y: Any) -> Any:
            loss = jnp.square(model(x, w) - y).mean()
            m = 0.9 * m + ts.grad(loss, w)
            return loss, w - 0.1 * m, m

        return step

    same(make, SQUARE, normal(WIDTH, WIDTH, seed=9), X, Y)


def test_value_and_grad_is_taken_of_a_pipeline():
    def make(pipe: Pipe) -> Any:
        model = chain(pipe, lambda x, w: x @ w, batch="x")
        loss_of = lambda w, x: jnp.square(model(x, w)).mean()  # noqa: E731
        return lambda w, x: ts.value_and_grad(loss_of)(w, x)

    same(make, SQUARE, X)


# --- data

MASK = (np.arange(ROWS) % 3 > 0).astype(np.float32)


@pytest.mark.parametrize("microbatches", cases([4, ROWS], ROWS))
def test_several_arguments_are_data_where_each_row_meets_its_own(microbatches):
    def make(pipe: Pipe) -> Any:
        first = lambda x, mask, w: (x * mask[:, None]) @ w  # noqa: E731
        model = chain(pipe, first, batch=["x", "mask"])
        return lambda w, x, mask: trained(pipe, model, w, x, mask)

    same(make, SQUARE, X, MASK, microbatches=microbatches)


def test_what_the_step_makes_of_the_number_of_rows_has_rows():
    """A mask for each example by its number, made in the step."""

    def make(pipe: Pipe) -> Any:
        first = lambda x, mask, w: (x * mask[:, None]) @ w  # noqa: E731
        model = chain(pipe, first, batch=["x", "mask"])

        def step(w: Any, x: Any) -> Any:
            numbers = jnp.arange(x.shape[0])
            loss = model(x, jnp.where(numbers < 5, 1.0, 0.5), w).sum()
            return loss, ts.grad(loss, w)

        return step

    same(make, SQUARE, X)


def test_an_array_of_ones_own_is_whole():
    """A constant of as many entries as there are rows comes from no batch."""
    table = jnp.asarray(TABLE)

    def make(pipe: Pipe) -> Any:
        model = chain(pipe, lambda n, table, w: table[n] @ w, batch="n")

        def step(w: Any, n: Any) -> Any:
            loss = model(n, table, w).sum()
            return loss, ts.grad(loss, w)

        return step

    same(make, SQUARE, NUMBERS)


def test_data_that_is_embedded_before_the_pipeline_has_rows():
    def make(pipe: Pipe) -> Any:
        model = chain(pipe, lambda x, w: x @ w, batch="x")

        def step(w: Any, numbers: Any, y: Any) -> Any:
            loss = jnp.square(model(w["table"][numbers], w["out"]) - y).mean()
            return loss, ts.grad(loss, w)

        return step

    same(make, {"table": TABLE, "out": SQUARE}, NUMBERS, Y)


def test_targets_may_be_used_outside_of_the_pipeline_only():
    """And a matrix as wide as the batch is long, which is no target."""

    def make(pipe: Pipe) -> Any:
        model = chain(pipe, lambda x, w: x @ w, batch="x")

        def step(w: Any, x: Any, y: Any, weight: Any) -> Any:
            each = jnp.abs(model(x, w["in"]) @ w["out"] - y).mean(1)
            loss = (each * weight).sum() / weight.sum()
            return loss, ts.grad(loss, w)

        return step

    weights = {"in": SQUARE, "out": normal(WIDTH, WIDTH, seed=8)}
    same(make, weights, X, Y, np.abs(BIAS))


def test_a_gradient_may_be_taken_by_data():
    def make(pipe: Pipe) -> Any:
        model = chain(pipe, lambda x, y: jnp.tanh(x) * y, batch=["x", "y"])

        def step(x: Any, y: Any) -> Any:
            loss = jnp.sum(model(x, y))
            return loss, ts.grad(loss, x)

        return step

    same(make, X, Y)
    sole = chain(pipes(), jnp.tanh)
    step = lambda model: lambda x: ts.grad(jnp.sum(model(x)), x)  # noqa: E731
    close(
        ts.function(step(sole), mesh=TWO)(X),
        ts.function(step(lambda x: 2.0 * jnp.tanh(x)))(X),
    )


# --- what nobody decides

UNDECIDED: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    **WEIGHTS,
    "mask_of_positions": (
        lambda x, m: jax.nn.softmax(x[:, None] + m).sum(1),
        X,
        SQUARE,
    ),
    "memory": (lambda x, m: jax.nn.softmax(x @ m.T) @ m, X, TABLE),
    "twice": (lambda x, again: x @ again.T, X, X),
}


@pytest.mark.parametrize("microbatches", cases([4, ROWS], 4))
@pytest.mark.parametrize("kind", cases(["function", "training_step"], "function"))
@pytest.mark.parametrize(
    "name", cases(UNDECIDED, "layers", "table", "mask_of_positions", "twice")
)
def test_several_arguments_are_never_cut_in_silence(name, kind, microbatches):
    """They are arguments like data: nobody says which is which."""
    first, data, frozen = UNDECIDED[name]
    model = chain(pipes(microbatches), first)
    step = (
        ts.function(model, mesh=TWO)
        if kind == "function"
        else graph.training_step(lambda x, w: model(x, w), mesh=TWO)
    )
    names = [*signature(first).parameters]
    with pytest.raises(UndecidedRoleError, match=f"  got: {', '.join(names)}\n"):
        step.trace(data, frozen)
    named = chain(pipes(microbatches, batch=names[0]), first)
    want = 2.0 * first(*map(jnp.asarray, (data, frozen)))
    close(ts.function(named, mesh=TWO)(data, frozen), want)


def test_the_error_names_the_arguments_and_the_cure():
    @graph.stage("look_up")
    def look_up(numbers, table):
        return table[numbers]

    @graph.pipeline(stages=[look_up, double], mesh=TWO, microbatches=4)
    def model(numbers, tables):
        return double(look_up(numbers, tables["own"]))

    with pytest.raises(UndecidedRoleError) as caught:
        model.trace(NUMBERS, {"own": TABLE})
    assert str(caught.value) == (
        "[T324] it is not decided which arguments of pipeline 'model' have a row for "
        "each example\n"
        "  got: numbers, tables/own\n"
        "  fix: name those that have: batch=[...] of graph.pipeline or ts.distribute\n"
        "  fix: all others are replicated to every stage that reads them\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T324.html"
    )


def test_rows_that_are_not_said_to_be_some_are_refused():
    model = chain(pipes(batch="x"), lambda x, mask: x * mask[:, None])
    with pytest.raises(UndecidedRoleError, match=r"got: x: 2 of 8 rows: mul got incom"):
        model.trace(X, MASK)


def test_a_constant_for_each_row_is_no_row_of_the_step():
    model = chain(pipes(batch=["x", "mask"]), lambda x, mask: x * mask[:, None])
    step = ts.function(lambda x: model(x, jnp.arange(8.0)), mesh=TWO)
    with pytest.raises(PipelineFormError, match="got: 2 of 8 rows in each argument"):
        step.trace(X)


def test_named_rows_are_as_many_as_each_other():
    model = chain(pipes(batch=["x", "y"]), lambda x, y: x)
    with pytest.raises(BatchSizeError) as caught:
        model.trace(X, normal(3, WIDTH))
    assert str(caught.value) == (
        "[T503] the batch of pipeline '<lambda>' has several numbers of rows\n"
        "  got: x: 8\n"
        "  got: y: 3\n"
        "  fix: give each array one row for each example\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T503.html"
    )


def test_names_of_the_batch_exist():
    def model(x):
        return double(x)

    with pytest.raises(SpecFormError, match="no argument 'y' to treat as a batch"):
        graph.pipeline(stages=[double, double], mesh=TWO, batch="y")(model)
    missing = chain(pipes(batch="x/y"), lambda x: x["z"])
    with pytest.raises(UndecidedRoleError) as caught:
        missing.trace({"z": X})
    assert str(caught.value) == (
        "[T324] a pipeline has no array 'x/y' among its arguments to take for its "
        "batch\n"
        "  fix: did you mean 'x/z'? Known: 'x/z'\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T324.html"
    )


def test_what_the_batch_names_may_be_empty():
    model = chain(pipes(batch=["x", "y"]), lambda x, y: x)
    np.testing.assert_array_equal(model(X, None), model(X, ()))


def test_a_step_may_say_which_of_its_arguments_are_batches():
    """A fixed matrix that only the loss reads, as wide as the batch is long."""

    def step(pipe: Pipe, x: Any, y: Any, fixed: Any) -> Any:
        model = chain(pipe, jnp.sin)
        loss = jnp.abs(model(x) @ fixed - y).mean()
        return loss, ts.grad(loss, x)

    want = ts.function(partial(step, unpiped))(X, Y, SQUARE)
    piped = partial(step, pipes())
    with pytest.raises(PipelineFormError, match=r"graph\.training_step\(batch="):
        ts.function(piped, mesh=TWO).trace(X, Y, SQUARE)
    named = graph.training_step(mesh=TWO, batch=["x", "y"])(piped)
    close(named(X, Y, SQUARE), want)
