# SPDX-License-Identifier: Apache-2.0
"""Flash attention for Hopper, as a Mosaic GPU kernel: forward.

Every compute warpgroup has 64 queries of a tile, and goes with the others over the
blocks of keys and values that any query of the tile sees. Its sums stay in registers.
Blocks that all of its queries see whole are computed without a mask. Tiles with the
most to do begin first.

Source: J. Shah et al., FlashAttention-3, arXiv 2407.08608.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tessera.ops.attention.attention_call import Operands
from tessera.ops.attention.pallas.block_sizes import WARPGROUP_ROWS as ROWS
from tessera.ops.attention.pallas.block_sizes import Tiles
from tessera.ops.attention.pallas.mask_rules import Rules
from tessera.ops.attention.pallas.warpgroups import (
    LOG2_E,
    LOWEST,
    MATRIX,
    ROW,
    divide_work,
    filled,
    hides,
    in_parts,
    operand,
    over,
    places,
    plus_product,
    product,
    ring_of,
    ring_scratch,
    run,
)


def forward(
    operands: Operands, rules: Rules, tiles: Tiles, interpret: Any = None
) -> tuple[Array, Array]:
    """Attention, and the logarithm of the sum of each query's weights.

    Args:
      operands: S a multiple of ``tiles.rows``, T one of ``tiles.columns``, D one of 64.
      rules: Which keys a query sees.
      tiles: How the work is cut.
      interpret: ``plgpu.InterpretGPUParams`` to run on a CPU.

    Returns:
      ``[B, H, S, D]`` in the dtype of q, and f32 ``[B, H, S]``.
    """
    q, k, v = operands[:3]
    batch, heads, length, width = q.shape
    count = length // tiles.rows

    def body(*refs: Any, **scratch: Any) -> None:
        head, tile = lax.axis_index("head"), lax.axis_index("tile")
        row = lax.div(head, jnp.int32(heads))
        group = lax.div(lax.rem(head, jnp.int32(heads)), jnp.int32(heads // k.shape[1]))
        first = (count - 1 - tile) * tiles.rows
        at = row, lax.rem(head, jnp.int32(heads)), group, first
        _one_tile(refs, scratch, at, rules, tiles)

    key_slots = operand((tiles.slots, tiles.columns, width), q.dtype)
    scratch = {
        "q": operand((tiles.warpgroups, ROWS, width), q.dtype),
        "log": plgpu.SMEM((tiles.warpgroups, ROWS), jnp.float32),
        "q_filled": plgpu.Barrier(num_barriers=tiles.warpgroups),
        **ring_scratch("k", tiles, key_slots),
        **ring_scratch("v", tiles, key_slots),
    }
    if interpret is not None:
        shape = tiles.warpgroups, ROWS, tiles.columns
        scratch["spare"] = operand(shape, q.dtype)
    outs = [
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct(q.shape[:3], jnp.float32),
    ]
    return run(
        body,
        (q, k, v),
        outs=outs,
        scratch=scratch,
        grid=(batch * heads, count),
        tiles=tiles,
        interpret=interpret,
    )


def _one_tile(refs: Any, scratch: Any, at: Any, rules: Rules, tiles: Tiles) -> None:
    q_in, k_in, v_in, out, log_out = refs
    row, head, group, first = at
    place = first + rules.setting.offset
    start, stop = rules.key_blocks(place, tiles.rows, tiles.columns)
    keys, values = (ring_of(name, tiles, scratch) for name in "kv")

    def copy() -> None:
        for w in range(tiles.warpgroups):
            own = pl.ds(first + w * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(
                q_in.at[row, head, own], scratch["q"].at[w], scratch["q_filled"].at[w]
            )

        def one_block(j: Any, _: None) -> None:
            block = pl.ds(j * tiles.columns, tiles.columns)
            keys.fill(j - start, k_in.at[row, group, block])
            values.fill(j - start, v_in.at[row, group, block])

        lax.fori_loop(start, stop, one_block, None)

    def compute(w: Any) -> None:
        own = pl.ds(first + w * ROWS, ROWS)
        q = scratch["q"].at[w]
        plgpu.barrier_wait(scratch["q_filled"].at[w])
        spare = scratch["spare"].at[w] if "spare" in scratch else None
        state = _read(
            q, keys, values, (start, stop, place, place + w * ROWS), rules, tiles, spare
        )
        read, highest, total = state
        blind = highest == LOWEST
        share = jnp.where(blind, 0.0, 1.0 / total)
        log_total = (highest + jnp.log2(total)) * (1 / LOG2_E)
        scratch["log"][w] = jnp.where(blind, -jnp.inf, log_total)
        # This warpgroup alone read these queries, and is done with them.
        q[...] = (read * over(share, read.shape, 0)).astype(q.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q, out.at[row, head, own])
        plgpu.copy_smem_to_gmem(scratch["log"].at[w], log_out.at[row, head, own])
        plgpu.wait_smem_to_gmem(0)

    divide_work(tiles, compute, copy)


def _read(
    q: Any, keys: Any, values: Any, at: Any, rules: Rules, tiles: Tiles, spare: Any
) -> Any:
    """What a warpgroup's queries read, not divided; highest scores, base 2; totals."""
    start, stop, tile_place, place = at
    shape = ROWS, tiles.columns

    def step(masked: bool) -> Any:
        def one_block(j: Any, state: Any) -> Any:
            read, highest, total = state
            block = keys.wait(j - start)
            scores = product(q, block.transpose((1, 0)))
            keys.done(j - start)
            scores, _ = rules.scores(scores)
            scores *= LOG2_E
            if masked:
                key = places(j * tiles.columns, shape, 1)
                seen: Any = rules.visible(places(place, shape, 0), key)
                scores = jnp.where(seen, scores, LOWEST)
            higher = jnp.maximum(highest, scores.max(axis=1))
            weights = jnp.exp2(scores - over(higher, shape, 0))
            kept = jnp.exp2(highest - higher)
            total = total * kept + weights.sum(axis=1)
            read *= over(kept, read.shape, 0)
            block = values.wait(j - start)
            read = plus_product(read, weights.astype(q.dtype), block, spare)
            values.done(j - start)
            return read, higher, total

        return one_block

    state = (
        filled((ROWS, q.shape[1]), 0.0, MATRIX),
        filled((ROWS,), LOWEST, ROW),
        filled((ROWS,), 0.0, ROW),
    )
    inside = rules.whole_key_blocks(tile_place, *tiles[:2]) if hides(rules) else None
    return in_parts(start, stop, inside, step, state)
