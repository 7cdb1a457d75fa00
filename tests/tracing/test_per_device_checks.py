# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F821 - dims are strings, which ruff takes for names
"""Gradients and random numbers in code per device and per microbatch."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera import dist, op
from tessera.errors import CollectiveError, RandomNumbersError

KEY = jax.random.key(0)
RAW = jax.random.PRNGKey(0)
WEIGHT = np.full(4, 2.0, np.float32)
ROWS = np.arange(16, dtype=np.float32).reshape(4, 4)
SQUARE = np.ones((4, 4), np.float32)


@pytest.fixture(scope="module")
def mesh():
    return ts.Mesh(["dp"], devices=range(4))


def loss(w, x):
    return jnp.mean((x @ w) ** 2)


MEAN_GRADIENT = jax.grad(loss)(WEIGHT, ROWS)


def on_rows(mesh, body, first=WEIGHT):
    """A kernel's result, of a replicated argument and of rows split over dp."""
    body = op.kernel(body)
    specs = {"first": P(), "x": P(mesh.axes)}

    def step(first, x):
        return body(first, x)

    return ts.function(step, mesh=mesh, in_specs=specs)(first, ROWS)


def scanned(w, x):
    start = dist.per_device(jnp.float32(0), axis="dp")
    return lax.scan(lambda total, row: (total + (row @ w) ** 2, None), start, x)[0]


@jax.custom_vjp
def with_its_own_rule(w, x):
    return loss(w, x)


with_its_own_rule.defvjp(
    lambda w, x: (loss(w, x), (w, x)), lambda saved, g: jax.vjp(loss, *saved)[1](g)
)

GRADIENTS = {
    "jax.grad": jax.grad(loss),
    "ts.grad": lambda w, x: ts.grad(loss(w, x), w),
    "ts.value_and_grad": lambda w, x: ts.value_and_grad(loss)(w, x)[1],
    "of a jitted loss": jax.grad(jax.jit(loss)),
    "jitted": jax.jit(jax.grad(loss)),
    "rematerialized": jax.grad(jax.checkpoint(loss)),
    "through a loop": jax.grad(scanned),
    "by a custom rule": jax.grad(with_its_own_rule),
    "jacobian": jax.jacrev(loss),
    "second order": lambda w, x: jax.hessian(loss)(w, x)[0],
    "accumulated in a loop": lambda w, x: lax.scan(
        lambda g, row: (g + jax.grad(loss)(w, row[None]), None), jnp.zeros(4), x
    )[0],
    "in a branch": lambda w, x: lax.cond(
        w[0] > 0, lambda: jax.grad(loss)(w, x), lambda: jnp.zeros(4)
    ),
    "clipped": lambda w, x: jnp.clip(jax.grad(loss)(w, x), -1, 1),
    "weights after a step": lambda w, x: w - 0.1 * jax.grad(loss)(w, x),
}
REDUCTIONS = {
    "mean": partial(dist.all_reduce, axis="dp", op="mean"),
    "sum": partial(dist.all_reduce, axis="dp"),
    "max": partial(dist.all_reduce, axis="dp", op="max"),
    "reduce_scatter": partial(dist.reduce_scatter, axis="dp"),
    "all_gather": partial(dist.all_gather, axis="dp"),
    "jax.lax.pmean": lambda g: lax.pmean(g, "dp"),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_gradient_that_is_a_sum_is_not_reduced_again(mesh, name):
    gradient = GRADIENTS[name]
    with pytest.raises(CollectiveError, match="summed over 'dp' already"):
        on_rows(mesh, lambda w, x: REDUCTIONS["mean"](gradient(w, x)))


@pytest.mark.parametrize("name", REDUCTIONS)
def test_no_collective_takes_a_gradient_that_is_a_sum(mesh, name):
    with pytest.raises(CollectiveError, match="summed over 'dp' already") as caught:
        on_rows(mesh, lambda w, x: REDUCTIONS[name](jax.grad(loss)(w, x)))
    assert "test_per_device_checks.py:" in str(caught.value)


def test_over_several_axes_none_of_them_is_reduced_twice():
    mesh = ts.Mesh(["dp", "fsdp"], shape=(2, 2))
    both = ("dp", "fsdp")

    def twice(w, x):
        return dist.all_reduce(jax.grad(loss)(w, x), axis=both, op="mean")

    def once(w, x):
        own = dist.per_device(w, axis=both)
        return dist.all_reduce(jax.grad(loss)(own, x), axis=both, op="mean")

    with pytest.raises(CollectiveError, match="summed over 'dp', 'fsdp' already"):
        on_rows(mesh, twice)
    np.testing.assert_allclose(on_rows(mesh, once), MEAN_GRADIENT, rtol=1e-6)


def own_gradient(w, x):
    own = dist.per_device(w, axis="dp")
    return dist.all_reduce(jax.grad(loss)(own, x), axis="dp", op="mean")


def own_ts_gradient(w, x):
    own = dist.per_device(w, axis="dp")
    return dist.all_reduce(ts.grad(loss(own, x), own), axis="dp", op="mean")


def gradient_of_the_mean(w, x):
    return jax.grad(lambda w: dist.all_reduce(loss(w, x), axis="dp", op="mean"))(w)


def gradient_sum(w, x):
    return jax.grad(loss)(w, x) / lax.axis_size("dp")


@pytest.mark.parametrize(
    "body", [own_gradient, own_ts_gradient, gradient_of_the_mean, gradient_sum]
)
def test_other_ways_to_the_mean_gradient_run(mesh, body):
    np.testing.assert_allclose(on_rows(mesh, body), MEAN_GRADIENT, rtol=1e-6)


def test_a_kernel_that_runs_at_once_is_checked_too(mesh):
    kernel = op.kernel(lambda w, x: REDUCTIONS["sum"](jax.grad(loss)(w, x)))
    x = jax.device_put(ROWS, jax.NamedSharding(mesh.jax, P("dp")))
    with mesh, pytest.raises(CollectiveError, match="summed over 'dp' already"):
        kernel(WEIGHT, x)


# --- random numbers

normal = jax.random.normal


def dropout(x, key):
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), 2 * x, 0)


REPEATED = {
    "normal": lambda k, x: x + normal(k, x.shape),
    "dropout": lambda k, x: dropout(x, k),
    "a captured key": lambda k, x: x + normal(KEY, x.shape),
    "a captured raw key": lambda k, x: x + normal(RAW, x.shape),
    "a key made inside": lambda k, x: x + normal(jax.random.key(3), x.shape),
    "rbg": lambda k, x: x + normal(jax.random.key(0, impl="rbg"), x.shape),
    "a generator of XLA": lambda k, x: (
        x + lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), x.shape)[1].astype("f")
    ),
    "a key split inside": lambda k, x: x + normal(jax.random.split(k)[0], x.shape),
    "a key for each row": lambda k, x: (
        x + jax.vmap(lambda k: normal(k, (4,)))(jax.random.split(k, len(x)))
    ),
    "gamma": lambda k, x: x * jax.random.gamma(k, 1.0, x.shape),
    "poisson": lambda k, x: x * jax.random.poisson(k, 1.0, x.shape).astype("f"),
    "permutation": lambda k, x: jax.random.permutation(k, x, axis=1),
    "weights": lambda k, x: x @ normal(k, (4, 4)),
    "in a jit": lambda k, x: jax.jit(lambda x: x + normal(k, x.shape))(x),
    "in a loop": lambda k, x: lax.scan(
        lambda c, row: (c, row + normal(k, row.shape)), 0, x
    )[1],
    "a number for each row": lambda k, x: lax.scan(
        lambda k, row: (jax.random.split(k)[0], row * normal(k, ())), k, x
    )[1],
    "a key folded with a loop's index": lambda k, x: lax.fori_loop(
        0, 2, lambda i, v: v + normal(jax.random.fold_in(k, i), v.shape), x
    ),
    "in a loop of unknown length": lambda k, x: lax.while_loop(
        lambda v: v[0, 0] < 100, lambda v: v + 50 + normal(k, v.shape), x
    ),
    "in a branch": lambda k, x: lax.cond(
        x[0, 0] >= 0, lambda: x + normal(k, x.shape), lambda: x
    ),
    "under a gradient": lambda k, x: jax.grad(
        lambda x: jnp.sum(jnp.where(jax.random.bernoulli(k, 0.5, x.shape), x, 0.0))
    )(x),
    "rematerialized": lambda k, x: jax.checkpoint(lambda x: x + normal(k, x.shape))(x),
}


@pytest.mark.parametrize("name", REPEATED)
def test_devices_do_not_draw_the_same_numbers_for_their_own_rows(mesh, name):
    with pytest.raises(RandomNumbersError, match="every device along 'dp' draws"):
        on_rows(mesh, REPEATED[name], KEY)


def test_the_error_has_the_lines_where_numbers_are_drawn_and_used(mesh):
    def body(k, x):
        noise = normal(k, x.shape)
        return x + noise

    with pytest.raises(RandomNumbersError) as caught:
        on_rows(mesh, body, KEY)
    assert str(caught.value).count("test_per_device_checks.py:") == 2


DRAWN_RIGHT = {
    "a key of each device": lambda k, x: (
        x + normal(jax.random.fold_in(k, lax.axis_index("dp")), x.shape)
    ),
    "its own of several keys": lambda k, x: (
        x + normal(jax.random.split(k, 4)[lax.axis_index("dp")], x.shape)
    ),
    "one number": lambda k, x: x * normal(k, ()),
    "noise on replicated values": lambda k, x: x @ (SQUARE + normal(k, (4, 4))),
}


@pytest.mark.parametrize("name", DRAWN_RIGHT)
def test_numbers_that_devices_may_share_or_own_are_drawn(mesh, name):
    assert on_rows(mesh, DRAWN_RIGHT[name], KEY).shape == ROWS.shape


def test_numbers_that_are_drawn_outside_are_the_same_on_every_mesh(mesh):
    add = op.kernel(lambda x, noise: x + noise)

    def step(x, noise):
        return add(x, noise)

    noise = normal(KEY, ROWS.shape)
    specs = {"x": P("dp"), "noise": P("dp")}
    found = ts.function(step, mesh=mesh, in_specs=specs)(ROWS, noise)
    assert (found == ROWS + noise).all()


split = ts.distribute(strategy="tensor_parallel", mesh_axes=["tp"])


@split
def hidden(x: ts.Tensor["B", "D"], up: ts.Tensor["D", "F"]) -> ts.Tensor["B", "F"]:
    return dropout(x @ up, KEY)


@split
def residual(
    x: ts.Tensor["B", "D"], up: ts.Tensor["D", "F"], down: ts.Tensor["F", "D"]
) -> ts.Tensor["B", "D"]:
    whole = dist.all_reduce((x @ up) @ down, axis="tp")
    return dropout(whole, KEY)


def test_shards_of_a_layer_do_not_drop_the_same_features():
    mesh = ts.Mesh(["tp"], devices=range(4))
    with mesh, pytest.raises(RandomNumbersError, match="every device along 'tp'"):
        hidden(ROWS, SQUARE)


def test_what_all_shards_have_is_dropped_alike():
    with ts.Mesh(["tp"], devices=range(4)):
        found = residual(ROWS, SQUARE, SQUARE)
    want = dropout(ROWS @ SQUARE @ SQUARE, KEY)
    np.testing.assert_allclose(found, want, rtol=1e-6)


def test_microbatches_of_accumulated_gradients_do_not_draw_the_same_numbers():
    @ts.function
    def gradients(w, x):
        def step(x):
            return ts.grad(jnp.sum(dropout(x, KEY) @ w), w)

        return ts.accumulate_gradients(step, x, microbatches=2)

    with pytest.raises(RandomNumbersError, match="every microbatch draws the same"):
        gradients(WEIGHT, ROWS)
