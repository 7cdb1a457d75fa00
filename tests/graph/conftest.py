# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of ``tessera.graph``."""

import jax
import pytest
from flax import nnx

from tessera.graph import pass_runner
from tests.graph.nnx_modules import X, block, optimizer, state_of, train_by_nnx


@pytest.fixture(autouse=True)
def checked_programs(monkeypatch):
    """JAX checks the program that each pass makes."""
    verify = pass_runner.verify

    def verify_and_check(graph):
        with jax.enable_checks(True):
            verify(graph)

    monkeypatch.setattr(pass_runner, "verify", verify_and_check)


@pytest.fixture
def steps():
    """The model, optimizer and losses of three steps of ``nnx.jit``."""
    model = block()
    state = optimizer(model)
    step = nnx.jit(train_by_nnx)
    losses = [step(model, state, X) for _ in range(3)]
    return state_of(model, state), losses
