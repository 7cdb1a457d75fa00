# SPDX-License-Identifier: Apache-2.0
"""A step that replaces weights which it is not given would read the first ones again.

``jax.jit`` leaves a traced value behind and trains nothing, without a word.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tessera as ts
from tessera import dist
from tessera.errors import WriteBackError

X = np.ones((8, 4), np.float32)
W = jnp.ones(4)
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


class Slots:
    __slots__ = ("w",)


@pytest.mark.parametrize("kind", [Model, Slots])
@pytest.mark.parametrize("is_given", [False, True])
def test_what_is_replaced_between_calls_is_named_once(kind, is_given):
    """The program keeps the first array, as one of ``jax.jit`` does."""
    holder = kind.__new__(kind)
    holder.w = jnp.ones(4)
    step = ts.function(lambda x, of=None: jnp.sum(x @ (of or holder).w))
    given = [holder] if is_given else []
    first = step(X, *given)
    step(X, *given)
    holder.w = holder.w * 2
    with pytest.warns(ts.TesseraWarning, match=r"w as of its first call") as caught:
        assert step(X, *given) == first
    assert caught[0].filename == __file__
    step(X, *given)
    step.clear_cache()
    assert step(X, *given) == 2 * first


_rate, _count = 0.5, 0


def test_a_number_that_is_another_one_at_a_later_call_is_named():
    global _rate
    scale = 2.0
    step = ts.function(
        functools.partial(lambda w, x: jnp.sum(x @ w) * scale * _rate, W)
    )
    assert step(X) == 32.0
    scale, _rate = 4.0 / 2.0, 1.0 / 2.0  # other objects, and the same numbers
    step(X)
    scale, _rate = 3.0, 1.0
    with pytest.warns(ts.TesseraWarning, match="reads scale, _rate as of its first"):
        assert step(X) == 32.0
    step.clear_cache()
    assert step(X) == 96.0


def test_numbers_that_the_step_does_not_read_may_change():
    """Those of functions that it does not call, and attributes of the same name."""

    class Trainer:
        w = jnp.ones(4)

        def __init__(self):
            self.callbacks, self._count = [lambda: _count], 1

        def train(self, x):
            nonlocal traces
            traces += 1
            return jnp.sum(x @ self.w) * self._count

    global _count
    traces = 0
    step = ts.function(Trainer().train)
    for _count in range(3):
        step(X)
    assert traces == 1


def test_whatever_else_a_step_closes_over_may_change():
    box = {1: jnp.ones(4), "b": {3}, None: collections.deque([jnp.ones(4)])}
    box["itself"], box["rest"] = [box], iter([jnp.ones(4)])  # no pytrees of JAX
    data, w = np.ones((8, 4), np.float32), jnp.ones(4)

    @ts.function
    def step(x):
        box[2] = x
        return jnp.sum(x @ w) if data is not None and box["b"] else x

    step(X)
    data = data * 2
    box[1] = box[None].pop()
    step(X)


def test_a_module_of_flax_that_is_closed_over_is_to_be_passed():
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))

    @ts.function
    def step(x):
        return nnx.value_and_grad(lambda model: jnp.sum(model(x)))(model)[0]

    with pytest.raises(WriteBackError, match="pass it to the function as an argument"):
        step(X)
