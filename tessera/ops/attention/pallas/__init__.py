# SPDX-License-Identifier: Apache-2.0
"""Attention on Hopper by Tessera's Pallas kernels."""

from tessera.ops.attention.pallas.kernel_attention import (
    attend,
    slow_reason,
    unsupported_reason,
)

__all__ = ["attend", "slow_reason", "unsupported_reason"]
