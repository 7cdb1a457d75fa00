# SPDX-License-Identifier: Apache-2.0
"""Attention by Tessera's Pallas kernels; ``kernel_attention`` chooses between them."""

from tessera.ops.attention.pallas.kernel_attention import attend as attend
from tessera.ops.attention.pallas.kernel_attention import slow_reason as slow_reason
from tessera.ops.attention.pallas.kernel_attention import (
    unsupported_reason as unsupported_reason,
)
