# SPDX-License-Identifier: Apache-2.0
"""Backward flash attention for Hopper, as Mosaic GPU kernels.

One program has a tile of queries and iterates over keys, another has a tile of keys and
iterates over the queries of all heads of its group: no accumulator is shared, so there
are no atomic adds and every run gives the same bits. The second works on transposed
scores, whose 64 rows are the keys of a warpgroup; heads wider than 128 leave no
registers for two accumulators, and it then runs once for each.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tessera.ops.attention.blockwise import OutputGradients
from tessera.ops.attention.dispatch import Operands
from tessera.ops.attention.pallas.block_sizes import WARPGROUP_ROWS as ROWS
from tessera.ops.attention.pallas.block_sizes import Tiles
from tessera.ops.attention.pallas.mask_rules import Rules
from tessera.ops.attention.pallas.warpgroups import (
    COLUMN,
    LOG2_E,
    MATRIX,
    ROW,
    broadcast,
    filled,
    is_masked,
    load_vector,
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

WIDEST_FOR_BOTH = 128


def backward(
    operands: Operands,
    outputs: OutputGradients,
    rules: Rules,
    tiles: Tiles,
    interpret: Any = None,
) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v, in their shapes and dtypes; see ``hopper.forward``.

    S and T are multiples of ``tiles.rows`` and of ``tiles.columns``.
    """
    dq = _query_gradients(operands, outputs, rules, tiles, interpret)
    if operands.q.shape[3] <= WIDEST_FOR_BOTH:
        dk, dv = _key_gradients("kv", operands, outputs, rules, tiles, interpret)
    else:
        (dk,) = _key_gradients("k", operands, outputs, rules, tiles, interpret)
        (dv,) = _key_gradients("v", operands, outputs, rules, tiles, interpret)
    return dq, dk, dv


def _query_gradients(
    operands: Operands,
    outputs: OutputGradients,
    rules: Rules,
    tiles: Tiles,
    interpret: Any,
) -> Array:
    q, k, v = operands[:3]
    batch, heads, length, width = q.shape
    count = length // tiles.rows

    def body(*refs: Any, **scratch: Any) -> None:
        index, tile = lax.axis_index("head"), lax.axis_index("tile")
        head = lax.rem(index, jnp.int32(heads))
        group = lax.div(head, jnp.int32(heads // k.shape[1]))
        first = (count - 1 - tile) * tiles.rows
        at = lax.div(index, jnp.int32(heads)), head, group, first
        _one_tile_of_queries(refs, scratch, at, rules, tiles)

    own = operand((tiles.warpgroups, ROWS, width), q.dtype)
    own_row = plgpu.SMEM((tiles.warpgroups, ROWS), jnp.float32)
    slots = operand((tiles.slots, tiles.columns, width), q.dtype)
    scratch = {
        "q": own,
        "dout": own,
        "lse": own_row,
        "delta": own_row,
        "filled": plgpu.Barrier(num_arrivals=4, num_barriers=tiles.warpgroups),
        **ring_scratch("k", tiles, slots),
        **ring_scratch("v", tiles, slots),
    }
    (dq,) = run(
        body,
        (q, k, v, *outputs),
        outs=[jax.ShapeDtypeStruct(q.shape, q.dtype)],
        scratch=scratch | _spare(q, tiles, interpret),
        grid=(batch * heads, count),
        tiles=tiles,
        interpret=interpret,
    )
    return dq


def _spare(q: Array, tiles: Tiles, interpret: Any) -> dict[str, Any]:
    """Shared memory that only the interpreter needs."""
    if interpret is None:
        return {}
    return {"spare": operand((tiles.warpgroups, ROWS, tiles.columns), q.dtype)}


def _one_tile_of_queries(
    refs: Any, scratch: Any, at: Any, rules: Rules, tiles: Tiles
) -> None:
    q_in, k_in, v_in, dout_in, lse_in, delta_in, out = refs
    row, head, group, first = at
    position = first + rules.options.offset
    start, stop = rules.key_blocks(position, tiles.rows, tiles.columns)
    keys, values = (ring_buffer(name, tiles, scratch) for name in "kv")
    names = ("q", q_in), ("dout", dout_in)
    names += ("lse", lse_in), ("delta", delta_in)

    def copy() -> None:
        for w in range(tiles.warpgroups):
            own = pl.ds(first + w * ROWS, ROWS)
            for name, source in names:
                plgpu.copy_gmem_to_smem(
                    source.at[row, head, own],
                    scratch[name].at[w],
                    scratch["filled"].at[w],
                )

        def one_block(j: Any, _: None) -> None:
            block = pl.ds(j * tiles.columns, tiles.columns)
            keys.fill(j - start, k_in.at[row, group, block])
            values.fill(j - start, v_in.at[row, group, block])

        lax.fori_loop(start, stop, one_block, None)

    def compute(w: Any) -> None:
        plgpu.barrier_wait(scratch["filled"].at[w])
        own_q, own_dout = scratch["q"].at[w], scratch["dout"].at[w]
        lse = load_vector(scratch["lse"].at[w], ROW) * LOG2_E
        delta = load_vector(scratch["delta"].at[w], ROW)
        spare = scratch["spare"].at[w] if "spare" in scratch else None
        shape = ROWS, tiles.columns

        def step(masked: bool) -> Any:
            def one_block(j: Any, dq: Array) -> Array:
                key_block = keys.wait(j - start)
                products = matmul(own_q, key_block.transpose((1, 0)))
                visible = None
                if masked:
                    key = positions(j * tiles.columns, shape, 1)
                    visible = rules.visible(
                        positions(position + w * ROWS, shape, 0), key
                    )
                _, slope = _weights(products, broadcast(lse, shape, 0), visible, rules)
                value_block = values.wait(j - start)
                dweights = matmul(own_dout, value_block.transpose((1, 0)))
                values.done(j - start)
                dscores = slope * (dweights - broadcast(delta, shape, 0))
                dscores = dscores.astype(own_q.dtype)
                dq = matmul_add(dq, dscores, key_block, spare)
                keys.done(j - start)
                return dq

            return one_block

        inside = (
            rules.whole_key_blocks(position, *tiles[:2]) if is_masked(rules) else None
        )
        dq = filled((ROWS, own_q.shape[1]), 0.0, MATRIX)
        dq = loop_with_mask(start, stop, inside, step, dq)
        # Only this warpgroup read these queries, and it needs them no more.
        own_q[...] = (dq * rules.options.scale).astype(own_q.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(own_q, out.at[row, head, pl.ds(first + w * ROWS, ROWS)])
        plgpu.wait_smem_to_gmem(0)

    specialize_warpgroups(tiles, compute, copy)


def _weights(
    products: Array, lse: Array, visible: Array | None, rules: Rules
) -> tuple[Array, Array]:
    """f32 weights, and weights times the slope of a soft cap, for the gradients.

    Only the second has to stay in registers until the gradients of the weights exist.
    """
    scores, cap_slope = rules.scores(products)
    weights = jnp.exp2(scores * LOG2_E - lse)
    if visible is not None:
        weights = jnp.where(visible, weights, 0.0)
    return weights, weights if cap_slope is None else weights * cap_slope


def _key_gradients(
    which: str,
    operands: Operands,
    outputs: OutputGradients,
    rules: Rules,
    tiles: Tiles,
    interpret: Any,
) -> Any:
    """Gradients of the keys ("k"), of the values ("v"), or of both ("kv")."""
    q, k, v = operands[:3]
    batch, groups, num_keys, width = k.shape
    per_group = q.shape[1] // groups

    def body(*refs: Any, **scratch: Any) -> None:
        index, tile = lax.axis_index("head"), lax.axis_index("tile")
        row, group = (f(index, jnp.int32(groups)) for f in (lax.div, lax.rem))
        at = row, group, tile * tiles.rows, per_group
        _one_tile_of_keys(which, refs, scratch, at, rules, tiles)

    own = operand((tiles.warpgroups, ROWS, width), k.dtype)
    slots = operand((tiles.slots, tiles.columns, width), k.dtype)
    row_slots = plgpu.SMEM((tiles.slots, tiles.columns), jnp.float32)
    scratch = {
        "k": own,
        "filled": plgpu.Barrier(
            num_arrivals=2 if "k" in which else 1, num_barriers=tiles.warpgroups
        ),
        **ring_scratch("q", tiles, slots),
        **ring_scratch("dout", tiles, slots),
        **ring_scratch("lse", tiles, row_slots),
    }
    if "k" in which:
        scratch |= {"v": own, **ring_scratch("delta", tiles, row_slots)}
    return run(
        body,
        (q, k, v, *outputs),
        outs=[jax.ShapeDtypeStruct(k.shape, k.dtype) for _ in which],
        scratch=scratch | _spare(q, tiles, interpret),
        grid=(batch * groups, num_keys // tiles.rows),
        tiles=tiles,
        interpret=interpret,
    )


def _one_tile_of_keys(
    which: str, refs: Any, scratch: Any, at: Any, rules: Rules, tiles: Tiles
) -> None:
    (q_in, k_in, v_in, *outputs_in), outs = refs[:6], refs[6:]
    row, group, first, per_group = at
    position = first - rules.options.offset
    count = q_in.shape[2] // tiles.columns
    start, stop = rules.query_blocks(position, tiles.rows, tiles.columns, count)
    sources = dict(
        zip(("q", *OutputGradients._fields), (q_in, *outputs_in), strict=True)
    )
    names = [name for name in sources if "k" in which or name != "delta"]
    rings = {name: ring_buffer(name, tiles, scratch) for name in names}
    own_names = [("k", k_in), ("v", v_in)] if "k" in which else [("k", k_in)]

    def copy() -> None:
        for w in range(tiles.warpgroups):
            for name, source in own_names:
                plgpu.copy_gmem_to_smem(
                    source.at[row, group, pl.ds(first + w * ROWS, ROWS)],
                    scratch[name].at[w],
                    scratch["filled"].at[w],
                )

        def one_head(r: Any, _: None) -> None:
            def one_block(i: Any, _: None) -> None:
                block = pl.ds(i * tiles.columns, tiles.columns)
                for name, ring in rings.items():
                    source = sources[name].at[row, group * per_group + r, block]
                    ring.fill(r * (stop - start) + i - start, source)

            lax.fori_loop(start, stop, one_block, None)

        lax.fori_loop(0, per_group, one_head, None)

    def compute(w: Any) -> None:
        plgpu.barrier_wait(scratch["filled"].at[w])
        inside = _whole_blocks(first, count, rules, tiles)

        def one_head(r: Any, sums: Any) -> Any:
            def step(masked: bool) -> Any:
                def one_block(i: Any, sums: Any) -> Any:
                    at = r * (stop - start) + i - start, i, w, masked
                    return _one_block_of_queries(
                        which, sums, rings, scratch, at, (first, rules, tiles)
                    )

                return one_block

            return loop_with_mask(start, stop, inside, step, sums)

        zeros = filled((ROWS, k_in.shape[3]), 0.0, MATRIX)
        sums = lax.fori_loop(0, per_group, one_head, tuple(zeros for _ in which))
        own = pl.ds(first + w * ROWS, ROWS)
        for name, total, out in zip(which, sums, outs, strict=True):
            # Only this warpgroup read these keys, and it needs them no more.
            destination = scratch[name if len(which) > 1 else "k"].at[w]
            total *= rules.options.scale if name == "k" else 1.0
            destination[...] = total.astype(k_in.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(destination, out.at[row, group, own])
        plgpu.wait_smem_to_gmem(0)

    specialize_warpgroups(tiles, compute, copy)


def _whole_blocks(first: Any, count: int, rules: Rules, tiles: Tiles) -> Any:
    """Blocks of queries that attend to every key of a tile; None where all do."""
    if not is_masked(rules):
        return None
    position = first - rules.options.offset
    begin, end = rules.whole_query_blocks(position, *tiles[:2], count)
    whole = first + tiles.rows <= rules.num_keys
    return begin, jnp.where(whole, end, 0) if rules.padded else end


def _one_block_of_queries(
    which: str, sums: Any, rings: Any, scratch: Any, at: Any, fixed: Any
) -> Any:
    """Accumulate what one block of queries contributes to the gradients of keys."""
    (number, i, w, masked), (first, rules, tiles) = at, fixed
    shape, dtype = (ROWS, tiles.columns), scratch["k"].dtype
    spare = scratch["spare"].at[w] if "spare" in scratch else None
    visible = None
    if masked:
        query = positions(i * tiles.columns + rules.options.offset, shape, 1)
        visible = rules.visible(query, positions(first + w * ROWS, shape, 0))
    blocks = {name: ring.wait(number) for name, ring in rings.items()}
    products = matmul(scratch["k"].at[w], blocks["q"].transpose((1, 0)))
    lse = load_vector(blocks["lse"], COLUMN) * LOG2_E
    weights, slope = _weights(products, broadcast(lse, shape, 1), visible, rules)
    sums = dict(zip(which, sums, strict=True))
    if "v" in which:
        weights = weights.astype(dtype)
        sums["v"] = matmul_add(sums["v"], weights, blocks["dout"], spare)
    if "k" in which:
        dout = blocks["dout"].transpose((1, 0))
        dweights = matmul(scratch["v"].at[w], dout)
        delta = broadcast(load_vector(blocks["delta"], COLUMN), shape, 1)
        dscores = (slope * (dweights - delta)).astype(dtype)
        sums["k"] = matmul_add(sums["k"], dscores, blocks["q"], spare)
    for ring in rings.values():
        ring.done(number)
    return tuple(sums[name] for name in which)
