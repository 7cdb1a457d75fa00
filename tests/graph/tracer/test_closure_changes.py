# SPDX-License-Identifier: Apache-2.0
"""A step that replaces weights which it is not given would read the first ones again.

``jax.jit`` leaves a traced value behind and trains nothing, without a word.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tessera as ts
from tessera import dist
from tessera.errors import WriteBackError

X = np.ones((8, 4), np.float32)
_weights = {"w": jnp.ones(4)}
_tree = {"w": jnp.ones(4)}


def slopes(w, x):
    return ts.grad(jnp.mean((x @ w) ** 2), w)


class Model:
    def __init__(self, w):
        self.w = w
        self.mean = jnp.zeros(())

    def train(self, x):
        self.w = self.w - 0.1 * slopes(self.w, x)
        return jnp.sum(self.w)

    def forward(self, x):
        self.mean = jnp.mean(x)
        return jnp.sum(x @ self.w) + self.mean

    step = ts.function(train)


def of_a_module(x):
    _weights["w"] = _weights["w"] - slopes(_weights["w"], x)
    return jnp.sum(x)


def of_a_tree(x):
    global _tree
    _tree = jax.tree.map(lambda w: w - slopes(w, x), _tree)
    return jnp.sum(x)


def of_a_closure():
    w = jnp.ones(4)

    def step(x):
        nonlocal w
        w = w - slopes(w, x)
        return jnp.sum(w)

    return step


def of_a_partial(state, x):
    state["w"] = state["w"] - slopes(state["w"], x)
    return jnp.sum(x)


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (of_a_module, "w"),
        (of_a_tree, "_tree"),
        (of_a_closure(), "w"),
        (functools.partial(of_a_partial, {"w": jnp.ones(4)}), "w"),
        (Model(jnp.ones(4)).train, "Model.w"),
        (Model(np.ones(4, np.float32)).train, "Model.w"),
        (Model(dist.tensor((4,), init="ones")).train, "Model.w"),
        (ts.distribute("data_parallel")(Model(jnp.ones(4)).train), "Model.w"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_a_step_replaces_and_is_not_given_is_named_and_put_back(step, name):
    for _ in range(2):
        with pytest.raises(WriteBackError, match="replaces arrays") as caught:
            ts.function(step)(X)
        assert caught.value.got == name
    assert isinstance(_weights["w"], jax.Array)
    np.testing.assert_array_equal(_tree["w"], np.ones(4))


def test_a_method_that_is_a_step_names_the_attribute_of_its_object():
    model = Model(jnp.ones(4))
    with pytest.raises(WriteBackError, match=r"Model\.w"):
        model.step(X)
    np.testing.assert_array_equal(model.w, np.ones(4))


def test_what_is_written_before_it_is_read_changes_no_result():
    model = Model(jnp.ones(4))
    assert [float(ts.function(model.forward)(X)) for _ in range(2)] == [33.0, 33.0]


def test_a_module_of_flax_that_is_closed_over_is_to_be_passed():
    from flax import nnx

    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))

    @ts.function
    def step(x):
        return nnx.value_and_grad(lambda model: jnp.sum(model(x)))(model)[0]

    with pytest.raises(WriteBackError, match="pass it to the function as an argument"):
        step(X)
