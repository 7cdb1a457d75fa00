# SPDX-License-Identifier: Apache-2.0
"""Flash attention for Hopper, as Mosaic GPU kernels: backward.

As in the portable kernel, one program has a tile of queries and goes over keys, another
has a tile of keys and goes over the queries of all heads of its group: no sum is
shared, so nothing is added atomically and every run gives the same bits. The second
works on transposed scores, whose 64 rows are a warpgroup's keys; heads wider than 128
leave no registers for two of its sums, and it then runs once for each.
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
from tessera.ops.attention.pallas.portable_backward import Saved
from tessera.ops.attention.pallas.warpgroups import (
    COLUMN,
    LOG2_E,
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
    row_numbers,
    run,
)

WIDEST_FOR_BOTH = 128


def backward(
    operands: Operands, saved: Saved, rules: Rules, tiles: Tiles, interpret: Any = None
) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v, in their shapes and dtypes; see ``hopper.forward``.

    S and T are multiples of ``tiles.rows`` and of ``tiles.columns``.
    """
    of_q = _of_queries(operands, saved, rules, tiles, interpret)
    if operands.q.shape[3] <= WIDEST_FOR_BOTH:
        of_k, of_v = _of_keys("kv", operands, saved, rules, tiles, interpret)
    else:
        (of_k,) = _of_keys("k", operands, saved, rules, tiles, interpret)
        (of_v,) = _of_keys("v", operands, saved, rules, tiles, interpret)
    return of_q, of_k, of_v


def _of_queries(
    operands: Operands, saved: Saved, rules: Rules, tiles: Tiles, interpret: Any
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
        "gradient": own,
        "log_total": own_row,
        "share": own_row,
        "filled": plgpu.Barrier(num_arrivals=4, num_barriers=tiles.warpgroups),
        **ring_scratch("k", tiles, slots),
        **ring_scratch("v", tiles, slots),
    }
    (of_q,) = run(
        body,
        (q, k, v, *saved),
        outs=[jax.ShapeDtypeStruct(q.shape, q.dtype)],
        scratch=scratch | _spare(q, tiles, interpret),
        grid=(batch * heads, count),
        tiles=tiles,
        interpret=interpret,
    )
    return of_q


def _spare(q: Array, tiles: Tiles, interpret: Any) -> dict[str, Any]:
    """Memory that only the interpreter needs."""
    if interpret is None:
        return {}
    return {"spare": operand((tiles.warpgroups, ROWS, tiles.columns), q.dtype)}


def _one_tile_of_queries(
    refs: Any, scratch: Any, at: Any, rules: Rules, tiles: Tiles
) -> None:
    q_in, k_in, v_in, gradient_in, log_in, share_in, out = refs
    row, head, group, first = at
    place = first + rules.setting.offset
    start, stop = rules.key_blocks(place, tiles.rows, tiles.columns)
    keys, values = (ring_of(name, tiles, scratch) for name in "kv")
    names = ("q", q_in), ("gradient", gradient_in)
    names += ("log_total", log_in), ("share", share_in)

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
        own_q, own_gradient = scratch["q"].at[w], scratch["gradient"].at[w]
        log_total = row_numbers(scratch["log_total"].at[w], ROW) * LOG2_E
        share = row_numbers(scratch["share"].at[w], ROW)
        spare = scratch["spare"].at[w] if "spare" in scratch else None
        shape = ROWS, tiles.columns

        def step(masked: bool) -> Any:
            def one_block(j: Any, of_q: Array) -> Array:
                key_block = keys.wait(j - start)
                products = product(own_q, key_block.transpose((1, 0)))
                seen = None
                if masked:
                    key = places(j * tiles.columns, shape, 1)
                    seen = rules.visible(places(place + w * ROWS, shape, 0), key)
                _, slope = _weights(products, over(log_total, shape, 0), seen, rules)
                value_block = values.wait(j - start)
                of_weights = product(own_gradient, value_block.transpose((1, 0)))
                values.done(j - start)
                of_scores = slope * (of_weights - over(share, shape, 0))
                of_scores = of_scores.astype(own_q.dtype)
                of_q = plus_product(of_q, of_scores, key_block, spare)
                keys.done(j - start)
                return of_q

            return one_block

        inside = rules.whole_key_blocks(place, *tiles[:2]) if hides(rules) else None
        of_q = filled((ROWS, own_q.shape[1]), 0.0, MATRIX)
        of_q = in_parts(start, stop, inside, step, of_q)
        # This warpgroup alone read these queries, and is done with them.
        own_q[...] = (of_q * rules.setting.scale).astype(own_q.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(own_q, out.at[row, head, pl.ds(first + w * ROWS, ROWS)])
        plgpu.wait_smem_to_gmem(0)

    divide_work(tiles, compute, copy)


def _weights(
    products: Array, log_total: Array, seen: Array | None, rules: Rules
) -> tuple[Array, Array]:
    """Weights; and these times the bend of a cap, for the gradient of products: f32.

    One of them is all that has to wait for the gradient of weights: registers are few.
    """
    scores, bend = rules.scores(products)
    weights = jnp.exp2(scores * LOG2_E - log_total)
    if seen is not None:
        weights = jnp.where(seen, weights, 0.0)
    return weights, weights if bend is None else weights * bend


def _of_keys(
    which: str,
    operands: Operands,
    saved: Saved,
    rules: Rules,
    tiles: Tiles,
    interpret: Any,
) -> Any:
    """Gradients of the keys (k), of the values (v), or of both."""
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
        **ring_scratch("gradient", tiles, slots),
        **ring_scratch("log_total", tiles, row_slots),
    }
    if "k" in which:
        scratch |= {"v": own, **ring_scratch("share", tiles, row_slots)}
    return run(
        body,
        (q, k, v, *saved),
        outs=[jax.ShapeDtypeStruct(k.shape, k.dtype) for _ in which],
        scratch=scratch | _spare(q, tiles, interpret),
        grid=(batch * groups, num_keys // tiles.rows),
        tiles=tiles,
        interpret=interpret,
    )


def _one_tile_of_keys(
    which: str, refs: Any, scratch: Any, at: Any, rules: Rules, tiles: Tiles
) -> None:
    (q_in, k_in, v_in, *saved_in), outs = refs[:6], refs[6:]
    row, group, first, per_group = at
    place = first - rules.setting.offset
    count = q_in.shape[2] // tiles.columns
    start, stop = rules.query_blocks(place, tiles.rows, tiles.columns, count)
    sources = dict(zip(("q", *Saved._fields), (q_in, *saved_in), strict=True))
    names = [name for name in sources if "k" in which or name != "share"]
    rings = {name: ring_of(name, tiles, scratch) for name in names}
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

            return in_parts(start, stop, inside, step, sums)

        zeros = filled((ROWS, k_in.shape[3]), 0.0, MATRIX)
        sums = lax.fori_loop(0, per_group, one_head, tuple(zeros for _ in which))
        own = pl.ds(first + w * ROWS, ROWS)
        for name, total, out in zip(which, sums, outs, strict=True):
            # This warpgroup alone read these keys, and is done with them.
            place_of_it = scratch[name if len(which) > 1 else "k"].at[w]
            total *= rules.setting.scale if name == "k" else 1.0
            place_of_it[...] = total.astype(k_in.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(place_of_it, out.at[row, group, own])
        plgpu.wait_smem_to_gmem(0)

    divide_work(tiles, compute, copy)


def _whole_blocks(first: Any, count: int, rules: Rules, tiles: Tiles) -> Any:
    """Blocks of queries that see every key of a tile; None where all do."""
    if not hides(rules):
        return None
    place = first - rules.setting.offset
    begin, end = rules.whole_query_blocks(place, *tiles[:2], count)
    whole = first + tiles.rows <= rules.num_keys
    return begin, jnp.where(whole, end, 0) if rules.padded else end


def _one_block_of_queries(
    which: str, sums: Any, rings: Any, scratch: Any, at: Any, fixed: Any
) -> Any:
    """Sums of a warpgroup's keys, with what some queries add to them."""
    (number, i, w, masked), (first, rules, tiles) = at, fixed
    shape, dtype = (ROWS, tiles.columns), scratch["k"].dtype
    spare = scratch["spare"].at[w] if "spare" in scratch else None
    seen = None
    if masked:
        query = places(i * tiles.columns + rules.setting.offset, shape, 1)
        seen = rules.visible(query, places(first + w * ROWS, shape, 0))
    blocks = {name: ring.wait(number) for name, ring in rings.items()}
    products = product(scratch["k"].at[w], blocks["q"].transpose((1, 0)))
    log_total = row_numbers(blocks["log_total"], COLUMN) * LOG2_E
    weights, slope = _weights(products, over(log_total, shape, 1), seen, rules)
    sums = dict(zip(which, sums, strict=True))
    if "v" in which:
        weights = weights.astype(dtype)
        sums["v"] = plus_product(sums["v"], weights, blocks["gradient"], spare)
    if "k" in which:
        gradient = blocks["gradient"].transpose((1, 0))
        of_weights = product(scratch["v"].at[w], gradient)
        share = over(row_numbers(blocks["share"], COLUMN), shape, 1)
        of_scores = (slope * (of_weights - share)).astype(dtype)
        sums["k"] = plus_product(sums["k"], of_scores, blocks["q"], spare)
    for ring in rings.values():
        ring.done(number)
    return tuple(sums[name] for name in which)
