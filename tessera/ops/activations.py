# SPDX-License-Identifier: Apache-2.0
"""The gates of gated MLPs."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import jax
import jax.numpy as jnp


def _clamped_swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """That of GPT-OSS, with its constants."""
    gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


# From the gate and what it is for, by the names that configurations have for them.
GATES: Final[Mapping[str, Callable[[jax.Array, jax.Array], jax.Array]]] = (
    MappingProxyType(
        {
            "gelu_tanh": lambda gate, up: jax.nn.gelu(gate, approximate=True) * up,
            "silu": lambda gate, up: jax.nn.silu(gate) * up,
            "clamped_swiglu": _clamped_swiglu,
        }
    )
)
