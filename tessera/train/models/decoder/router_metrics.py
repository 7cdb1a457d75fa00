# SPDX-License-Identifier: Apache-2.0
"""Losses and metrics of the routers of a model with experts."""

from collections.abc import Mapping
from typing import Final

import jax.numpy as jnp
from jaxtyping import Array, Float

from tessera.train.models.decoder.config import DecoderConfig

ROUTER_METRICS: Final = (
    "router_loss",
    "router_balance_loss",
    "router_z_loss",
    "router_entropy",
    "router_dropped_fraction",
    "router_max_load",
)


def router_sums(
    config: DecoderConfig, statistics: Mapping[str, Array], tokens: Float[Array, ""]
) -> dict[str, Float[Array, ""]]:
    """The numbers of one microbatch's routers, each times its number of tokens.

    So they add up over microbatches, and over the parts of a model, as the summed
    cross-entropy does, and share its divisor. ``router_loss`` is the one that is
    trained: the weighted losses of all layers. The others are means over layers;
    ``router_max_load`` is how often a layer's most popular expert was chosen, in
    multiples of what would be even.

    Args:
      config: For the weights and the number of layers.
      statistics: Per layer, as ``Decoder.decode`` gives them, of all layers or some.
      tokens: Targets that count.

    Returns:
      f32 scalars by the names of ``ROUTER_METRICS``; nothing without experts.
    """
    if not statistics:
        return {}
    balance, z = statistics["load_balancing_loss"].sum(), statistics["z_loss"].sum()
    counts = statistics["tokens_per_expert"]
    # A layer that is not there has no counts.
    load = counts.max(axis=-1) / jnp.maximum(counts.mean(axis=-1), 1e-9)
    values = (
        config.router_balance_weight * balance + config.router_z_weight * z,
        balance / config.num_layers,
        z / config.num_layers,
        statistics["entropy"].sum() / config.num_layers,
        statistics["dropped_fraction"].sum() / config.num_layers,
        load.sum() / config.num_layers,
    )
    return {
        name: tokens * value for name, value in zip(ROUTER_METRICS, values, strict=True)
    }
