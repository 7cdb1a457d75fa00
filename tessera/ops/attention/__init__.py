# SPDX-License-Identifier: Apache-2.0
"""Attention, and context-parallel attention over sequences split over devices."""

from tessera.ops.attention.context_parallel import context_attention, unzigzag, zigzag
from tessera.ops.attention.flash import flash_attention

__all__ = ["context_attention", "flash_attention", "unzigzag", "zigzag"]
