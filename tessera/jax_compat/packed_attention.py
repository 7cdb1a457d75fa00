# SPDX-License-Identifier: Apache-2.0
"""cuDNN's attention over packed rows, which ``jax.nn`` does not offer.

Beside ``jaxprs``: like it, this module may use ``jax._src``.
"""

from typing import Any

import jax
from jax import Array
from jax._src.cudnn import fused_attention_stablehlo as cudnn_attention

# Before, JAX gave cuDNN the offsets of keys in strides of the queries: with fewer heads
# of keys it read those of other tokens (jax-ml/jax#39521).
PACKS_GROUPED_HEADS = jax.__version_info__ >= (0, 12)


def packed_attention(
    q: Array,
    k: Array,
    v: Array,
    lengths: Array,
    offsets: Array,
    *,
    scale: float,
    causal: bool,
    window: int | None,
) -> Array:
    """Attention within the segments of rows, on Hopper or newer. Differentiable.

    Args:
      q: ``[B, S, H, D]``, bf16 or f16.
      k: ``[B, S, G, D]``; G is H unless ``PACKS_GROUPED_HEADS``.
      v: ``[B, S, G, D]``.
      lengths: int32 ``[B, M]``, of the segments of each row; -1 after the last.
      offsets: int32 ``[B, M + 1]``, where they start; -1 after the last.
      scale: The factor of the products of queries and keys.
      causal: Whether a query attends only to keys at or before its position.
      window: How many positions back it attends, including its own, or None.
    """
    masks = cudnn_attention.MaskType
    attend: Any = cudnn_attention.dot_product_attention
    return attend(
        q,
        k,
        v,
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=offsets,
        kv_offsets=offsets,
        scale=scale,
        mask_type=masks.PADDING_CAUSAL if causal else masks.PADDING,
        sliding_window_length=window,
    )
