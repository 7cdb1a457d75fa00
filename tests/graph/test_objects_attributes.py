# SPDX-License-Identifier: Apache-2.0
"""NNX objects with static attributes that have no hash, as ``jax.jit`` takes them.

``jax.jit`` goes on with the program of an earlier content where one of them is changed
in place; a ``ts.function`` compares what they hold.
"""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tessera as ts

X = jnp.ones(2)


@dataclasses.dataclass
class Config:
    sizes: list[int]
    rate: float = 0.5


@dataclasses.dataclass(frozen=True)
class Frozen:
    sizes: list[int]


class Holder(nnx.Module):
    def __init__(self, config):
        self.weight = nnx.Param(jnp.ones(2))
        self.config = nnx.static(config)


def sizes_of(config):
    if isinstance(config, dict):
        return config["sizes"]
    if isinstance(config, tuple):
        return config[1]
    return config if isinstance(config, list) else config.sizes


def scaled(model, x):
    return model.weight[...] * x * sum(sizes_of(model.config))


KINDS = {
    "list": list,
    "dict": lambda sizes: {"sizes": list(sizes), "act": jnp.tanh},
    "ordered": lambda sizes: collections.OrderedDict(sizes=list(sizes)),
    "tuple": lambda sizes: ("mlp", list(sizes)),
    "dataclass": lambda sizes: Config(list(sizes)),
    "frozen": lambda sizes: Frozen(list(sizes)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_is_compiled_for_what_an_attribute_holds(kind):
    make, step = KINDS[kind], ts.jit(scaled)
    model, like = Holder(make([2, 3])), Holder(make([2, 3]))
    config, sizes = model.config, sizes_of(model.config)
    for module in (model, like, model):
        np.testing.assert_array_equal(step(module, X), jax.jit(scaled)(module, X))
    assert step.num_programs() == 1
    assert model.config is config
    assert sizes_of(model.config) is sizes is not sizes_of(like.config)
    sizes.append(10)
    np.testing.assert_array_equal(step(model, X), X * 15)
    np.testing.assert_array_equal(step(like, X), X * 5)
    assert step.num_programs() == 2


def test_numbers_of_another_type_are_another_content():
    for numbers in ((1, 1.0, True), (0.0, -0.0)):
        step = ts.jit(lambda model: model.config[0])
        found = [step(Holder([number])).item() for number in numbers]
        assert list(map(repr, found)) == list(map(repr, numbers))


def test_so_they_are_in_a_set():
    numbers = (1, 1.0, True)
    step = ts.jit(lambda model: max(model.config))
    found = [step(Holder({number})).item() for number in numbers]
    assert list(map(repr, found)) == list(map(repr, numbers))


def test_a_change_of_an_attribute_reaches_the_caller_alone():
    @ts.jit
    def grow(model):
        model.config.append(len(model.config))

    models = [Holder([7]), Holder([7])]
    for model in models:
        grow(model)
        assert model.config == [7, 1]
    models[0].config.append(5)
    assert models[1].config == [7, 1]
    grow(models[1])
    assert models[1].config == [7, 1, 2]
    assert models[0].config == [7, 1, 5]


def test_objects_that_a_function_makes_have_attributes_of_their_own():
    make = ts.jit(lambda: Holder(Config([2, 3])))
    first, second = make(), make()
    first.config.sizes.append(10)
    assert second.config == Config([2, 3]) == make().config
    assert first.config.sizes == [2, 3, 10]
