# SPDX-License-Identifier: Apache-2.0
"""Which numbers of devices the heads of a decoder can be divided over."""

import math

from tessera.errors import HeadCountError, nearest
from tessera.train.models.decoder.config import DecoderConfig


def _fits_tp(kv_heads: int, tp: int) -> bool:
    """Whether key/value heads can be divided over tp, or replicated along it."""
    return kv_heads % tp == 0 or tp % kv_heads == 0


def check_heads(config: DecoderConfig, tp: int) -> None:
    """Check that devices of ``tp`` can share the heads.

    Raises:
      HeadCountError: [T402] they cannot.
    """
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % tp == 0 and _fits_tp(kv_heads, tp):
        return
    sizes = f"num_heads = {heads}, num_kv_heads = {kv_heads}, axis size {tp}"
    legal = [n for n in range(1, heads + 1) if heads % n == 0 and _fits_tp(kv_heads, n)]
    fix = f"use tp {nearest(legal, tp)}"
    if heads % tp:
        if _fits_tp(kv_heads, tp):
            step = math.lcm(tp, kv_heads)
            counts = range(step, heads + 2 * step, step)
            fix += f", or num_heads {nearest(counts, heads)}"
        raise HeadCountError(
            f"{heads} attention heads cannot be divided over mesh axis 'tp'",
            got=f"{sizes}, remainder {heads % tp}",
            fix=fix,
        )
    counts = [n for n in range(1, heads + 1) if heads % n == 0 and _fits_tp(n, tp)]
    raise HeadCountError(
        f"{kv_heads} key/value heads can be neither divided over mesh axis 'tp' "
        "nor copied along it",
        got=f"{sizes}: neither of {kv_heads} and {tp} divides the other",
        fix=f"use tp {nearest(legal, tp)}, or num_kv_heads {nearest(counts, kv_heads)}",
    )
