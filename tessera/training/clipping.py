# SPDX-License-Identifier: Apache-2.0
"""Clipping by the global norm as a step of an Optax optimizer."""

from typing import Any, TypeAlias

import optax

from tessera.ops import clipping

# Nested containers of arrays, as parameters and gradients are.
Tree: TypeAlias = Any


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Scale gradients whose global norm is above ``max_norm`` down to it.

    Unlike Optax's, the norm is float32 whatever the gradients' dtype, and gradients
    with a NaN among them are left as they are instead of all becoming NaN.

    Source: arXiv 1211.5063.
    """

    def update(updates: Tree, params: Tree = None) -> Tree:
        del params
        return clipping.clip_by_global_norm(updates, max_norm)[0]

    return optax.stateless(update)
