# SPDX-License-Identifier: Apache-2.0
"""The norm of all gradients together, and its upper limit.

One definition for what the trainer logs and for what it clips by.
"""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

# Nested containers of arrays, as parameters and gradients are.
Tree: TypeAlias = Any


def global_norm(tree: Tree) -> Float[Array, ""]:
    """The Euclidean norm of all numbers of a tree, float32 inside and out.

    Example:
      >>> float(global_norm({"a": jnp.full((3,), 2.0), "b": jnp.full((), 2.0)}))
      4.0
    """
    squares = [
        jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)
    ]
    return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Scale gradients whose global norm is above ``max_norm`` down to it.

    Unlike Optax's, the norm is float32 whatever the gradients' dtype, and gradients
    with a NaN among them are left as they are instead of all becoming NaN.

    Source: arXiv 1211.5063.
    """

    def update(updates: Tree, params: Tree = None) -> Tree:
        del params
        norm = global_norm(updates)
        scale = jnp.where(norm > max_norm, max_norm / norm, 1.0)

        def scaled(leaf: Array) -> Array:
            return leaf * scale.astype(leaf.dtype)

        return jax.tree.map(scaled, updates)

    return optax.stateless(update)
