# SPDX-License-Identifier: Apache-2.0
"""What a layer of experts computes, written to be read.

Every expert runs on every token, and a token keeps what its own experts said. It costs
E / K times as much as necessary, sorts nothing, sends nothing and drops nothing: what
is faster is tested against it.
"""

import jax
import jax.numpy as jnp
from jax import Array

from tessera.ops.moe.experts import Weights
from tessera.ops.moe.routing import RoutingOptions, route


def reference(x: Array, weights: Weights, options: RoutingOptions) -> Array:
    """The dropless layer: ``[..., D]`` to ``[..., D]``.

    Example:
      >>> x = jnp.ones((2, 3, 4))
      >>> weights = Weights(
      ...     jnp.eye(4, 8), *jnp.ones((2, 8, 4, 16)), jnp.ones((8, 16, 4))
      ... )
      >>> reference(x, weights, RoutingOptions(top_k=2)).shape
      (2, 3, 4)
    """
    routes = route(x, weights.router, options)
    out = jnp.zeros_like(x)
    for expert in range(weights.router.shape[-1]):
        chosen = routes.experts == expert
        weight = jnp.where(chosen, routes.weights, 0.0).sum(axis=-1, keepdims=True)
        gate = jax.nn.gelu(x @ weights.gate[expert], approximate=True)
        said = (gate * (x @ weights.up[expert])) @ weights.down[expert]
        out = out + weight.astype(x.dtype) * said
    return out
