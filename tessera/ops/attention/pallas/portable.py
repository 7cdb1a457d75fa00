# SPDX-License-Identifier: Apache-2.0
"""Flash attention as a Pallas kernel that every backend runs: forward.

``interpret=True`` turns a kernel into plain XLA operations, one program of its grid
after another. That is what tests run on a CPU, and what stands behind the kernel for
Hopper where that one cannot run. It is exact and bounded in memory; it is not fast.

Here and in ``portable_backward``, S is a multiple of ``blocks.queries``, T is one of
``blocks.keys``, and ``Operands.offset`` is int32 ``[1]`` and all of the offset.

Source: T. Dao, FlashAttention-2, arXiv 2307.08691.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from tessera.ops.attention.attention_call import Operands
from tessera.ops.attention.pallas.block_sizes import Blocks
from tessera.ops.attention.pallas.mask_rules import Rules

Segments = tuple[Array, Array] | None


def forward(operands: Operands, rules: Rules, blocks: Blocks) -> Any:
    """Attention, and the logarithm of the sum of each query's weights.

    Returns:
      ``[B, H, S, D]`` in the dtype of q, and ``[B, H, S]``, f32 or wider: minus
      infinity, and a result of zeros, for a query that sees no key.
    """
    q = operands.q
    specs = specs_over_queries(operands, blocks)

    def body(refs: Operands, out_ref: Any, log_ref: Any) -> None:
        out, log_total = _one_block_of_queries(refs, rules, blocks)
        out_ref[0, 0] = out.astype(out_ref.dtype)
        log_ref[0, 0] = log_total

    return call(
        body,
        (operands,),
        grid=(*q.shape[:2], q.shape[2] // blocks.queries),
        in_specs=(specs,),
        out_specs=(specs.q, row_spec_over_queries(blocks)),
        outs=((q.shape, q.dtype), (q.shape[:-1], wide(q))),
    )


def block_spec(shape: Any, index: Callable[[Any, Any, Any], Any]) -> Any:
    """What a program is given of an array, by its three numbers in the grid."""
    return pl.BlockSpec(shape, index)


def specs_over_queries(operands: Operands, blocks: Blocks) -> Any:
    """What a program for one block of queries of one head is given of each operand."""
    q, k = operands.q, operands.k
    per_group, width = q.shape[1] // k.shape[1], q.shape[3]
    all_keys = block_spec(
        (1, 1, k.shape[2], width), lambda b, h, i: (b, lax.div(h, per_group), 0, 0)
    )
    segmented = operands.query_segments is not None
    return Operands(
        q=block_spec((1, 1, blocks.queries, width), lambda b, h, i: (b, h, i, 0)),
        k=all_keys,
        v=all_keys,
        query_segments=block_spec((1, blocks.queries), lambda b, h, i: (b, i))
        if segmented
        else None,
        key_segments=block_spec((1, k.shape[2]), lambda b, h, i: (b, 0))
        if segmented
        else None,
        offset=block_spec((1,), lambda b, h, i: (0,)),
    )


def row_spec_over_queries(blocks: Blocks) -> Any:
    """What it is given of ``[B, H, S]``."""
    return block_spec((1, 1, blocks.queries), lambda b, h, i: (b, h, i))


def call(
    body: Callable[..., None],
    operands: tuple[Any, ...],
    *,
    outs: tuple[tuple[tuple[int, ...], Any], ...],
    **specs: Any,
) -> Any:
    """Run a kernel in Pallas' interpreter."""
    shapes = [jax.ShapeDtypeStruct(*out) for out in outs]
    return pl.pallas_call(body, out_shape=shapes, interpret=True, **specs)(*operands)


def wide(x: Array) -> Any:
    """What sums are kept in."""
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def product(a: Array, b: Array, dim_of_a: int, dim_of_b: int) -> Array:
    """Of two matrices, summed over one dim of each, not rounded."""
    return lax.dot_general(
        a,
        b,
        (((dim_of_a,), (dim_of_b,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=wide(a),
    )


def seen_by(
    rules: Rules, place: Any, first_key: Any, blocks: Blocks, segments: Segments
) -> Array:
    """Whether queries from a place on see keys: bool, one block by the other."""
    query = place + lax.broadcasted_iota(jnp.int32, tuple(blocks), 0)
    key = first_key + lax.broadcasted_iota(jnp.int32, tuple(blocks), 1)
    seen = rules.visible(query, key)
    if seen is None:
        seen = jnp.ones(tuple(blocks), bool)
    if segments is not None:
        seen &= segments[0][:, None] == segments[1][None, :]
    return seen


def where_met(segments: Segments, fold: Callable[[Any], Any], state: Any) -> Any:
    """``fold(state)``, or the state where no segment of the one is of the other.

    Ranges are compared, so that segments that follow each other are told apart.
    """
    if segments is None:
        return fold(state)
    a, b = segments
    met = (a.min() <= b.max()) & (b.min() <= a.max())
    return lax.cond(met, lambda: fold(state), lambda: state)


def _one_block_of_queries(
    refs: Any, rules: Rules, blocks: Blocks
) -> tuple[Array, Array]:
    q = refs.q[0, 0]
    place = pl.program_id(2) * blocks.queries + refs.offset[0]
    lowest = float(jnp.finfo(wide(q)).min)

    def one_block_of_keys(j: Any, state: Any) -> Any:
        at = pl.ds(j * blocks.keys, blocks.keys)
        segments = None
        if refs.query_segments is not None:
            segments = refs.query_segments[0], refs.key_segments[0, at]

        def fold(state: Any) -> Any:
            read, highest, total = state
            scores, _ = rules.scores(product(q, refs.k[0, 0, at], 1, 1))
            seen = seen_by(rules, place, j * blocks.keys, blocks, segments)
            scores = jnp.where(seen, scores, lowest)
            higher = jnp.maximum(highest, scores.max(axis=1))
            weights = jnp.where(seen, jnp.exp(scores - higher[:, None]), 0.0)
            kept = jnp.exp(highest - higher)
            more = product(weights.astype(q.dtype), refs.v[0, 0, at], 1, 0)
            total = total * kept + weights.sum(axis=1)
            return read * kept[:, None] + more, higher, total

        return where_met(segments, fold, state)

    state = (
        jnp.zeros(q.shape, wide(q)),
        jnp.full(q.shape[:1], lowest, wide(q)),
        jnp.zeros(q.shape[:1], wide(q)),
    )
    start, stop = rules.key_blocks(place, *blocks)
    read, highest, total = lax.fori_loop(start, stop, one_block_of_keys, state)
    some = jnp.where(total > 0, total, 1.0)
    return read / some[:, None], jnp.where(total > 0, highest + jnp.log(some), -jnp.inf)
