# SPDX-License-Identifier: Apache-2.0
"""What a function keeps alive: its programs, and not the arguments of calls."""

import gc
import weakref
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest

import tessera as ts

X = jnp.linspace(-1.0, 1.0, 8, dtype=jnp.float32)


@pytest.mark.slow(reason="it collects the garbage of all tests before it")
def test_arrays_of_calls_are_not_kept_alive():
    step = ts.function(lambda state, x, more=None: x)
    alive = []
    for size in (8, 4, 8, 4):
        x = jnp.ones(size) * 2
        step({"a": x}, x * 1, np.ones(size))
        alive.append(weakref.ref(x))
        del x
    gc.collect()
    assert [ref() for ref in alive] == [None] * 4


@pytest.mark.slow(reason="it collects the garbage of all tests before it")
def test_a_function_that_is_dropped_drops_its_programs_and_what_they_capture():
    def used_and_dropped():
        captured = jnp.ones(8) * 3
        step = ts.function(lambda x: x * captured)
        for array in (X, X[:, None], X, X[:, None]):
            step(array)
        return weakref.ref(step.last), weakref.ref(captured)

    references = used_and_dropped()
    gc.collect()
    assert [reference() for reference in references] == [None, None]


@dataclass(frozen=True)
class Config:
    rate: float


@pytest.mark.slow(reason="it collects the garbage of all tests before it")
def test_values_that_equal_a_programs_own_are_not_kept_alive():
    step = ts.function(lambda x, config: x * config.rate)
    step(X, Config(0.5))
    refs = []
    for _ in range(3):
        config = Config(0.5)
        step(X, config)
        step(X[:4], Config(0.5))
        refs.append(weakref.ref(config))
        del config
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3
