# SPDX-License-Identifier: Apache-2.0
"""A layer of experts that is written to be read."""

import jax.numpy as jnp
from jax import Array

from tessera.ops.activations import GATES
from tessera.ops.moe.experts import Weights
from tessera.ops.moe.routing import RoutingOptions, route


def reference(x: Array, weights: Weights, options: RoutingOptions) -> Array:
    """The dropless layer, ``[..., D]`` to ``[..., D]``, written to be read.

    Every expert runs on every token, at E / K times the necessary cost.

    """
    routes = route(x, weights.router, options, weights.router_bias)
    out = jnp.zeros_like(x)
    for expert in range(weights.router.shape[-1]):
        chosen = jnp.where(routes.experts == expert, routes.weights, 0.0)
        weight = chosen.sum(axis=-1, keepdims=True)
        gate, up = x @ weights.gate[expert], x @ weights.up[expert]
        if weights.gate_bias is not None:
            gate, up = gate + weights.gate_bias[expert], up + weights.up_bias[expert]
        expert_out = GATES[options.activation](gate, up) @ weights.down[expert]
        if weights.down_bias is not None:
            expert_out = expert_out + weights.down_bias[expert]
        out = out + weight.astype(x.dtype) * expert_out
    return out
