# SPDX-License-Identifier: Apache-2.0
"""Attention by Tessera's Pallas kernels; ``kernel_attention`` chooses between them."""

from tessera.ops.attention.pallas.kernel_attention import (
    attend,
    slow_reason,
    unsupported_reason,
)

__all__ = ["attend", "slow_reason", "unsupported_reason"]
