# SPDX-License-Identifier: Apache-2.0
"""``ts.nn``: functions for building layers; they own no parameters.

A facade: every name is defined in ``tessera.ops``, and nothing in the package imports
it.
"""

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
