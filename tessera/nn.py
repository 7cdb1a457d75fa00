# SPDX-License-Identifier: Apache-2.0
"""``ts.nn``: functions for building layers; they own no parameters.

A facade: every name is defined in ``tessera.ops``, and nothing in the package imports
it.
"""

from tessera.ops.activations import dropout as dropout
from tessera.ops.activations import gelu as gelu
from tessera.ops.activations import log_softmax as log_softmax
from tessera.ops.activations import silu as silu
from tessera.ops.activations import softmax as softmax
from tessera.ops.attention.flash import flash_attention as flash_attention
from tessera.ops.embedding import embedding as embedding
from tessera.ops.fused_losses import (
    fused_linear_cross_entropy as fused_linear_cross_entropy,
)
from tessera.ops.losses import cross_entropy as cross_entropy
from tessera.ops.matmul import linear as linear
from tessera.ops.norms import layer_norm as layer_norm
from tessera.ops.norms import rms_norm as rms_norm
