# SPDX-License-Identifier: Apache-2.0
"""Attention, and context-parallel attention over sequences split over devices."""

from tessera.ops.attention.context import context_attention as context_attention
from tessera.ops.attention.context import unzigzag as unzigzag
from tessera.ops.attention.context import zigzag as zigzag
from tessera.ops.attention.flash import flash_attention as flash_attention
