# SPDX-License-Identifier: Apache-2.0
"""What routers add to a step's loss and metrics."""

import jax.numpy as jnp
import numpy as np

from tessera.train.models import config_of
from tessera.train.models.decoder.expert_mlp import ROUTER_METRICS, router_sums

CONFIG = config_of("moe_tiny")
STATISTICS = {
    "load_balancing_loss": jnp.array([1.0, 1.5, 1.0, 1.0, 1.0, 1.25]),
    "z_loss": jnp.array([4.0, 0.0, 0.0, 0.0, 2.0, 0.0]),
    "entropy": jnp.full(6, 2.0),
    "tokens_per_expert": jnp.array([[3.0, 1.0]] + [[2.0, 2.0]] * 5),
}


def test_the_trained_loss_adds_up_layers_and_the_others_are_their_means():
    sums = router_sums(CONFIG, STATISTICS, jnp.float32(1.0))
    assert tuple(sums) == ROUTER_METRICS
    np.testing.assert_allclose(
        list(sums.values()),
        [0.01 * 6.75 + 0.001 * 6.0, 6.75 / 6, 1.0, 2.0, 6.5 / 6],
        rtol=1e-6,
    )


def test_all_are_times_the_tokens_of_the_microbatch():
    once = router_sums(CONFIG, STATISTICS, jnp.float32(1.0))
    many = router_sums(CONFIG, STATISTICS, jnp.float32(96.0))
    for name in ROUTER_METRICS:
        np.testing.assert_allclose(many[name], 96 * once[name], rtol=1e-6)


def test_the_parts_of_a_model_add_up_to_the_whole():
    tokens = jnp.float32(5.0)
    whole = router_sums(CONFIG, STATISTICS, tokens)
    # A part may hold a layer that does nothing: zeros.
    parts = [
        router_sums(CONFIG, {n: a[:4] for n, a in STATISTICS.items()}, tokens),
        router_sums(
            CONFIG,
            {n: jnp.concatenate([a[4:], 0 * a[:1]]) for n, a in STATISTICS.items()},
            tokens,
        ),
    ]
    for name in ROUTER_METRICS:
        added = sum(part[name] for part in parts)
        np.testing.assert_allclose(added, whole[name], rtol=1e-6)


def test_a_model_without_experts_adds_nothing():
    assert router_sums(config_of("tiny"), {}, jnp.float32(1.0)) == {}
