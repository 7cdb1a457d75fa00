# SPDX-License-Identifier: Apache-2.0
"""A loss over a batch, taken apart into sums over microbatches and put together."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.errors import PipelineFormError
from tessera.graph.gradient_primitive import gradient_p
from tessera.graph.pipelining.loss_decomposition import (
    LossDecomposition,
    decompose_loss,
)
from tessera.graph.rewriting import Environment, inline_jits
from tessera.jax_compat import jaxprs

ROWS, MICRO, WIDTH = 8, 2, 3
COUNT = ROWS // MICRO
Loss = Callable[..., Any]

X = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
BATCH = np.random.default_rng(1).normal(size=(ROWS, WIDTH)).astype(np.float32)
WEIGHT = np.float32([0.5, 2.0, -1.0])


@dataclass
class Case:
    """A loss, taken apart."""

    found: LossDecomposition
    whole: Any
    loss: Any

    def value(self) -> float:
        """The loss from its sums over microbatches."""
        before = Environment(self.whole, [X, BATCH, WEIGHT])
        for equation in jaxprs.equations(self.whole):
            if equation.primitive is not gradient_p:
                before.run([equation])

        def after(sums: list[Any]) -> Any:
            env = before.copy()
            env.write([v for v, _ in self.found.sums], sums)
            env.run(self.found.after)
            return env.read(self.loss)

        nothing = [jaxprs.zeros(v.aval) for v, _ in self.found.sums]
        offset, pull_back = jax.vjp(after, nothing)
        (coefficients,) = pull_back(jnp.ones_like(offset))
        total = offset
        for number in range(COUNT):
            sums = self.sums_of(before, number)
            total += sum(
                jnp.vdot(a, s) for a, s in zip(coefficients, sums, strict=True)
            )
        return float(total)

    def sums_of(self, before: Environment, number: int) -> list[Any]:
        """The sums of one microbatch, by its own equations."""
        part = slice(number * MICRO, (number + 1) * MICRO)
        env = Environment.of({v: before.read(w) for w, v in self.found.replicated})
        for whole, variable, dim in self.found.rows:
            rows = jnp.moveaxis(before.read(whole), dim, 0)[part]
            env.write([variable], [jnp.moveaxis(rows, 0, dim)])
        env.write(self.found.outputs, [jnp.sin(X[part])])
        for equation, atoms in self.found.equations:
            results = jaxprs.bind(equation, [env.read(atom) for atom in atoms])
            env.write(equation.outvars, results)
        return [env.read(v) for _, v in self.found.sums]


def case_of(loss: Loss) -> Case:
    """``loss(out, batch, weight)``, where ``out`` are the sines of the input."""

    def step(x: Any, batch: Any, weight: Any) -> Any:
        found = loss(jnp.sin(x), batch, weight)
        return gradient_p.bind(found, weight, names=("weight",), allow_unused=True)

    def traced(rows: int) -> Any:
        structs = [
            jax.ShapeDtypeStruct(shape, jnp.float32)
            for shape in ((rows, WIDTH), (rows, WIDTH), (WIDTH,))
        ]
        return inline_jits(jax.make_jaxpr(step)(*structs))

    whole, micro = traced(ROWS), traced(MICRO)
    names = [e.primitive.name for e in jaxprs.equations(whole)]
    place, mark = names.index("sin"), names.index("gradient")
    found = decompose_loss(whole, micro, place, mark, COUNT)
    return Case(found, whole, jaxprs.equations(whole)[mark].invars[0])


def masked_mean(out: Any, batch: Any, _: Any) -> Any:
    mask = (batch > 0).astype(out.dtype)
    return (out * mask).sum() / jnp.maximum(mask.sum(), 1.0)


SUMS: dict[str, Loss] = {
    "mean": lambda out, *_: (out**2).mean(),
    "sum": lambda out, *_: jnp.exp(out).sum(),
    "mean_of_means": lambda out, *_: (out**2).mean(1).mean(),
    "masked_mean": masked_mean,
    "divided_by_rows_first": lambda out, *_: (jax.nn.gelu(out) / len(out)).sum(),
    "weighed_by_the_batch": lambda out, batch, _: (out * batch / batch.sum(0)).sum(),
    "product_with_the_batch": lambda out, batch, w: (out.T @ batch @ w).mean(),
    "with_a_penalty": lambda out, _, w: 2.0 * out.sum() + (w**2).sum(),
    "times_a_weight": lambda out, _, w: jnp.exp(w[0]) * (out * w).mean() - w[1],
    "two_sums": lambda out, batch, _: out.sum() - 3.0 * (out * batch).mean() / 2.0,
    "a_vector_of_sums": lambda out, _, w: (
        jnp.stack([out.sum(), 1.0 - out.mean()]) @ w[1:]
    ),
    "some_of_the_sums": lambda out, _, w: jnp.where(w > 0, out.sum(0), 0.0)[1:].sum(),
    "along_rows_turned": lambda out, *_: jnp.cumsum(out.T, 0).sum(),
}


@pytest.mark.parametrize("name", SUMS)
def test_the_sums_of_microbatches_make_the_loss(name):
    want = SUMS[name](jnp.sin(X), jnp.asarray(BATCH), jnp.asarray(WEIGHT))
    assert abs(want) > 1e-3
    np.testing.assert_allclose(case_of(SUMS[name]).value(), want, rtol=2e-5)


def test_what_mixes_rows_of_the_batch_alone_is_taken_from_the_whole_batch():
    found = case_of(SUMS["weighed_by_the_batch"]).found
    assert [v.aval.shape for v, _ in found.replicated] == [(1, WIDTH)]
    assert [(v.aval.shape, dim) for v, _, dim in found.rows] == [((ROWS, WIDTH), 0)]


def test_what_treats_rows_alone_is_run_for_each_microbatch():
    found = case_of(masked_mean).found
    assert [v.aval.shape for v, _, _ in found.rows] == [(ROWS, WIDTH)]
    names = [equation.primitive.name for equation, _ in found.equations]
    assert names == ["gt", "convert_element_type", "mul", "reduce_sum"]
    assert [e.primitive.name for e in found.after] == ["div"]


def test_what_does_not_lead_to_the_loss_may_mix_rows():
    def loss(out: Any, *_: Any) -> Any:
        spread = out.var()
        del spread
        return out.mean()

    found = case_of(loss).found
    assert len(found.sums) == 1
    assert "sub" not in [equation.primitive.name for equation, _ in found.equations]


MIXED: dict[str, tuple[Loss, str]] = {
    "largest": (lambda out, *_: out.max(), "reduce_max mixes rows of the batch"),
    "square_of_a_sum": (
        lambda out, *_: out.sum() ** 2,
        "integer_pow of a sum over the batch is not linear in it",
    ),
    "sum_of_two_kinds": (
        lambda out, *_: (out * out.sum()).sum(),
        "mul of a sum over the batch is not linear in it",
    ),
    "sum_and_rows": (
        lambda out, *_: (out + out.mean()).sum(),
        "add of a sum over the batch is not linear in it",
    ),
    "divided_by_a_sum": (
        lambda out, _, w: w[0] / out.sum(),
        "div of a sum over the batch is not linear in it",
    ),
    "chosen_by_a_sum": (
        lambda out, _, w: jnp.where(out.sum() > 0, w[0], w[1]),
        "gt of a sum over the batch is not linear in it",
    ),
    "a_count": (
        lambda out, _, w: w[0] * (out > 0).sum(dtype=jnp.int32).astype(jnp.float32),
        "reduce_sum mixes rows of the batch",
    ),
    "one_row": (lambda out, *_: out[1].sum(), "slice mixes rows of the batch"),
    "no_loss_of_the_output": (
        lambda out, batch, w: (batch @ w).sum() + 0.0,
        "the loss is no sum over the rows of the batch",
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_a_loss_that_is_no_such_sum_is_refused(name):
    loss, why = MIXED[name]
    with pytest.raises(PipelineFormError) as caught:
        case_of(loss)
    text = str(caught.value)
    assert text.startswith(
        "[T312] the loss of a pipeline cannot be computed microbatch by microbatch\n"
        f"  got: {why}\n"
    )
    assert "test_loss_decomposition.py:" in text


def test_a_step_that_branches_on_the_batch_size_is_refused():
    with pytest.raises(PipelineFormError) as caught:
        case_of(lambda out, *_: out.mean() if len(out) == ROWS else jnp.exp(out).mean())
    assert "a step does other things for a microbatch than for the whole batch" in str(
        caught.value
    )
