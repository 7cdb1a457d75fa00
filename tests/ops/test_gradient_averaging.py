# SPDX-License-Identifier: Apache-2.0
"""Means of gradients over mesh axes: what they give, what they send, how they err."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tessera import dist, op
from tessera.analysis.ledger import collectives
from tessera.mesh import Mesh

DP = Mesh(["dp"], devices=range(8))
GRID = Mesh(["node", "dp"], devices=range(8), shape=(2, 4))


def blocks(*shape: int, seed: int = 0) -> np.ndarray:
    """Numbers of very different sizes, one block for each of eight devices."""
    draw = np.random.default_rng(seed)
    sizes = 10.0 ** draw.integers(-4, 3, (8, *shape))
    return (draw.normal(size=(8, *shape)) * sizes).astype(np.float32)


def averaging(compression, axis="dp", **options):
    """The average of gradients alone."""
    identity = optax.identity()
    return dist.average_gradients(identity, axis, compression=compression, **options)


def mapped(compression, mesh=DP, axis="dp", check=True, **options):
    """``[8, ...] -> [...]``: the mean over devices, each of which has one row."""
    transform = averaging(compression, axis, **options)

    def body(x):
        state = transform.init(x[0])
        return transform.update(x[0], state)[0]

    spec = P(tuple(mesh.axes))
    return jax.jit(
        jax.shard_map(
            body, mesh=mesh.jax, in_specs=spec, out_specs=P(), check_vma=check
        )
    )


def sent(function, *args, mesh=DP):
    """Bytes by kind of collective and dtype."""
    compiled = jax.jit(function).lower(*args).compile()
    found: dict[tuple[str, str], int] = {}
    for row in collectives(compiled, mesh).rows:
        for array in row.arrays:
            key = (row.kind, array.dtype)
            found[key] = found.get(key, 0) + array.nbytes * row.counted_calls
    return found


# --- what it gives


@pytest.mark.parametrize("axis", ["dp", ("node", "dp")])
def test_without_compression_it_is_the_mean_bit_for_bit(axis):
    mesh = DP if axis == "dp" else GRID
    x = blocks(5, 7)

    def plain(x):
        return dist.all_reduce(x[0], axis, "mean")

    spec = P(tuple(mesh.axes))
    region = jax.shard_map(plain, mesh=mesh.jax, in_specs=spec, out_specs=P())
    expected = jax.jit(region)(x)
    np.testing.assert_array_equal(mapped("none", mesh, axis)(x), expected)


def test_large_values_do_not_overflow_on_the_way():
    x = np.full((8, 16), 2.0**124, np.float32)
    np.testing.assert_allclose(mapped("top_k", ratio=1.0)(x), x[0], rtol=2**-7)


@pytest.mark.parametrize("compression", ["none", "top_k"])
def test_zeros_and_nothing_stay_so(compression):
    for shape in [(8, 4), (8, 0)]:
        got = mapped(compression)(np.zeros(shape, np.float32))
        np.testing.assert_array_equal(got, np.zeros(shape[1:]))


@pytest.mark.parametrize("compression", ["none", "top_k"])
def test_a_narrow_gradient_keeps_its_dtype(compression):
    x = jnp.ones((8, 16), jnp.bfloat16)
    assert mapped(compression, ratio=1.0)(x).dtype == jnp.bfloat16


def test_over_two_axes_it_is_the_mean_over_both():
    x = blocks(300)
    whole = np.asarray(mapped("top_k", ratio=1.0)(x))
    got = mapped("top_k", GRID, ("node", "dp"), ratio=1.0)(x)
    np.testing.assert_array_equal(got, whole)


@pytest.mark.parametrize("compression", ["none", "top_k"])
def test_it_works_where_jax_does_not_track_what_varies(compression):
    x = blocks(33)
    tracked = mapped(compression, ratio=0.5)(x)
    np.testing.assert_array_equal(
        mapped(compression, ratio=0.5, check=False)(x), tracked
    )


# --- top_k


def feed(rounds, ratio, size=24):
    """Sums of what went in and of what came out, and the residuals at the end."""
    transform = averaging("top_k", ratio=ratio)

    def body(x, state):
        mean, state = transform.update(x[0], state)
        return mean, state

    specs = (P("dp"), P("dp")), (P(), P("dp"))
    step = jax.jit(
        jax.shard_map(body, mesh=DP.jax, in_specs=specs[0], out_specs=specs[1])
    )
    with DP:
        state = transform.init(jnp.zeros(size, jnp.float32))
    given, got = np.zeros(size), np.zeros(size)
    for seed in range(rounds):
        x = blocks(size, seed=seed)
        mean, state = step(x, state)
        given, got = given + x.mean(axis=0, dtype=np.float64), got + np.asarray(mean)
    return given, got, np.asarray(state[0].residual)


def test_top_k_sends_the_largest_of_each_device():
    x = blocks(24)
    expected = np.zeros(24)
    for row in x:
        places = np.argsort(-np.abs(row))[:6]
        expected[places] += row[places] / 8
    np.testing.assert_allclose(mapped("top_k", ratio=0.25)(x), expected, rtol=1e-6)


def test_top_k_loses_nothing():
    given, got, residual = feed(rounds=5, ratio=0.25)
    assert np.count_nonzero(residual) == 8 * 18
    scale = np.abs(given).max()
    np.testing.assert_allclose(
        got + residual.mean(axis=0), given, rtol=0, atol=1e-6 * scale
    )


def test_top_k_of_everything_is_the_mean():
    x = blocks(24)
    np.testing.assert_allclose(
        mapped("top_k", ratio=1.0)(x), x.mean(axis=0), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("compression", ["none", "top_k"])
def test_descent_with_any_compression_finds_the_least_of_a_quadratic(compression):
    # Each device has a loss of its own, far from the others': only the mean of the
    # gradients vanishes at the goal, so that what top_k leaves out must come later.
    draw = np.random.default_rng(0)
    goals = (draw.normal(size=(8, 32)) * 10).astype(np.float32)
    optimizer = dist.average_gradients(
        optax.sgd(0.1), "dp", compression=compression, ratio=0.125
    )

    def body(goal):
        weight = jnp.zeros(32, jnp.float32)

        def step(carry, _):
            weight, state = carry
            own = dist.per_device(weight, "dp")
            gradient = jax.grad(lambda w: 0.5 * ((w - goal[0]) ** 2).sum())(own)
            updates, state = optimizer.update(gradient, state, weight)
            return (optax.apply_updates(weight, updates), state), None

        start = (weight, optimizer.init(weight))
        return jax.lax.scan(step, start, length=120)[0][0]

    weight = jax.jit(jax.shard_map(body, mesh=DP.jax, in_specs=P("dp"), out_specs=P()))(
        goals
    )
    best = goals.mean(axis=0)
    spread = np.abs(goals - best).max()
    allowed = {"none": 1e-5, "top_k": 0.3}[compression]
    assert np.abs(weight - best).max() < allowed * spread


# --- what it sends


def test_what_is_sent_for_each_value():
    """Of 64 Ki values: ``nbytes`` of the ledger, of which (n-1)/n are on the wire."""
    x, values = np.ones((8, 2**16), np.float32), 2**16
    assert sent(mapped("none"), x) == {("all-reduce", "f32"): 4 * values}
    assert sent(mapped("top_k", ratio=2**-6), x) == {
        ("all-gather", "f32"): 8 * 4 * values // 64,
        ("all-gather", "s32"): 8 * 4 * values // 64,
    }


# --- the wrapped optimizer


def data():
    draw = np.random.default_rng(3)
    x = draw.normal(size=(32, 6)).astype(np.float32)
    return x, (x @ draw.normal(size=6)).astype(np.float32)


def loss(params, x, y):
    return ((x @ params["w"] + params["b"] - y) ** 2).mean()


def trained(optimizer, steps=5):
    """Parameters after some steps of a kernel, as a DDP user would write them."""

    @op.kernel
    def step(params, state, x, y):
        own = dist.per_device(params, axis="dp")
        gradients = jax.grad(loss)(own, x, y)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    params = {"w": jnp.zeros(6, jnp.float32), "b": jnp.zeros((), jnp.float32)}
    x, y = jax.device_put(data(), NamedSharding(DP.jax, P("dp")))
    with DP:
        state = optimizer.init(params)
    for _ in range(steps):
        params, state = step(params, state, x, y)
    return params, state


def plain_steps(optimizer, steps=5):
    params = {"w": jnp.zeros(6, jnp.float32), "b": jnp.zeros((), jnp.float32)}
    state = optimizer.init(params)
    for _ in range(steps):
        updates, state = optimizer.update(jax.grad(loss)(params, *data()), state)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.full
def test_a_wrapped_optimizer_takes_the_steps_of_the_whole_batch():
    # An epsilon that makes Adam's step a smooth function of the gradient.
    adam = optax.adam(0.1, eps=1e-2)
    # Optax multiplies Python numbers and counters, which the tests' strictness refuses.
    with jax.numpy_dtype_promotion("standard"):
        params, _ = trained(dist.average_gradients(adam, axis="dp"))
        plain = plain_steps(adam)
    for name, expected in plain.items():
        np.testing.assert_allclose(params[name], expected, rtol=1e-5)


@pytest.mark.full
def test_a_wrapped_optimizer_keeps_what_each_device_holds_back_on_it():
    optimizer = dist.average_gradients(
        optax.sgd(0.1), axis="dp", compression="top_k", ratio=0.5
    )
    params, (feedback, _) = trained(optimizer)
    assert {name: r.shape for name, r in feedback.residual.items()} == {
        "w": (8, 6),
        "b": (8,),
    }
    assert feedback.residual["w"].sharding.spec == P("dp")
    held = np.asarray(feedback.residual["w"])
    assert (np.count_nonzero(held, axis=1) == 3).all()
    assert np.abs(params["w"] - plain_steps(optax.sgd(0.1))["w"]).max() > 1e-3


def test_a_state_made_inside_the_kernel_is_of_blocks():
    transform = averaging("top_k")

    @op.kernel
    def start(x):
        return transform.init(x)

    x = jax.device_put(np.ones((4, 6), np.float32), NamedSharding(DP.jax, P()))
    assert start(x)[0].residual.shape == (8, 4, 6)
