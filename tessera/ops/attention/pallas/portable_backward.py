# SPDX-License-Identifier: Apache-2.0
"""Backward flash attention as Pallas kernels that every backend runs.

Two kernels, so that each accumulator has one owner and the result does not depend on
the order of programs: one iterates over the keys of a block of queries, the other over
the queries, of all heads of a group, of a block of keys. Both recompute the weights
from the log-sum-exp of the forward pass.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from tessera.ops.attention.blockwise import OutputGradients, sum_dtype
from tessera.ops.attention.dispatch import Operands
from tessera.ops.attention.pallas.block_sizes import Blocks
from tessera.ops.attention.pallas.mask_rules import Rules
from tessera.ops.attention.pallas.portable import (
    block_spec,
    call,
    mask_of,
    matmul,
    row_spec_over_queries,
    specs_over_queries,
    unless_disjoint,
)


def backward(
    operands: Operands, outputs: OutputGradients, rules: Rules, blocks: Blocks
) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v, in their shapes and dtypes."""
    return (
        _query_gradients(operands, outputs, rules, blocks),
        *_key_gradients(operands, outputs, rules, blocks),
    )


def _query_gradients(
    operands: Operands, outputs: OutputGradients, rules: Rules, blocks: Blocks
) -> Array:
    q = operands.q
    specs = specs_over_queries(operands, blocks)
    rows = row_spec_over_queries(blocks)

    def body(refs: Any, output_refs: Any, out_ref: Any) -> None:
        position = pl.program_id(2) * blocks.queries + refs.offset[0]
        queries = refs.q[0, 0], OutputGradients(*(ref[0, 0] for ref in output_refs))

        def one_block_of_keys(j: Any, dq: Array) -> Array:
            at = pl.ds(j * blocks.keys, blocks.keys)
            segments = None
            if refs.query_segments is not None:
                segments = refs.query_segments[0], refs.key_segments[0, at]

            def fold(dq: Array) -> Array:
                keys, values = refs.k[0, 0, at], refs.v[0, 0, at]
                visible = mask_of(rules, position, j * blocks.keys, blocks, segments)
                _, dscores = _weights(queries, keys, values, visible, rules)
                return dq + matmul(dscores, keys, 1, 0)

            return unless_disjoint(segments, fold, dq)

        start, stop = rules.key_blocks(position, *blocks)
        zeros = jnp.zeros((blocks.queries, q.shape[3]), sum_dtype(q))
        dq = lax.fori_loop(start, stop, one_block_of_keys, zeros)
        out_ref[0, 0] = (dq * rules.options.scale).astype(out_ref.dtype)

    (out,) = call(
        body,
        (operands, outputs),
        grid=(*q.shape[:2], q.shape[2] // blocks.queries),
        in_specs=(specs, OutputGradients(specs.q, rows, rows)),
        out_specs=(specs.q,),
        outs=((q.shape, q.dtype),),
    )
    return out


def _key_gradients(
    operands: Operands, outputs: OutputGradients, rules: Rules, blocks: Blocks
) -> Any:
    q, k = operands.q, operands.k
    per_group, length = q.shape[1] // k.shape[1], q.shape[2]
    specs, rows = _specs_over_keys(operands, blocks)

    def body(refs: Any, output_refs: Any, dk_ref: Any, dv_ref: Any) -> None:
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
                dk, dv = state
                one = (
                    refs.q[0, head, at],
                    OutputGradients(*(x[0, head, at] for x in output_refs)),
                )
                visible = mask_of(rules, row + offset, first, blocks, segments)
                weights, dscores = _weights(one, keys, values, visible, rules)
                dv += matmul(weights, one[1].dout, 0, 0)
                return dk + matmul(dscores, one[0], 0, 0), dv

            return unless_disjoint(segments, fold, state)

        zeros = jnp.zeros((blocks.keys, k.shape[3]), sum_dtype(k))
        steps = (stop - start) * per_group
        dk, dv = lax.fori_loop(0, steps, one_block_of_queries, (zeros, zeros))
        dk_ref[0, 0] = (dk * rules.options.scale).astype(dk_ref.dtype)
        dv_ref[0, 0] = dv.astype(dv_ref.dtype)

    return call(
        body,
        (operands, outputs),
        grid=(*k.shape[:2], k.shape[2] // blocks.keys),
        in_specs=(specs, OutputGradients(specs.q, rows, rows)),
        out_specs=(specs.k, specs.v),
        outs=((k.shape, k.dtype), (k.shape, k.dtype)),
    )


def _specs_over_keys(operands: Operands, blocks: Blocks) -> tuple[Any, Any]:
    """The blocks of each operand, and of ``[B, H, S]``, for one block of keys."""
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
    queries: tuple[Array, OutputGradients],
    keys: Array,
    values: Array,
    visible: Array,
    rules: Rules,
) -> tuple[Array, Array]:
    """Weights, and the gradients of scores without ``scale``, in the dtype of q."""
    q, outputs = queries
    scores, cap_slope = rules.scores(matmul(q, keys, 1, 1))
    weights = jnp.where(visible, jnp.exp(scores - outputs.lse[:, None]), 0.0)
    dscores = matmul(outputs.dout, values, 1, 1) - outputs.delta[:, None]
    dscores *= weights if cap_slope is None else weights * cap_slope
    return weights.astype(q.dtype), dscores.astype(q.dtype)
