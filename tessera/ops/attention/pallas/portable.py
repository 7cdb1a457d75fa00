# SPDX-License-Identifier: Apache-2.0
"""Forward flash attention as a Pallas kernel that every backend runs.

``interpret=True`` turns a kernel into plain XLA operations, one program of its grid
after another. Tests run it on a CPU, and calls that the Hopper kernel does not support
fall back to it. It is exact and bounded in memory, but not fast.

Here and in ``portable_backward``, S is a multiple of ``blocks.queries`` and T one of
``blocks.keys``; ``Operands.offset`` is int32 ``[1]`` and includes ``Options.offset``.

Source: T. Dao, FlashAttention-2, arXiv 2307.08691.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from tessera.ops.attention.blockwise import sum_dtype
from tessera.ops.attention.dispatch import Operands
from tessera.ops.attention.pallas.block_sizes import Blocks
from tessera.ops.attention.pallas.mask_rules import Rules

Segments = tuple[Array, Array] | None


def forward(operands: Operands, rules: Rules, blocks: Blocks) -> Any:
    """The output of attention, and the log of each query's sum of weights.

    Returns:
      ``[B, H, S, D]`` in the dtype of q, and ``[B, H, S]``, f32 or wider: minus
      infinity, and an output of zeros, for a query that attends to no key.
    """
    q = operands.q
    specs = specs_over_queries(operands, blocks)

    def body(refs: Operands, out_ref: Any, lse_ref: Any) -> None:
        out, lse = _one_block_of_queries(refs, rules, blocks)
        out_ref[0, 0] = out.astype(out_ref.dtype)
        lse_ref[0, 0] = lse

    return call(
        body,
        (operands,),
        grid=(*q.shape[:2], q.shape[2] // blocks.queries),
        in_specs=(specs,),
        out_specs=(specs.q, row_spec_over_queries(blocks)),
        outs=((q.shape, q.dtype), (q.shape[:-1], sum_dtype(q))),
    )


def block_spec(shape: Any, index: Callable[[Any, Any, Any], Any]) -> Any:
    """The block of an array that a program gets, by its three grid indices."""
    return pl.BlockSpec(shape, index)


def specs_over_queries(operands: Operands, blocks: Blocks) -> Any:
    """The block of each operand for one block of queries of one head."""
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
    """The block of ``[B, H, S]`` for one block of queries of one head."""
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


def matmul(a: Array, b: Array, dim_of_a: int, dim_of_b: int) -> Array:
    """The product of two matrices that contracts one dim of each, not rounded."""
    return lax.dot_general(
        a,
        b,
        (((dim_of_a,), (dim_of_b,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=sum_dtype(a),
    )


def mask_of(
    rules: Rules, position: Any, first_key: Any, blocks: Blocks, segments: Segments
) -> Array:
    """The mask of a block of queries and a block of keys: bool, one by the other."""
    query = position + lax.broadcasted_iota(jnp.int32, tuple(blocks), 0)
    key = first_key + lax.broadcasted_iota(jnp.int32, tuple(blocks), 1)
    visible = rules.visible(query, key)
    if visible is None:
        visible = jnp.ones(tuple(blocks), bool)
    if segments is not None:
        visible &= segments[0][:, None] == segments[1][None, :]
    return visible


def unless_disjoint(segments: Segments, fold: Callable[[Any], Any], state: Any) -> Any:
    """``fold(state)``, or the state where the blocks have no segment in common.

    The ranges of ids are compared, which is exact for segments of ascending ids.
    """
    if segments is None:
        return fold(state)
    a, b = segments
    overlap = (a.min() <= b.max()) & (b.min() <= a.max())
    return lax.cond(overlap, lambda: fold(state), lambda: state)


def _one_block_of_queries(
    refs: Any, rules: Rules, blocks: Blocks
) -> tuple[Array, Array]:
    q = refs.q[0, 0]
    position = pl.program_id(2) * blocks.queries + refs.offset[0]
    lowest = float(jnp.finfo(sum_dtype(q)).min)

    def one_block_of_keys(j: Any, state: Any) -> Any:
        at = pl.ds(j * blocks.keys, blocks.keys)
        segments = None
        if refs.query_segments is not None:
            segments = refs.query_segments[0], refs.key_segments[0, at]

        def fold(state: Any) -> Any:
            acc, highest, total = state
            scores, _ = rules.scores(matmul(q, refs.k[0, 0, at], 1, 1))
            visible = mask_of(rules, position, j * blocks.keys, blocks, segments)
            scores = jnp.where(visible, scores, lowest)
            higher = jnp.maximum(highest, scores.max(axis=1))
            weights = jnp.where(visible, jnp.exp(scores - higher[:, None]), 0.0)
            correction = jnp.exp(highest - higher)
            more = matmul(weights.astype(q.dtype), refs.v[0, 0, at], 1, 0)
            total = total * correction + weights.sum(axis=1)
            return acc * correction[:, None] + more, higher, total

        return unless_disjoint(segments, fold, state)

    state = (
        jnp.zeros(q.shape, sum_dtype(q)),
        jnp.full(q.shape[:1], lowest, sum_dtype(q)),
        jnp.zeros(q.shape[:1], sum_dtype(q)),
    )
    start, stop = rules.key_blocks(position, *blocks)
    acc, highest, total = lax.fori_loop(start, stop, one_block_of_keys, state)
    some = jnp.where(total > 0, total, 1.0)
    return acc / some[:, None], jnp.where(total > 0, highest + jnp.log(some), -jnp.inf)
