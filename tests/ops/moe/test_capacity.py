# SPDX-License-Identifier: Apache-2.0
"""Capacities, against loops over sequences, choices and tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.ops.moe.capacity import slots
from tessera.ops.moe.experts import Weights
from tessera.ops.moe.layer import ExpertLayout, expert_layer
from tessera.ops.moe.routing import RoutingOptions, route
from tests.ops.moe.reference import reference


def taken_by_loops(experts, num_experts, capacity):
    """Which choices find a place: first choices first, earlier tokens first."""
    taken = np.zeros(experts.shape, bool)
    for sequence in range(len(experts)):
        free = np.full(num_experts, capacity)
        for choice in range(experts.shape[2]):
            for token in range(experts.shape[1]):
                expert = experts[sequence, token, choice]
                taken[sequence, token, choice] = free[expert] > 0
                free[expert] -= 1
    return taken


@given(
    seed=st.integers(0, 2**16),
    capacity=st.integers(1, 5),
)
def test_first_choices_and_earlier_tokens_go_first(seed, capacity):
    draw = np.random.default_rng(seed)
    experts = np.argsort(draw.random((2, 5, 4)), axis=-1)[..., :2].astype("i4")
    found = np.asarray(slots(jnp.asarray(experts), 4, capacity))
    taken = taken_by_loops(experts, 4, capacity)
    np.testing.assert_array_equal(found < 4 * capacity, taken)
    np.testing.assert_array_equal(found[taken] // capacity, experts[taken])
    for sequence, kept in zip(found, taken, strict=True):
        assert len(set(sequence[kept])) == kept.sum(), "a slot is taken twice"


def sized(seed=0):
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(3, 8, 4)).astype("f4")
    shapes = (4, 4), (4, 4, 6), (4, 4, 6), (4, 6, 4)
    return x, Weights(*(draw.normal(size=shape).astype("f4") for shape in shapes))


def test_what_is_dropped_adds_nothing_and_is_counted():
    x, weights = sized()
    options = RoutingOptions(top_k=2, capacity_factor=0.5)
    out, statistics = jax.jit(expert_layer, static_argnums=(2, 3))(
        x, weights, options, ExpertLayout()
    )
    routes = route(x, weights.router, options)
    taken = taken_by_loops(np.asarray(routes.experts), 4, 2)
    wanted = np.zeros_like(x)
    for row, column, choice in np.argwhere(taken):
        expert = int(routes.experts[row, column, choice])
        token = x[row, column]
        hidden = jax.nn.gelu(token @ weights.gate[expert]) * (
            token @ weights.up[expert]
        )
        weight = float(routes.weights[row, column, choice])
        wanted[row, column] += weight * (hidden @ weights.down[expert])
    np.testing.assert_allclose(out, wanted, atol=1e-4)
    np.testing.assert_allclose(statistics.dropped_fraction, 1 - taken.mean(), rtol=1e-6)
    lost = ~taken.any(axis=-1)
    assert lost.any(), "a token of which nothing is left is worth seeing"
    assert (np.asarray(out)[lost] == 0).all()


@pytest.mark.full
def test_with_room_for_all_nothing_is_dropped():
    x, weights = jax.tree.map(jnp.asarray, sized())
    options = RoutingOptions(top_k=2, capacity_factor=8.0)
    out, statistics = expert_layer(x, weights, options, ExpertLayout())
    assert statistics.dropped_fraction == 0
    np.testing.assert_allclose(out, reference(x, weights, options), atol=1e-5)
