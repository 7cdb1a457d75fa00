# SPDX-License-Identifier: Apache-2.0
"""Clipping by the global norm as a step of an Optax optimizer."""

from typing import Any

import jax
import optax

from tessera.ops import clipping
from tessera.tree import Tree

# Nested containers of arrays, as parameters and gradients are.


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Scale gradients whose global norm is above ``max_norm`` down to it.

    Unlike Optax's, the norm is float32 whatever the gradients' dtype, and gradients
    with a NaN among them are left as they are instead of all becoming NaN. Who
    knows the norm already gives it to ``update`` as the argument ``norm``.

    Source: arXiv 1211.5063.
    """

    def init(params: Tree) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def update(
        updates: Tree,
        state: Any,
        params: Tree = None,
        *,
        norm: jax.Array | None = None,
        **extra: Any,
    ) -> tuple[Tree, Any]:
        del params, extra
        norm = clipping.global_norm(updates) if norm is None else norm
        return clipping.scaled_down(updates, norm, max_norm), state

    return optax.GradientTransformationExtraArgs(init, update)
