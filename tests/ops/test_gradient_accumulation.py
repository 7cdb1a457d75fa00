# SPDX-License-Identifier: Apache-2.0
"""A batch in parts gives the gradient of the whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera.errors import BatchSizeError, OperandError
from tessera.jax_compat import jaxprs
from tessera.ops.gradient_accumulation import accumulate_gradients

DRAW = np.random.default_rng(0)
WEIGHTS = {
    "up": DRAW.normal(size=(4, 6)).astype("f4"),
    "down": DRAW.normal(size=(6, 1)).astype("f4"),
}
BATCH = {
    "x": DRAW.normal(size=(12, 4)).astype("f4"),
    "y": DRAW.normal(size=(12, 1)).astype("f4"),
}


def loss_of(weights, batch):
    hidden = jnp.tanh(batch["x"] @ weights["up"])
    return jnp.mean((hidden @ weights["down"] - batch["y"]) ** 2)


WHOLE = jax.value_and_grad(loss_of)(WEIGHTS, BATCH)


def assert_equal(found, expected=WHOLE, rtol=1e-5):
    for one, other in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=rtol, atol=1e-6)


def accumulating(microbatches):
    @ts.function
    def accumulated(weights, batch):
        def step(batch):
            loss = loss_of(weights, batch)
            return loss, ts.grad(loss, weights)

        return ts.accumulate_gradients(step, batch, microbatches)

    return accumulated


@pytest.mark.parametrize("microbatches", [1, 2, 4, 12])
def test_it_equals_the_gradient_of_the_whole_batch(microbatches):
    assert_equal(accumulating(microbatches)(WEIGHTS, BATCH))


@given(st.sampled_from([1, 2, 3, 6]), st.sampled_from(["mean", "sum"]))
def test_any_tree_of_numbers_is_reduced(microbatches, reduction):
    x = np.arange(6.0, dtype="f4")
    found = accumulate_gradients(
        lambda x: {"sum": x.sum(), "rows": jnp.int32(x.shape[0])},
        x,
        microbatches,
        reduction=reduction,
    )
    parts = microbatches if reduction == "mean" else 1
    assert float(found["sum"]) == pytest.approx(15.0 / parts)
    assert float(found["rows"]) == pytest.approx(6 / parts)
    assert found["rows"].dtype == (jnp.float32 if reduction == "mean" else jnp.int32)


def test_jax_alone_may_differentiate_each_part_under_jit_and_without():
    def run(weights, batch):
        step = lambda part: jax.value_and_grad(loss_of)(weights, part)  # noqa: E731
        return accumulate_gradients(step, batch, 3)

    assert_equal(run(WEIGHTS, BATCH))
    assert_equal(jax.jit(run)(WEIGHTS, BATCH))


def test_microbatches_may_come_as_a_list_or_with_a_leading_dim():
    listed = [{k: v[i::4] for k, v in BATCH.items()} for i in range(4)]
    stacked = {k: np.stack([part[k] for part in listed]) for k in BATCH}
    assert_equal(accumulating(None)(WEIGHTS, listed))
    assert_equal(accumulating(None)(WEIGHTS, stacked))


def test_it_is_one_loop_whose_length_does_not_change_the_program():
    def lines(microbatches):
        program = accumulating(microbatches).trace(WEIGHTS, BATCH).graph.program
        loops = [e for e in jaxprs.equations(program) if e.primitive.name == "scan"]
        assert [loop.params["length"] for loop in loops] == [microbatches]
        return len(jaxprs.pretty(program).splitlines())

    assert lines(2) == lines(6)


def test_narrow_gradients_are_summed_in_f32():
    """In bf16, 256 + 1 is 256."""
    values = jnp.concatenate([jnp.full(1, 256.0), jnp.ones(15)]).astype(jnp.bfloat16)
    total = accumulate_gradients(lambda x: x[0], values, 16, reduction="sum")
    assert total.dtype == jnp.bfloat16
    assert float(total) == float(jnp.bfloat16(256 + 15))


def test_sums_over_tokens_are_divided_by_their_number_in_the_end():
    """Microbatches of different weight: mean losses would not do."""
    counts = np.array([1, 1, 0, 0, 0, 1], "f4")
    x = DRAW.normal(size=6).astype("f4")

    @ts.function
    def mean_gradient(w, batch):
        def step(batch):
            loss = jnp.sum(batch["counts"] * (w * batch["x"]) ** 2)
            return ts.grad(loss, w), batch["counts"].sum()

        total, number = ts.accumulate_gradients(step, batch, 3, reduction="sum")
        return total / number

    found = mean_gradient(jnp.float32(2.0), {"x": x, "counts": counts})
    expected = 2 * 2.0 * (counts * x**2).sum() / 3
    assert float(found) == pytest.approx(expected, rel=1e-5)


@pytest.mark.full
def test_operations_that_own_parameters_declare_them_once():
    @ts.graph.training_step
    def step(x):
        def part(x):
            hidden = ts.op.transformer_block(x, depth=1, num_heads=1)
            loss = jnp.mean(hidden**2)
            return loss, ts.graph.backward(loss)

        return ts.accumulate_gradients(part, x, 2)

    x = jnp.ones((4, 2, 8))
    step.init(jax.random.key(0), x)
    loss, gradients = step(x)
    assert set(gradients) == {"block"}
    assert jnp.isfinite(loss)


def test_rows_stay_on_their_devices(dp_mesh):
    """The batch is split over devices: nothing of it is sent, only gradients are."""
    x = jax.device_put(
        jnp.asarray(DRAW.normal(size=(32, 4)), jnp.float32),
        ts.ShardSpec((0,), ("dp",)).named((32, 4), dp_mesh),
    )

    @ts.function(mesh=dp_mesh)
    def run(w, x):
        def step(x):
            return ts.grad(jnp.mean(jnp.tanh(x @ w)), w)

        return ts.accumulate_gradients(step, x, 4)

    w = jnp.ones((4, 2))
    kinds = {row.kind for row in run.compile(w, x).collectives.rows}
    assert kinds == {"all-reduce"}
    expected = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(w)
    np.testing.assert_allclose(run(w, x), expected, rtol=1e-5, atol=1e-7)


def test_each_device_of_a_manual_region_accumulates_its_own_rows(dp_mesh):
    def mean_square(w, x):
        return jnp.mean((x @ w) ** 2)

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=dp_mesh.jax,
        in_specs=(P(), P("dp")),
        out_specs=(P("dp"), P("dp")),
    )
    def run(w, x):
        w = jax.lax.pcast(w, "dp", to="varying")  # so each device's gradient is its own
        step = functools.partial(jax.value_and_grad(mean_square), w)
        loss, gradient = accumulate_gradients(step, x, 2)
        return loss[None], gradient[None]

    w, x = WEIGHTS["up"], DRAW.normal(size=(32, 4)).astype("f4")
    losses, gradients = run(w, x)
    for device in range(8):
        own = x[4 * device : 4 * device + 4]
        np.testing.assert_allclose(losses[device], mean_square(w, own), rtol=1e-5)
        expected = jax.grad(mean_square)(w, own)
        np.testing.assert_allclose(gradients[device], expected, rtol=1e-4, atol=1e-6)


def test_rows_that_cannot_be_divided_are_an_error_with_the_nearest_numbers():
    with pytest.raises(BatchSizeError) as caught:
        accumulating(5)(WEIGHTS, BATCH)
    assert str(caught.value) == (
        "[T503] a batch cannot be divided into 5 microbatches\n"
        "  got: 12 rows, remainder 2\n"
        "  fix: use 4 or 6 microbatches\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T503.html"
    )


def test_arrays_of_different_length_are_an_error_that_lists_them():
    with pytest.raises(BatchSizeError) as caught:
        accumulate_gradients(lambda b: b, {"x": np.ones((4, 2)), "y": np.ones(3)}, 2)
    assert "x: 4" in str(caught.value)
    assert "y: 3" in str(caught.value)
    for batch in ({}, np.float32(1.0), np.ones((0, 2))):
        with pytest.raises(BatchSizeError):
            accumulate_gradients(lambda b: b, batch, 2)
    with pytest.raises(BatchSizeError, match="no arrays"):
        accumulate_gradients(lambda b: b, [])


def test_another_reduction_is_an_error():
    with pytest.raises(OperandError, match="use 'mean' or 'sum'"):
        accumulate_gradients(lambda x: x, np.ones(4), 2, reduction="max")
