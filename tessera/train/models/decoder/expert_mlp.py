# SPDX-License-Identifier: Apache-2.0
"""A mixture-of-experts MLP for a decoder block, and the losses of its router.

``tessera.ops.moe`` computes the layer; this module declares its parameters, stacked
over layers as in ``layers.py``, and their layout.
"""

from collections.abc import Mapping
from functools import partial
from typing import Final

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from tessera.ops.moe.experts import Weights
from tessera.ops.moe.layer import ExpertLayout, expert_layer
from tessera.ops.moe.routing import RoutingOptions
from tessera.ops.operand_layouts import region_mesh
from tessera.train.models.decoder.config import DecoderConfig
from tessera.train.models.decoder.layers import fan_in_init, parameter
from tessera.train.models.partition_rules import Placement

# Logical dim names of [batch, sequence, d_model] activations.
Names = tuple[str | None, ...]


ROUTER_METRICS: Final = (
    "router_loss",
    "router_balance_loss",
    "router_z_loss",
    "router_entropy",
    "router_max_load",
)


class Experts(nnx.Module):
    """Gated MLPs, a few of which process each token.

    Source: Shazeer et al., arXiv 1701.06538.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        layers, experts = {"layers": config.num_layers}, {"experts": config.num_experts}
        embed, mlp = {"embed": config.d_model}, {"mlp": config.mlp_dim}
        router = layers | embed | {"router": config.num_experts}
        wide, narrow = layers | experts | embed | mlp, layers | experts | mlp | embed
        self.router = parameter(fan_in_init(-2, -1, 0), rngs.params(), router)
        init = fan_in_init(-2, -1, (0, 1))
        self.gate = parameter(init, rngs.params(), wide)
        self.up = parameter(init, rngs.params(), wide)
        self.down = parameter(init, rngs.params(), narrow)
        if config.expert_biases:
            zeros = partial(parameter, jax.nn.initializers.zeros, None)
            self.router_bias = zeros(layers | {"router": config.num_experts})
            self.gate_bias = zeros(layers | experts | mlp)
            self.up_bias = zeros(layers | experts | mlp)
            self.down_bias = zeros(layers | experts | {"norm": config.d_model})
        self.options = RoutingOptions(
            top_k=config.experts_per_token,
            renormalize=config.renormalize_experts,
            activation=config.activation,
        )

    def __call__(
        self,
        x_BSD: Float[Array, "batch seq d_model"],
        place: Placement,
        names: Names,
    ) -> tuple[Float[Array, "batch seq d_model"], dict[str, Array]]:
        """Process each position by its experts; returns the router's statistics too.

        Args:
          x_BSD: Activations.
          place: The mesh and layout of the model.
          names: Logical names of the activations' dims.
        """
        present = (name for name in Weights._fields if hasattr(self, name))
        weights = Weights(**{name: getattr(self, name)[...] for name in present})
        layout = _layout(place, names)
        out_BSD, statistics = expert_layer(x_BSD, weights, self.options, layout)
        return out_BSD, dict(vars(statistics))


def _layout(place: Placement, names: Names) -> ExpertLayout:
    if place.mesh is None or place.mesh.size == 1:
        return ExpertLayout()
    batch, sequence = (place.axes(name) if name else () for name in names[:2])
    return ExpertLayout(
        mesh=region_mesh(place.mesh),
        batch=batch,
        sequence=sequence,
        experts=place.axes("experts"),
        hidden=place.axes("mlp"),
        embed=place.axes("embed"),
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
      statistics: Per layer, as ``DecoderModel.run_blocks`` gives them, of all layers
        or some.
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
        load.sum() / config.num_layers,
    )
    return {
        name: tokens * value for name, value in zip(ROUTER_METRICS, values, strict=True)
    }
