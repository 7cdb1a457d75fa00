# SPDX-License-Identifier: Apache-2.0
"""Operations on arrays, as ``from tessera import op``."""

from tessera.ops.attention import context_attention as context_attention
from tessera.ops.attention import flash_attention as flash_attention
from tessera.ops.attention import unzigzag as unzigzag
from tessera.ops.attention import zigzag as zigzag
from tessera.ops.fused_losses import (
    fused_linear_cross_entropy as fused_linear_cross_entropy,
)
from tessera.ops.kernel import kernel as kernel
from tessera.ops.losses import cross_entropy as cross_entropy
from tessera.ops.matmul import matmul as matmul
from tessera.ops.moe.operation import moe as moe
from tessera.ops.transformer_block import transformer_block as transformer_block
