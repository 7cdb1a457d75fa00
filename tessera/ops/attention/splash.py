# SPDX-License-Identifier: Apache-2.0
"""Attention on TPUs by the kernels that JAX ships, "splash attention".

The kernels have one static mask and no scale. Queries are multiplied by the scale
before, which rounds them once to their dtype unless it is a power of two. Sequences are
padded to whole blocks.

Source: ``jax.experimental.pallas.ops.tpu.splash_attention``; T. Dao, FlashAttention-2,
arXiv 2307.08691.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as kernels,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as masks,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask_info as mask_infos,
)

from tessera.jax_compat.traces import checks_varying_axes
from tessera.ops.attention.dispatch import Device, Operands, Options
from tessera.ops.rematerialization import ATTENTION_RESIDUALS
from tessera.tracing.scope import VISITS

LANES = 128  # of a vector register: what the sizes of blocks are multiples of
# The largest block of queries and of keys. Twice as many rows do not fit into the
# vector memory in the backward pass of the widest heads.
MAX_BLOCK = 512
_WIDEST = {"bfloat16": 512, "float32": 256}


def unsupported_reason(
    operands: Operands, options: Options, device: Device
) -> str | None:
    """Why the kernels do not support such a call there; or None."""
    del options, device
    q = operands.q
    if q.dtype.name not in _WIDEST:
        return f"splash attention takes bfloat16 and float32, and got {q.dtype}"
    widest = _WIDEST[q.dtype.name]
    if q.shape[3] > widest:
        return (
            f"splash attention takes heads up to {widest} in {q.dtype}, "
            f"and got {q.shape[3]}"
        )
    if checks_varying_axes():
        return "splash attention does not say which mesh axes its results vary over"
    return None


def attend(operands: Operands, options: Options) -> Array:
    """The output of the queries: ``[B, H, S, D]``."""
    return attend_with(operands, options, MAX_BLOCK)


def attend_with(
    operands: Operands, options: Options, max_block: int, *, interpret: bool = False
) -> Array:
    """The output of the queries, with blocks of at most ``max_block`` rows."""
    q, k, v = operands[:3]
    rows, columns = (SequenceBlocks.of(x.shape[2], max_block) for x in (q, k))
    segments = None
    if operands.segments is not None:
        ids = rows.pad(operands.segments, 1)
        segments = kernels.SegmentIds(ids, ids)
    if options.scale != 1.0:
        # Rounded once: JAX would round the scale to the dtype of q as well.
        q = (q.astype(jnp.float32) * options.scale).astype(q.dtype)
    mask = BandMask(rows, columns, options.causal, options.window)
    kernel = _kernel(mask, options.soft_cap, interpret)
    attend_sequence = jax.vmap(kernel, (0, 0, 0, None if segments is None else 0))
    padded = rows.pad(q, 2), columns.pad(k, 2), columns.pad(v, 2)
    visited = np.count_nonzero(kernel.fwd_mask_info.block_mask)
    with jax.named_scope(f"{VISITS}{visited}_of_{rows.count * columns.count}"):
        out = attend_sequence(*padded, segments)
    return out[:, :, : rows.length]


@dataclass(frozen=True)
class SequenceBlocks:
    """A sequence, cut into blocks of equal sizes.

    Attributes:
      length: How long it is.
      size: Rows of a block, a multiple of ``LANES``.
      count: The number of blocks. Each has a row that is not padding, so that no block
        of queries is without keys.
    """

    length: int
    size: int
    count: int

    @classmethod
    def of(cls, length: int, max_block: int) -> "SequenceBlocks":
        """As few blocks as possible, and for that number the smallest.

        Example:
          >>> SequenceBlocks.of(600, 512)
          SequenceBlocks(length=600, size=384, count=2)
        """
        count = -(-length // max_block)
        size = -(-length // (count * LANES)) * LANES
        return cls(length, size, count)

    def pad(self, x: Array, dim: int) -> Array:
        """An array whose ``dim`` is the sequence, padded to whole blocks."""
        missing = self.size * self.count - self.length
        if not missing:
            return x
        return jnp.pad(x, [(0, missing if d == dim else 0) for d in range(x.ndim)])


@dataclass(frozen=True)
class BandMask(masks.Mask):
    """Which keys each query attends to, apart from segments.

    The kernels skip blocks where it is False everywhere, and call it for the others.

    Attributes:
      rows: The queries.
      columns: The keys.
      causal: Whether a query attends only to keys at or before its position.
      window: How many positions back a causal query attends, or None.
    """

    rows: SequenceBlocks
    columns: SequenceBlocks
    causal: bool
    window: int | None

    @property
    def shape(self) -> tuple[int, int]:
        """The padded numbers of queries and of keys."""
        return (
            self.rows.size * self.rows.count,
            self.columns.size * self.columns.count,
        )

    @cached_property
    def q_sequence(self) -> np.ndarray:
        """What the kernels pass to ``mask_function`` for the queries."""
        return np.arange(self.shape[0], dtype=np.int32)

    @property
    def mask_function(self) -> Any:
        """The mask as a function of the indices of queries and keys."""
        return self

    def __call__(self, query: Any, key: Any) -> Any:
        """Where queries attend to keys, for arrays of indices that broadcast."""
        distance = query - key
        visible = key < self.columns.length
        if self.causal:
            visible = visible & (distance >= 0)
        if self.window is not None:
            visible = visible & (distance < self.window)
        return visible

    def __getitem__(self, idx: Any) -> np.ndarray:
        """The part of the mask in two slices."""
        query, key = (
            np.arange(size, dtype=np.int32)[part]
            for size, part in zip(self.shape, idx, strict=True)
        )
        return self(query[:, None], key[None])


@lru_cache(maxsize=64)
def _kernel(mask: BandMask, soft_cap: float | None, interpret: bool) -> Any:
    """The kernels of all heads of one sequence. Their tables are NumPy arrays.

    ``make_splash_mha`` would make them JAX arrays, which a cache must not keep from one
    trace to the next.
    """
    rows, columns = mask.rows.size, mask.columns.size
    sizes = kernels.BlockSizes(
        block_q=rows,
        block_kv=columns,
        block_q_dkv=rows,
        block_kv_dkv=columns,
        block_q_dq=rows,
        block_kv_dq=columns,
    )
    heads = masks.MultiHeadMask([mask])  # one for all heads
    forward, function = mask_infos.process_mask(heads, (rows, columns))
    by_keys, _ = mask_infos.process_mask_dkv(heads, (rows, columns))
    return kernels.SplashAttentionKernel(
        forward,
        forward,
        by_keys,
        block_sizes=sizes,
        is_mqa=False,
        save_residuals=False,
        mask_value=kernels.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=soft_cap,
        residual_checkpoint_name=ATTENTION_RESIDUALS,
        mask_function=function,
        interpret=interpret,
    )
