# SPDX-License-Identifier: Apache-2.0
"""What the routers of a model with experts add to a step: two losses, five metrics."""

from collections.abc import Mapping
from typing import Final

import jax.numpy as jnp
from jaxtyping import Array, Float

from tessera.models.config import Gemma3Config

ROUTER_METRICS: Final = (
    "router_balance_loss",
    "router_z_loss",
    "router_entropy",
    "router_dropped_fraction",
    "router_max_load",
)


def router_loss(
    config: Gemma3Config, statistics: Mapping[str, Array]
) -> Float[Array, ""]:
    """The weighted losses of all routers, to be added to a mean loss in nats per token.

    Args:
      config: For the weights.
      statistics: Per layer, as ``Gemma3.decode`` gives them; none give zero.
    """
    if not statistics:
        return jnp.float32(0.0)
    balance = statistics["load_balancing_loss"].sum()
    return (
        config.router_balance_weight * balance
        + config.router_z_weight * statistics["z_loss"].sum()
    )


def router_metrics(statistics: Mapping[str, Array]) -> dict[str, Float[Array, ""]]:
    """Means over layers, by the names of ``ROUTER_METRICS``; empty without experts.

    ``router_max_load`` is how often the most popular expert of a layer was chosen, in
    multiples of what would be even.
    """
    if not statistics:
        return {}
    counts = statistics["tokens_per_expert"]
    values = (
        statistics["load_balancing_loss"],
        statistics["z_loss"],
        statistics["entropy"],
        statistics["dropped_fraction"],
        counts.max(axis=-1) / counts.mean(axis=-1),
    )
    return {
        name: value.mean() for name, value in zip(ROUTER_METRICS, values, strict=True)
    }
