# SPDX-License-Identifier: Apache-2.0
"""Forward flash attention for Hopper, as a Mosaic GPU kernel.

Each compute warpgroup has 64 queries of a tile and iterates with the others over the
blocks of keys and values that any query of the tile attends to. Its accumulators stay
in registers. Blocks that are not masked at all skip the mask. Tiles with the most work
are scheduled first.

Source: J. Shah et al., FlashAttention-3, arXiv 2407.08608.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tessera.ops.attention.dispatch import Operands
from tessera.ops.attention.pallas.block_sizes import WARPGROUP_ROWS as ROWS
from tessera.ops.attention.pallas.block_sizes import Tiles
from tessera.ops.attention.pallas.mask_rules import Rules
from tessera.ops.attention.pallas.warpgroups import (
    LOG2_E,
    LOWEST,
    MATRIX,
    ROW,
    broadcast,
    filled,
    is_masked,
    loop_with_mask,
    matmul,
    matmul_add,
    operand,
    positions,
    ring_buffer,
    ring_scratch,
    run,
    specialize_warpgroups,
)


def forward(
    operands: Operands, rules: Rules, tiles: Tiles, interpret: Any = None
) -> tuple[Array, Array]:
    """The output of attention, and the log of each query's sum of weights.

    Args:
      operands: S a multiple of ``tiles.rows``, T one of ``tiles.columns``, D one of 64.
      rules: Which keys a query attends to.
      tiles: The tile sizes.
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
    position = first + rules.options.offset
    start, stop = rules.key_blocks(position, tiles.rows, tiles.columns)
    keys, values = (ring_buffer(name, tiles, scratch) for name in "kv")

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
        state = _attend_tile(
            q,
            keys,
            values,
            (start, stop, position, position + w * ROWS),
            rules,
            tiles,
            spare,
        )
        acc, highest, total = state
        is_empty = highest == LOWEST
        inverse = jnp.where(is_empty, 0.0, 1.0 / total)
        lse = (highest + jnp.log2(total)) * (1 / LOG2_E)
        scratch["log"][w] = jnp.where(is_empty, -jnp.inf, lse)
        # Only this warpgroup read these queries, and it needs them no more.
        q[...] = (acc * broadcast(inverse, acc.shape, 0)).astype(q.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q, out.at[row, head, own])
        plgpu.copy_smem_to_gmem(scratch["log"].at[w], log_out.at[row, head, own])
        plgpu.wait_smem_to_gmem(0)

    specialize_warpgroups(tiles, compute, copy)


def _attend_tile(
    q: Any, keys: Any, values: Any, at: Any, rules: Rules, tiles: Tiles, spare: Any
) -> Any:
    """The undivided output of a warpgroup, its highest scores in base 2, and totals."""
    start, stop, tile_position, position = at
    shape = ROWS, tiles.columns

    def step(masked: bool) -> Any:
        def one_block(j: Any, state: Any) -> Any:
            acc, highest, total = state
            block = keys.wait(j - start)
            scores = matmul(q, block.transpose((1, 0)))
            keys.done(j - start)
            scores, _ = rules.scores(scores)
            scores *= LOG2_E
            if masked:
                key = positions(j * tiles.columns, shape, 1)
                visible: Any = rules.visible(positions(position, shape, 0), key)
                scores = jnp.where(visible, scores, LOWEST)
            higher = jnp.maximum(highest, scores.max(axis=1))
            weights = jnp.exp2(scores - broadcast(higher, shape, 0))
            correction = jnp.exp2(highest - higher)
            total = total * correction + weights.sum(axis=1)
            acc *= broadcast(correction, acc.shape, 0)
            block = values.wait(j - start)
            acc = matmul_add(acc, weights.astype(q.dtype), block, spare)
            values.done(j - start)
            return acc, higher, total

        return one_block

    state = (
        filled((ROWS, q.shape[1]), 0.0, MATRIX),
        filled((ROWS,), LOWEST, ROW),
        filled((ROWS,), 0.0, ROW),
    )
    inside = (
        rules.whole_key_blocks(tile_position, *tiles[:2]) if is_masked(rules) else None
    )
    return loop_with_mask(start, stop, inside, step, state)
