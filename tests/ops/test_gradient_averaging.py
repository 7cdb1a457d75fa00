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


def mapped(mesh=DP, axis="dp", check=True):
    """``[8, ...] -> [...]``: the mean over devices, each of which has one row."""
    transform = dist.average_gradients(optax.identity(), axis)

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
def test_it_is_the_mean_bit_for_bit(axis):
    mesh = DP if axis == "dp" else GRID
    x = blocks(5, 7)

    def plain(x):
        return dist.all_reduce(x[0], axis, "mean")

    spec = P(tuple(mesh.axes))
    region = jax.shard_map(plain, mesh=mesh.jax, in_specs=spec, out_specs=P())
    expected = jax.jit(region)(x)
    np.testing.assert_array_equal(mapped(mesh, axis)(x), expected)


def test_zeros_and_nothing_stay_so():
    for shape in [(8, 4), (8, 0)]:
        got = mapped()(np.zeros(shape, np.float32))
        np.testing.assert_array_equal(got, np.zeros(shape[1:]))


def test_a_narrow_gradient_keeps_its_dtype():
    x = jnp.ones((8, 16), jnp.bfloat16)
    assert mapped()(x).dtype == jnp.bfloat16


def test_it_works_where_jax_does_not_track_what_varies():
    x = blocks(33)
    np.testing.assert_array_equal(mapped(check=False)(x), mapped()(x))


# --- what it sends


def test_what_is_sent_for_each_value():
    """Of 64 Ki values: ``nbytes`` of the ledger, of which (n-1)/n are on the wire."""
    x, values = np.ones((8, 2**16), np.float32), 2**16
    assert sent(mapped(), x) == {("all-reduce", "f32"): 4 * values}


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
