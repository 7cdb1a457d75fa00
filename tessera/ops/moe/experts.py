# SPDX-License-Identifier: Apache-2.0
"""The experts: gated MLPs, many in one matmul."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax


class Weights(NamedTuple):
    """The parameters of one layer of experts, or their shapes, or their layouts.

    Attributes:
      router: ``[D, E]``.
      gate: ``[E, D, F]``.
      up: ``[E, D, F]``.
      down: ``[E, F, D]``.
    """

    router: Any
    gate: Any
    up: Any
    down: Any


def grouped(rows_RD: Array, sizes_E: Array, weights: Weights) -> Array:
    """Each expert on its own run of rows, by matmuls that know where the runs end.

    Args:
      rows_RD: ``[R, D]``, rows of expert 0 first, then those of 1, and so on.
      sizes_E: int32, how many rows each expert has. What is left over at the end may
        come out as anything.
      weights: Of these experts.

    Returns:
      ``[R, D]``.

    Source: MegaBlocks, arXiv 2211.15841; GeGLU, arXiv 2002.05202.
    """
    gate_RF = lax.ragged_dot(rows_RD, weights.gate, sizes_E)
    up_RF = lax.ragged_dot(rows_RD, weights.up, sizes_E)
    hidden_RF = jax.nn.gelu(gate_RF, approximate=True) * up_RF
    return lax.ragged_dot(hidden_RF, weights.down, sizes_E)


def batched(rows_ECD: Array, weights: Weights) -> Array:
    """Each expert on the same number of rows: ``[E, C, D]`` to ``[E, C, D]``."""
    gate_ECF = jnp.matmul(rows_ECD, weights.gate)
    up_ECF = jnp.matmul(rows_ECD, weights.up)
    hidden_ECF = jax.nn.gelu(gate_ECF, approximate=True) * up_ECF
    return jnp.matmul(hidden_ECF, weights.down)
