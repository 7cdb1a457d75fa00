# SPDX-License-Identifier: Apache-2.0
"""Experts in the place of a block's MLP.

The layer itself is ``tessera.ops.moe``; here are its parameters, stacked over layers as
those of the other parts are, and where they lie.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from tessera.models.gemma3_config import Gemma3Config
from tessera.models.layers import parameter
from tessera.models.partition_rules import Placement
from tessera.ops.moe.experts import Weights
from tessera.ops.moe.layer import ExpertLayout, expert_layer
from tessera.ops.moe.routing import RoutingOptions
from tessera.ops.operand_layouts import region_mesh

# Of [batch, sequence, d_model] activations, by logical names.
Names = tuple[str | None, ...]


class Experts(nnx.Module):
    """Gated MLPs, of which each token goes through a few.

    Source: Shazeer et al., arXiv 1701.06538.
    """

    def __init__(self, config: Gemma3Config, *, rngs: nnx.Rngs) -> None:
        # Truncated normal of variance 1 / fan-in; layers and experts share no input.
        init = jax.nn.initializers.variance_scaling(
            1.0, "fan_in", "truncated_normal", in_axis=-2, out_axis=-1, batch_axis=0
        )
        many = jax.nn.initializers.variance_scaling(
            1.0,
            "fan_in",
            "truncated_normal",
            in_axis=-2,
            out_axis=-1,
            batch_axis=(0, 1),
        )
        layers, experts = config.num_layers, config.num_experts
        wide = (layers, experts, config.d_model, config.mlp_dim)
        narrow = (layers, experts, config.mlp_dim, config.d_model)
        shape = (layers, config.d_model, experts)
        self.router = parameter(
            init(rngs.params(), shape, jnp.float32), "layers", "embed", "router"
        )
        names = ("layers", "experts", "embed", "mlp")
        self.gate = parameter(many(rngs.params(), wide, jnp.float32), *names)
        self.up = parameter(many(rngs.params(), wide, jnp.float32), *names)
        self.down = parameter(
            many(rngs.params(), narrow, jnp.float32),
            "layers",
            "experts",
            "mlp",
            "embed",
        )
        self.options = RoutingOptions(
            top_k=config.experts_per_token, capacity_factor=config.capacity_factor
        )

    def __call__(
        self,
        x_BSD: Float[Array, "batch seq d_model"],
        place: Placement,
        names: Names,
    ) -> tuple[Float[Array, "batch seq d_model"], dict[str, Array]]:
        """Each position through its experts, and the router's statistics by name.

        Args:
          x_BSD: Activations.
          place: Where they are.
          names: What splits their dims.
        """
        weights = Weights(
            *(p[...] for p in (self.router, self.gate, self.up, self.down))
        )
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
