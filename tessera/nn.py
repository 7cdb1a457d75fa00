# SPDX-License-Identifier: Apache-2.0
"""``ts.nn``: functions for building layers; they own no parameters.

A facade: every name is defined in ``tessera.ops``, and nothing in the package imports
it.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from tessera.ops.attention.flash import flash_attention
from tessera.ops.embedding import embedding
from tessera.ops.fused_losses import fused_linear_cross_entropy
from tessera.ops.losses import cross_entropy
from tessera.ops.norms import rms_norm

# fmt: off
__all__ = [
    "cross_entropy", "embedding", "flash_attention", "fused_linear_cross_entropy",
    "rms_norm",
]
# fmt: on

if not _TYPE_CHECKING:  # to type checkers, a name that it lacks stays an error

    def __getattr__(name: str) -> object:
        raise AttributeError(
            f"module 'tessera.nn' has no attribute {name!r}; layers with parameters "
            "are in flax.nnx, other functions in jax.nn"
        )
