# SPDX-License-Identifier: Apache-2.0
"""Attention by our own Pallas kernels; see ``attending`` for which a call gets."""

from tessera.ops.attention.pallas.kernel_attention import attend as attend
from tessera.ops.attention.pallas.kernel_attention import why_not as why_not
from tessera.ops.attention.pallas.kernel_attention import (
    why_not_unasked as why_not_unasked,
)
