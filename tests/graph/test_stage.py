# SPDX-License-Identifier: Apache-2.0
"""``graph.stage``: names for parts of a model, inside steps and by themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera import graph, op
from tessera.errors import (
    OutsideTraceError,
)
from tessera.tracing import scope

KEY = jax.random.key(0)


X = jax.random.normal(KEY, (8, 8))


ROWS = jnp.linspace(-1.0, 1.0, 64, dtype=jnp.float32).reshape(8, 8)


# --- stages


def test_the_parameters_of_a_stage_are_found_under_its_name():
    @graph.stage("encoder")
    def encoder(x):
        return op.transformer_block(x)

    @graph.stage("decoder")
    def decoder(x):
        return op.transformer_block(op.transformer_block(x))

    @graph.training_step
    def step(x):
        return graph.backward(jnp.mean(decoder(encoder(x)) ** 2))

    outputs = step.trace(X[None]).origin.graph.outputs
    assert sorted(step.params) == ["decoder", "encoder"]
    assert sorted(step.params["decoder"]) == ["block", "block_1"]
    assert len(outputs) == len(jax.tree.leaves(step.params)) == 3 * 8


def test_a_stage_can_be_called_by_itself():
    @graph.stage("encoder")
    def encoder(x):
        return x @ scope.parameter("w", (8, 2), init="ones")

    np.testing.assert_allclose(encoder(ROWS), ROWS @ jnp.ones((8, 2)), rtol=1e-6)
    assert list(encoder.params["encoder"]) == ["w"]


def test_the_operations_of_a_stage_are_found_under_its_name():
    @graph.stage("encoder")
    def encoder(x):
        return jnp.sin(x)

    step = graph.training_step(lambda x: encoder(x))
    assert "encoder/sin" in step.compile(X).as_text()


def test_a_stage_called_in_plain_jax_owns_its_parameters():
    @graph.stage("encoder")
    def encoder(x):
        return x @ scope.parameter("w", (8, 2), init="normal")

    found = jax.jit(lambda x: encoder(x))(ROWS)
    np.testing.assert_allclose(
        found, ROWS @ encoder.params["encoder"]["w"], rtol=1e-5, atol=1e-6
    )
    assert isinstance(encoder.params["encoder"]["w"], jax.Array)
    assert not isinstance(encoder.params["encoder"]["w"], jax.core.Tracer)


def test_operations_with_parameters_need_a_step():
    with pytest.raises(OutsideTraceError, match="T302"):
        op.transformer_block(X[None], num_heads=2)
