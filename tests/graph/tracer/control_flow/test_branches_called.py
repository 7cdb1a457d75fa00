# SPDX-License-Identifier: Apache-2.0
"""Branches in functions that a converted function calls, or that JAX calls for it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tessera as ts
from tessera.errors import ControlFlowError

X = jnp.arange(3.0)
YES, NO = jnp.array(True), jnp.array(False)


def clipped(x, limit):
    if jnp.max(x) > limit:
        return x * (limit / jnp.max(x))
    return x


class Model:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, x):
        if x[0] > 0:
            return self.scaled(x)
        return x

    def scaled(self, x):
        return x * self.scale if x[1] > 0 else -x


def test_functions_methods_objects_and_partials_that_are_called():
    @ts.function
    def function(x, model):
        helper = functools.partial(clipped, limit=1.0)
        return helper(model(x)), model.scaled(x), (lambda v: v if v[0] > 0 else -v)(x)

    found = function(X, Model(2.0))
    np.testing.assert_allclose(found[0], X * 0.5)
    np.testing.assert_array_equal(found[1], X * 2)
    np.testing.assert_array_equal(found[2], -X)


def test_functions_that_jax_calls():
    @ts.function
    def function(x):
        def sign(v):
            if v > 1:
                return v * 10
            return v

        def step(carry, v):
            if v > carry:
                carry = v
            return carry, carry

        mapped = jax.vmap(sign)(x)
        tree = jax.tree.map(lambda v: v if v[0] > 0 else -v, {"a": x})
        return mapped, jax.lax.scan(step, x[0], x)[0], tree

    mapped, largest, tree = function(X)
    np.testing.assert_array_equal(mapped, [0, 1, 20])
    assert float(largest) == 2
    np.testing.assert_array_equal(tree["a"], -X)


def test_a_helper_that_is_jitted_is_converted_with_the_rest():
    @jax.jit
    def helper(x):
        return x if x[1] > 0 else -x

    @ts.function
    def function(x):
        return helper(x)

    np.testing.assert_array_equal(function(X), X)


def test_an_optimizer_that_skips_steps_is_one_program():
    optimizer = optax.adam(0.1)

    @ts.function
    def step(params, state, x):
        loss = jnp.sum((params["w"] * x) ** 2)
        gradients = ts.grad(loss, params)
        if jnp.isfinite(loss):
            updates, state = optimizer.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    params = {"w": jnp.ones(3)}
    with jax.numpy_dtype_promotion("standard"):  # as Optax has it
        once, state = step(params, optimizer.init(params), X)
        again, state = step(once, state, X * jnp.inf)
    np.testing.assert_array_equal(again["w"], once["w"])
    assert int(state[0].count) == 1
    assert step.num_programs() == 1


def test_super_in_a_method():
    class Base:
        def double(self, x):
            return x * 2.0

    class Derived(Base):
        def double(self, x):
            if x[0] > 0:
                return super().double(x)
            return x + super().double(x)

    @ts.function
    def function(x):
        return Derived().double(x)

    np.testing.assert_array_equal(function(X), X * 3)


def test_functions_of_tessera_inside():
    @ts.function
    def inner(x):
        if x[0] > 0:
            x = x * 2.0
        return x

    @ts.function
    def outer(x, flag):
        if flag:
            x = inner(x)
        return x

    np.testing.assert_array_equal(outer(X + 1, YES), (X + 1) * 2)
    np.testing.assert_array_equal(jax.jit(lambda x: outer(x, YES))(X + 1), (X + 1) * 2)


def test_a_method_as_a_ts_function():
    class Trainer:
        def __init__(self):
            self.rate = 0.5

        @ts.function
        def step(self, x):
            return x * self.rate if x[0] > 0 else x

    np.testing.assert_array_equal(Trainer().step(X + 1), (X + 1) * 0.5)


def test_a_function_that_assigns_a_variable_around_it_is_refused():
    @ts.function
    def function(x, flag):
        count = 0

        def bump(by):
            nonlocal count
            count = count + by

        bump(2)
        return x * count if flag else x

    with pytest.raises(ControlFlowError, match=r"bump\(\), called at .*'count'"):
        function(X, YES)
