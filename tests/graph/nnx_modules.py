# SPDX-License-Identifier: Apache-2.0
"""A module with every kind of state, and its training step under ``nnx.jit``."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import tessera as ts

X = jnp.linspace(-1.0, 1.0, 32).reshape(8, 4)


class Block(nnx.Module):
    """Has every kind of state: weights, statistics, random streams, a counter."""

    def __init__(self, rngs):
        self.up = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.List([nnx.Linear(8, 4, rngs=rngs)])
        self.calls = nnx.Variable(0)
        self.scale = 1.0

    def __call__(self, x):
        self.calls.set_value(self.calls.get_value() + 1)
        x = self.dropout(nnx.relu(self.norm(self.up(x))))
        return self.down[0](x) * self.scale


@functools.cache
def made():
    return Block(nnx.Rngs(0, dropout=1))


def block():
    return nnx.clone(made())


def optimizer(model):
    return nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


def loss_of(model, x):
    return jnp.mean(model(x) ** 2)


def train(model, optimizer, x):
    loss = loss_of(model, x)
    optimizer.update(model, ts.grad(loss, model))
    return loss


def train_by_nnx(model, optimizer, x):
    loss, gradients = nnx.value_and_grad(loss_of)(model, x)
    optimizer.update(model, gradients)
    return loss


def state_of(*objects):
    """Every array of some objects, by path."""
    flat = jax.tree_util.tree_flatten_with_path(nnx.state(objects))[0]

    def plain(leaf):
        dtype = getattr(leaf, "dtype", jnp.int32)
        is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    return {jax.tree_util.keystr(path): plain(leaf) for path, leaf in flat}


def check_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], atol=2e-6, err_msg=name)


def check_steps(step, steps, model=None):
    model = model or block()
    state = optimizer(model)
    losses = [step(model, state, X) for _ in range(3)]
    np.testing.assert_allclose(losses, steps[1], rtol=1e-5)
    check_equal(state_of(model, state), steps[0])
    return model, state
