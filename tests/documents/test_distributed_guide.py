# SPDX-License-Identifier: Apache-2.0
"""The ways of the PyTorch guide in Tessera, each against plain training on one device.

A mesh stands for the processes of the guide: each device has its own rows, gradients
and, at first, parameters.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera import dist, op
from tessera.train.config.optimizer_config import scaled_learning_rate
from tessera.train.data import EpochSampler

MESH = dist.Mesh(axes=["dp"], devices=range(8))
DRAW = np.random.default_rng(0)
INPUTS = DRAW.normal(size=(40, 4)).astype(np.float32)
TARGETS = (INPUTS @ DRAW.normal(size=4)).astype(np.float32)
EPOCHS, BATCH = 3, 16


def loss(params, x, y):
    return ((x @ params["w"] + params["b"] - y) ** 2).mean()


def first_params():
    return {"w": jnp.zeros(4, jnp.float32), "b": jnp.zeros((), jnp.float32)}


def trained_alone(optimizer):
    """Plain JAX on one device, over the same epochs."""
    params = first_params()
    state = optimizer.init(params)
    for epoch in range(EPOCHS):
        for batch in EpochSampler(40, BATCH).epoch(epoch):
            gradients = jax.grad(loss)(params, INPUTS[batch], TARGETS[batch])
            updates, state = optimizer.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
    return params


def assert_alike(got, expected):
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=2e-5, atol=1e-6)


def test_ddp_sampler_broadcast_and_wrapped_optimizer_together():
    rate = scaled_learning_rate(0.0125, world_size=8, rule="linear")
    plain = optax.sgd(rate, momentum=0.9)
    optimizer = dist.average_gradients(plain, axis="dp")

    @op.kernel
    def begin(noise):
        # Every device draws its own; that of rank 0 is what all begin with.
        own = jax.tree.map(lambda p: p + noise[0], first_params())
        return dist.broadcast(own, axis="dp", root=0)

    @op.kernel
    def step(params, state, x, y):
        gradients = jax.grad(loss)(dist.per_device(params, axis="dp"), x, y)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    rows = NamedSharding(MESH.jax, P("dp"))
    params = begin(jax.device_put(jnp.arange(8, dtype=jnp.float32), rows))
    assert params["w"].sharding.is_fully_replicated
    state = optimizer.init(params)
    samplers = [EpochSampler(40, BATCH, rank, 8) for rank in range(8)]
    for epoch in range(EPOCHS):
        for parts in zip(*(s.epoch(epoch) for s in samplers), strict=True):
            mine = np.concatenate(parts)
            x, y = jax.device_put((INPUTS[mine], TARGETS[mine]), rows)
            params, state = step(params, state, x, y)
    assert_alike(params, trained_alone(plain))


def test_accumulation_over_microbatches_in_one_step():
    optimizer = optax.sgd(0.1)

    @ts.function(mesh=MESH)
    def step(params, x, y):
        def add(total, micro):
            gradients = ts.grad(loss(params, *micro), params)
            return jax.tree.map(jnp.add, total, gradients), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        total, _ = jax.lax.scan(add, zeros, (x, y))
        gradients = jax.tree.map(lambda g: g / x.shape[0], total)
        updates, _ = optimizer.update(gradients, optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    rows = NamedSharding(MESH.jax, P(None, "dp"))
    params = first_params()
    for epoch in range(EPOCHS):
        for batch in EpochSampler(40, BATCH).epoch(epoch):
            folded = INPUTS[batch].reshape(2, 8, 4), TARGETS[batch].reshape(2, 8)
            params = step(params, *jax.device_put(folded, rows))
    assert_alike(params, trained_alone(optimizer))


def test_accumulation_over_calls_of_a_step():
    optimizer = optax.MultiSteps(optax.sgd(0.1), every_k_schedule=2)
    wrapped = dist.average_gradients(optimizer, axis="dp")

    @op.kernel
    def step(params, state, x, y):
        gradients = jax.grad(loss)(dist.per_device(params, axis="dp"), x, y)
        updates, state = wrapped.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    rows = NamedSharding(MESH.jax, P("dp"))
    params = first_params()
    # Optax mixes Python numbers and counters, which the tests' strictness refuses.
    with jax.numpy_dtype_promotion("standard"):
        state = wrapped.init(params)
        for epoch in range(EPOCHS):
            for batch in EpochSampler(40, BATCH).epoch(epoch):
                for half in np.split(batch, 2):
                    x, y = jax.device_put((INPUTS[half], TARGETS[half]), rows)
                    params, state = step(params, state, x, y)
    assert_alike(params, trained_alone(optax.sgd(0.1)))


def test_parameters_and_optimizer_state_of_one_rank_for_all():
    """Horovod's broadcast_parameters and broadcast_optimizer_state."""
    optimizer = optax.adam(0.1)

    def drawn(rank):
        params = jax.tree.map(lambda p: p + rank, first_params())
        state = optimizer.init(params)
        counter = state[0]._replace(count=state[0].count + rank.astype(jnp.int32))
        return params, (counter, *state[1:])

    @op.kernel
    def begin(rank):
        return dist.broadcast(drawn(rank[0]), axis="dp", root=2)

    ranks = jax.device_put(
        jnp.arange(8, dtype=jnp.float32), NamedSharding(MESH.jax, P("dp"))
    )
    got, expected = begin(ranks), drawn(jnp.float32(2))
    for left, right in zip(
        jax.tree.leaves(got), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_array_equal(left, right)
        assert left.dtype == right.dtype
