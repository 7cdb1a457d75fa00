# SPDX-License-Identifier: Apache-2.0
"""``ts.global_norm`` and gradient clipping, for the trainer and for users' steps."""

from typing import Any

import jax
import jax.numpy as jnp

from tessera.errors import OperandError
from tessera.foundations.tree import Tree

# Nested containers of arrays, as parameters and gradients are.


def global_norm(tree: Tree) -> jax.Array:
    """The Euclidean norm of all numbers of a tree, computed in f32.

    The norm of global arrays, however they are sharded; inside an SPMD region, such as
    ``op.kernel``, of this device's blocks.

    Example:
      >>> float(global_norm({"a": jnp.full((3,), 2.0), "b": jnp.full((), 2.0)}))
      4.0
    """
    squares = [
        jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)
    ]
    return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


def clip_by_global_norm(gradients: Tree, max_norm: Any) -> tuple[Tree, jax.Array]:
    """Scale gradients down to ``max_norm`` where their global norm exceeds it.

    Args:
      gradients: Tree of floating-point arrays.
      max_norm: The limit, a positive number.

    Returns:
      A tree of the same shapes and dtypes, and the norm before clipping, f32. Gradients
      that contain a NaN are returned unchanged, instead of all becoming NaN.

    Raises:
      OperandError: [T401] the limit is not positive.

    Example:
      >>> clipped, norm = clip_by_global_norm({"w": jnp.array([3.0, 4.0])}, 1.0)
      >>> print(clipped["w"], norm)
      [0.6 0.8] 5.0

    Source: Pascanu et al., arXiv 1211.5063.
    """
    if isinstance(max_norm, int | float) and not max_norm > 0:
        raise OperandError(
            f"gradients cannot be clipped to max_norm={max_norm}",
            fix="use a positive number, or do not clip",
        )
    norm = global_norm(gradients)
    return scaled_down(gradients, norm, max_norm), norm


def scaled_down(gradients: Tree, norm: jax.Array, max_norm: Any) -> Tree:
    """Scale gradients down to ``max_norm`` where ``norm``, their norm, exceeds it."""
    scale = jnp.where(norm > max_norm, max_norm / norm, 1.0)

    def scaled(leaf: jax.Array) -> jax.Array:
        return leaf * scale.astype(leaf.dtype)

    return jax.tree.map(scaled, gradients)
