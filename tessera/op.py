# SPDX-License-Identifier: Apache-2.0
"""``from tessera import op``: operations on arrays, and kernels.

A facade: every name is defined elsewhere, and nothing in the package imports it.
"""

from tessera.graph.kernel import kernel
from tessera.ops.attention import (
    context_attention,
    flash_attention,
    unzigzag,
    zigzag,
)
from tessera.ops.fused_losses import fused_linear_cross_entropy
from tessera.ops.losses import cross_entropy
from tessera.ops.matmul import matmul
from tessera.ops.moe.moe_operation import moe
from tessera.ops.transformer_block import transformer_block

# fmt: off
__all__ = [
    "context_attention", "cross_entropy", "flash_attention",
    "fused_linear_cross_entropy", "kernel", "matmul", "moe", "transformer_block",
    "unzigzag", "zigzag",
]
# fmt: on
