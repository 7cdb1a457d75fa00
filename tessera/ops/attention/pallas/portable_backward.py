# SPDX-License-Identifier: Apache-2.0
"""Flash attention as a Pallas kernel that every backend runs: backward.

Two kernels, so that each sum has one owner and the result does not depend on the order
of programs: one goes over the keys of a block of queries, the other over the queries,
of all heads of a group, of a block of keys. Both compute the weights again from the
logarithms that the forward pass saved.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from tessera.ops.attention.attention_call import Operands
from tessera.ops.attention.pallas.block_sizes import Blocks
from tessera.ops.attention.pallas.mask_rules import Rules
from tessera.ops.attention.pallas.portable import (
    block_spec,
    call,
    product,
    row_spec_over_queries,
    seen_by,
    specs_over_queries,
    where_met,
    wide,
)


class Saved(NamedTuple):
    """What the backward pass knows of the queries.

    Attributes:
      gradient: ``[B, H, S, D]``, of the result.
      log_total: ``[B, H, S]``, from the forward pass.
      share: ``[B, H, S]``: sum over D of the result times its gradient.
    """

    gradient: Any
    log_total: Any
    share: Any


def backward(
    operands: Operands, saved: Saved, rules: Rules, blocks: Blocks
) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v, in their shapes and dtypes."""
    return (
        _of_queries(operands, saved, rules, blocks),
        *_of_keys(operands, saved, rules, blocks),
    )


def _of_queries(
    operands: Operands, saved: Saved, rules: Rules, blocks: Blocks
) -> Array:
    q = operands.q
    specs = specs_over_queries(operands, blocks)
    rows = row_spec_over_queries(blocks)

    def body(refs: Any, saved_refs: Any, out_ref: Any) -> None:
        place = pl.program_id(2) * blocks.queries + refs.offset[0]
        queries = refs.q[0, 0], Saved(*(ref[0, 0] for ref in saved_refs))

        def one_block_of_keys(j: Any, of_q: Array) -> Array:
            at = pl.ds(j * blocks.keys, blocks.keys)
            segments = None
            if refs.query_segments is not None:
                segments = refs.query_segments[0], refs.key_segments[0, at]

            def fold(of_q: Array) -> Array:
                keys, values = refs.k[0, 0, at], refs.v[0, 0, at]
                seen = seen_by(rules, place, j * blocks.keys, blocks, segments)
                _, of_scores = _weights(queries, keys, values, seen, rules)
                return of_q + product(of_scores, keys, 1, 0)

            return where_met(segments, fold, of_q)

        start, stop = rules.key_blocks(place, *blocks)
        zeros = jnp.zeros((blocks.queries, q.shape[3]), wide(q))
        of_q = lax.fori_loop(start, stop, one_block_of_keys, zeros)
        out_ref[0, 0] = (of_q * rules.setting.scale).astype(out_ref.dtype)

    (out,) = call(
        body,
        (operands, saved),
        grid=(*q.shape[:2], q.shape[2] // blocks.queries),
        in_specs=(specs, Saved(specs.q, rows, rows)),
        out_specs=(specs.q,),
        outs=((q.shape, q.dtype),),
    )
    return out


def _of_keys(operands: Operands, saved: Saved, rules: Rules, blocks: Blocks) -> Any:
    q, k = operands.q, operands.k
    per_group, length = q.shape[1] // k.shape[1], q.shape[2]
    specs, rows = _specs_over_keys(operands, blocks)

    def body(refs: Any, saved_refs: Any, of_k_ref: Any, of_v_ref: Any) -> None:
        keys, values, offset = refs.k[0, 0], refs.v[0, 0], refs.offset[0]
        first = pl.program_id(2) * blocks.keys
        count = length // blocks.queries
        start, stop = rules.query_blocks(
            first - offset, blocks.keys, blocks.queries, count
        )

        def one_block_of_queries(step: Any, state: Any) -> Any:
            head = lax.div(step, stop - start)
            row = (start + lax.rem(step, stop - start)) * blocks.queries
            at = pl.ds(row, blocks.queries)
            segments = None
            if refs.query_segments is not None:
                segments = refs.query_segments[0, at], refs.key_segments[0]

            def fold(state: Any) -> Any:
                of_k, of_v = state
                one = refs.q[0, head, at], Saved(*(x[0, head, at] for x in saved_refs))
                seen = seen_by(rules, row + offset, first, blocks, segments)
                weights, of_scores = _weights(one, keys, values, seen, rules)
                of_v += product(weights, one[1].gradient, 0, 0)
                return of_k + product(of_scores, one[0], 0, 0), of_v

            return where_met(segments, fold, state)

        zeros = jnp.zeros((blocks.keys, k.shape[3]), wide(k))
        steps = (stop - start) * per_group
        of_k, of_v = lax.fori_loop(0, steps, one_block_of_queries, (zeros, zeros))
        of_k_ref[0, 0] = (of_k * rules.setting.scale).astype(of_k_ref.dtype)
        of_v_ref[0, 0] = of_v.astype(of_v_ref.dtype)

    return call(
        body,
        (operands, saved),
        grid=(*k.shape[:2], k.shape[2] // blocks.keys),
        in_specs=(specs, Saved(specs.q, rows, rows)),
        out_specs=(specs.k, specs.v),
        outs=((k.shape, k.dtype), (k.shape, k.dtype)),
    )


def _specs_over_keys(operands: Operands, blocks: Blocks) -> tuple[Any, Any]:
    """What a program for one block of keys of one group is given, and of rows."""
    q, k = operands.q, operands.k
    per_group, length, width = q.shape[1] // k.shape[1], *q.shape[2:]
    keys = block_spec((1, 1, blocks.keys, width), lambda b, g, j: (b, g, j, 0))
    segmented = operands.query_segments is not None
    specs = Operands(
        q=block_spec((1, per_group, length, width), lambda b, g, j: (b, g, 0, 0)),
        k=keys,
        v=keys,
        query_segments=block_spec((1, length), lambda b, g, j: (b, 0))
        if segmented
        else None,
        key_segments=block_spec((1, blocks.keys), lambda b, g, j: (b, j))
        if segmented
        else None,
        offset=block_spec((1,), lambda b, g, j: (0,)),
    )
    return specs, block_spec((1, per_group, length), lambda b, g, j: (b, g, 0))


def _weights(
    queries: tuple[Array, Saved], keys: Array, values: Array, seen: Array, rules: Rules
) -> tuple[Array, Array]:
    """Weights, and the gradient of scores short of ``scale``, in the dtype of q."""
    q, saved = queries
    scores, bend = rules.scores(product(q, keys, 1, 1))
    weights = jnp.where(seen, jnp.exp(scores - saved.log_total[:, None]), 0.0)
    of_scores = product(saved.gradient, values, 1, 1) - saved.share[:, None]
    of_scores *= weights if bend is None else weights * bend
    return weights.astype(q.dtype), of_scores.astype(q.dtype)
