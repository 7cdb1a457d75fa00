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


def mapped(compression, mesh=DP, axis="dp", check=True, **options):
    """``[8, ...] -> [...]``: the mean over devices, each of which has one row."""
    transform = dist.compressed_mean(compression, axis, **options)

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


@pytest.mark.parametrize("shape", [(), (3,), (5, 7), (2, 4096), (8, 1025)])
@pytest.mark.parametrize("compression", ["bf16", "int8"])
def test_a_compressed_mean_errs_by_no_more_than_it_says(compression, shape):
    x = blocks(*shape)
    got = np.asarray(mapped(compression)(x))
    assert got.shape == shape
    assert got.dtype == np.float32
    mean = x.astype(np.float64).mean(axis=0)
    # What is added up in f32 errs a little by itself.
    adding = 8 * 2.0**-23 * np.abs(x).mean(axis=0)
    np.testing.assert_array_less(
        np.abs(got - mean), bound(compression, x, mean) * (1 + 1e-6) + adding + 1e-30
    )


def bound(compression, x, mean):
    """What the module's documentation promises, with the layout of its chunks."""
    if compression == "bf16":
        rounded = np.abs(x).mean(axis=0) * (1 + 2.0**-8)
        return 2.0**-8 * (np.abs(x).mean(axis=0) + np.minimum(np.abs(mean), rounded))
    size = x[0].size
    width = {1: 32, 3: 32, 35: 32, 8192: 1024, 8200: 64}[size]
    flat = np.zeros((8, -(-size // width) * width))
    flat[:, :size] = x.reshape(8, -1)
    largest = np.abs(flat).reshape(8, -1, width).max(axis=2).mean(axis=0)
    means = np.abs(flat.mean(axis=0)).reshape(-1, width).max(axis=1) + largest / 254
    each = (largest + means) / 254
    return np.repeat(each, width)[:size].reshape(x.shape[1:])


def test_int8_is_exact_where_its_steps_are():
    # Each row of 32 neighbors has its own scale: some power of two.
    steps = np.random.default_rng(0).integers(-127, 128, (8, 32)).astype(np.float32)
    steps[:, 7] = 127.0
    x = steps * 2.0 ** np.arange(-4, 4, dtype=np.float32)[:, None]
    alike = np.broadcast_to(x.reshape(-1), (8, 256))
    np.testing.assert_array_equal(mapped("int8")(alike), x.reshape(-1))


@pytest.mark.parametrize("compression", ["bf16", "int8"])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_is_not_finite_stays_so(compression, value):
    x = np.ones((8, 20), np.float32)
    x[3, 11] = value
    assert not np.isfinite(mapped(compression)(x)[11])


@pytest.mark.parametrize("compression", ["bf16", "int8", "top_k"])
def test_large_values_do_not_overflow_on_the_way(compression):
    x = np.full((8, 16), 2.0**124, np.float32)
    np.testing.assert_allclose(mapped(compression, ratio=1.0)(x), x[0], rtol=2**-7)


@pytest.mark.parametrize("compression", ["none", "bf16", "int8", "top_k"])
def test_zeros_and_nothing_stay_so(compression):
    for shape in [(8, 4), (8, 0)]:
        got = mapped(compression)(np.zeros(shape, np.float32))
        np.testing.assert_array_equal(got, np.zeros(shape[1:]))


@pytest.mark.parametrize("compression", ["none", "bf16", "int8", "top_k"])
def test_a_narrow_gradient_keeps_its_dtype(compression):
    x = jnp.ones((8, 16), jnp.bfloat16)
    assert mapped(compression, ratio=1.0)(x).dtype == jnp.bfloat16


@pytest.mark.parametrize("compression", ["bf16", "int8", "top_k"])
def test_over_two_axes_it_is_the_mean_over_both(compression):
    x = blocks(300)
    whole = np.asarray(mapped(compression, ratio=1.0)(x))
    got = mapped(compression, GRID, ("node", "dp"), ratio=1.0)(x)
    np.testing.assert_array_equal(got, whole)


@pytest.mark.parametrize("compression", ["bf16", "int8", "top_k"])
def test_it_works_where_jax_does_not_track_what_varies(compression):
    x = blocks(33)
    tracked = mapped(compression, ratio=0.5)(x)
    np.testing.assert_array_equal(
        mapped(compression, ratio=0.5, check=False)(x), tracked
    )


# --- top_k


def feed(rounds, ratio, size=24):
    """Sums of what went in and of what came out, and the residuals at the end."""
    transform = dist.compressed_mean("top_k", "dp", ratio=ratio)

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
    return given, got, np.asarray(state.residual)


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


@pytest.mark.parametrize("compression", ["none", "bf16", "int8", "top_k"])
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
    allowed = {"none": 1e-5, "bf16": 2**-7, "int8": 2 / 254, "top_k": 0.3}[compression]
    assert np.abs(weight - best).max() < allowed * spread


# --- what it sends


def test_what_is_sent_for_each_value():
    """Of 64 Ki values: ``nbytes`` of the ledger, of which (n-1)/n are on the wire."""
    x, values = np.ones((8, 2**16), np.float32), 2**16
    assert sent(mapped("none"), x) == {("all-reduce", "f32"): 4 * values}
    assert sent(mapped("bf16"), x) == {
        ("all-to-all", "u16"): 2 * values,
        ("all-gather", "u16"): 2 * values,
    }
    scales = 4 * values // 1024
    assert sent(mapped("int8"), x) == {
        ("all-to-all", "s8"): values,
        ("all-to-all", "f32"): scales,
        ("all-gather", "s8"): values,
        ("all-gather", "f32"): scales,
    }
    assert sent(mapped("top_k", ratio=2**-6), x) == {
        ("all-gather", "f32"): 8 * 4 * values // 64,
        ("all-gather", "s32"): 8 * 4 * values // 64,
    }


@pytest.mark.parametrize(
    "size",
    [257, *(pytest.param(n, marks=pytest.mark.full) for n in (1000, 8193, 16383))],
)
def test_little_is_padding_and_scales(size):
    bytes_of = sent(mapped("int8"), np.ones((8, size), np.float32))
    assert set(bytes_of) == {
        (kind, dtype)
        for kind in ("all-to-all", "all-gather")
        for dtype in ("s8", "f32")
    }
    allowed = 1.25 if size > 1000 else 2.25
    assert sum(bytes_of.values()) < 2 * allowed * size


@pytest.mark.parametrize("compression", ["bf16", "int8"])
def test_a_tree_goes_in_one_exchange_and_shares_no_row(compression):
    transform = dist.compressed_mean(compression, "dp")
    tree = {"a": blocks(70, seed=1), "b": (blocks(3, seed=2), blocks(seed=3))}
    tree["c"] = np.zeros((8, 0), np.float32)

    def body(tree):
        own = jax.tree.map(lambda x: x[0], tree)
        return transform.update(own, transform.init(own))[0]

    together = jax.jit(
        jax.shard_map(body, mesh=DP.jax, in_specs=P("dp"), out_specs=P())
    )
    compiled = together.lower(tree).compile()
    calls = sum(row.calls for row in collectives(compiled, DP).rows)
    assert calls == {"bf16": 2, "int8": 4}[compression]
    for leaf, got in zip(
        jax.tree.leaves(tree), jax.tree.leaves(together(tree)), strict=True
    ):
        assert got.shape == leaf.shape[1:]
        if leaf.size:
            np.testing.assert_array_less(
                np.abs(got - leaf.mean(axis=0)), np.abs(leaf).max() / 100
            )


def test_compression_of_the_outer_axis_leaves_the_inner_one_exact():
    chain = optax.chain(
        dist.compressed_mean("none", "dp"), dist.compressed_mean("int8", "node")
    )

    def body(x):
        return chain.update(x[0], chain.init(x[0]))[0]

    spec = P(("node", "dp"))
    region = jax.shard_map(body, mesh=GRID.jax, in_specs=spec, out_specs=P())
    compiled = jax.jit(region).lower(np.ones((8, 4096), np.float32)).compile()
    by_axis = {
        (axes, array.dtype)
        for row in collectives(compiled, GRID).rows
        for axes, array in [(row.axes, row.arrays[0])]
        if array.nbytes > 64
    }
    assert by_axis == {(("dp",), "f32"), (("node",), "s8")}


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
    transform = dist.compressed_mean("top_k", "dp")

    @op.kernel
    def start(x):
        return transform.init(x)

    x = jax.device_put(np.ones((4, 6), np.float32), NamedSharding(DP.jax, P()))
    assert start(x).residual.shape == (8, 4, 6)
