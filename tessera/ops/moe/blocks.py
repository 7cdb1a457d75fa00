# SPDX-License-Identifier: Apache-2.0
"""Experts on groups of rows by batched matmuls, for GPUs.

XLA has no kernel for ragged matmuls on GPUs: there it multiplies every row by every
expert. Here one batched matmul takes the first rows of each expert, an even share and
an eighth more. A loop takes what is left of the popular experts in blocks, each of rows
of one expert, and ends when no rows are left.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from tessera.ops.attention.blockwise import sum_dtype, varying_as
from tessera.tracing.scope import FALLBACK, GROUPED

BLOCK = 128  # rows
TURN = 8  # blocks of one turn of the loop

# Of rows ``[E, C, D]`` and a tree of ``[E, ...]``, for any E and C: ``[E, C, F]``.
Batched = Callable[[Array, Any], Array]


def in_blocks(
    batched: Batched,
    share: int,
    rows_RD: Array,
    order_R: Array,
    sizes_E: Array,
    weights: Any,
) -> Array:
    """Each row through its own expert: ``[R, D]`` to ``[R, F]``.

    Args:
      batched: Experts on as many rows each. It must not mix rows.
      share: The rows of an expert if all were equally popular; another number gives the
        same results in another time.
      rows_RD: Rows in any order.
      order_R: int32, the indices of the rows of expert 0, then those of 1, and so on,
        and rows of no expert at last. Their results are zeros.
      sizes_E: int32, the number of rows of each expert.
      weights: A tree of arrays ``[E, ...]``, the experts.
    """
    end_E = jnp.cumsum(sizes_E)
    begin_E = end_E - sizes_E
    first = share * 9 // 8 // 8 * 8
    left = _Left.of(begin_E + first, end_E, order_R)
    row_EC = _rows(begin_E, end_E, first, order_R)
    return _computed(batched, rows_RD, weights, row_EC, left)


class _Left(NamedTuple):
    """What the loop computes of each expert.

    Attributes:
      order_R: All rows in the order of their experts, int32.
      begin_E: Where in it the first row is, or one after the last if none is left.
      end_E: The place after the last.
      before_E: The blocks of the experts before it.
      blocks_E: Those and its own.
    """

    order_R: Array
    begin_E: Array
    end_E: Array
    before_E: Array
    blocks_E: Array

    @classmethod
    def of(cls, begin_E: Array, end_E: Array, order_R: Array) -> "_Left":
        own_E = (jnp.maximum(end_E - begin_E, 0) + BLOCK - 1) // BLOCK
        blocks_E = jnp.cumsum(own_E)
        return cls(order_R, begin_E, end_E, blocks_E - own_E, blocks_E)

    def turn(self, number: Array) -> tuple[Array, Array]:
        """The expert of each block, ``[B]``, and the rows, ``[B, C]``.

        Blocks after the last are of the last expert, and of no rows.
        """
        block_B = TURN * number + jnp.arange(TURN, dtype=jnp.int32)
        owner_B = (self.blocks_E <= block_B[:, None]).sum(axis=1)
        owner_B = jnp.minimum(owner_B, self.blocks_E.size - 1)
        begin_B = self.begin_E[owner_B] + BLOCK * (block_B - self.before_E[owner_B])
        return owner_B, _rows(begin_B, self.end_E[owner_B], BLOCK, self.order_R)

    def loop(self, body: Callable[[Array, Any], Any], state: Any) -> Any:
        """The state after ``state = body(number, state)`` of all turns."""
        number = varying_as(self.blocks_E, jnp.int32(0))
        with jax.named_scope(FALLBACK):
            return lax.while_loop(
                lambda carry: TURN * carry[0] < self.blocks_E[-1],
                lambda carry: (carry[0] + 1, body(*carry)),
                (number, state),
            )[1]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _computed(
    batched: Batched, rows_RD: Array, weights: Any, row_EC: Array, left: _Left
) -> Array:
    """The results of the first rows of each expert and of those that are left."""
    return _forward(batched, rows_RD, weights, row_EC, left)[0]


def _forward(
    batched: Batched, rows_RD: Array, weights: Any, row_EC: Array, left: _Left
) -> tuple[Array, Any]:
    """The results, and what the backward pass needs."""

    def turn(number: Array, out_RF: Array) -> Array:
        owner_B, row_BC = left.turn(number)
        own = _of_experts(weights, owner_B)
        return _put(out_RF, row_BC, batched(_taken(rows_RD, row_BC), own))

    with jax.named_scope(GROUPED):
        first_ECF, back = jax.vjp(batched, _taken(rows_RD, row_EC), weights)
    out_RF = left.loop(turn, _in_order(first_ECF, row_EC, len(rows_RD)))
    return out_RF, (back, rows_RD, weights, row_EC, left)


def _backward(
    batched: Batched, saved: Any, gradient_RF: Array
) -> tuple[Array, Any, None, None]:
    """Each turn is computed anew; an expert's gradients are added up in f32."""
    back_of_first, rows_RD, weights, row_EC, left = saved
    of_rows_ECD, of_weights = back_of_first(_taken(gradient_RF, row_EC))
    of_rows_RD = _in_order(of_rows_ECD, row_EC, len(rows_RD))

    def turn(number: Array, state: tuple[Any, ...]) -> tuple[Any, ...]:
        of_rows_RD, of_weights, sums, last = state
        owner_B, row_BC = left.turn(number)
        own = _of_experts(weights, owner_B)
        _, back = jax.vjp(batched, _taken(rows_RD, row_BC), own)
        of_rows_BCD, of_own = back(_taken(gradient_RF, row_BC))
        add = partial(_added, jnp.append(last, owner_B))
        of_weights, sums = jax.tree.transpose(
            jax.tree.structure(weights),
            jax.tree.structure((0, 0)),
            jax.tree.map(add, of_weights, sums, of_own),
        )
        return _put(of_rows_RD, row_BC, of_rows_BCD), of_weights, sums, owner_B[-1]

    def zeros(like: Array) -> Array:
        return varying_as(rows_RD, jnp.zeros(like.shape[1:], sum_dtype(like)))

    last = varying_as(rows_RD, jnp.int32(-1))
    state = of_rows_RD, of_weights, jax.tree.map(zeros, weights), last
    return *left.loop(turn, state)[:2], None, None


_computed.defvjp(_forward, _backward)


def _of_experts(weights: Any, owner_B: Array) -> Any:
    def own(weight: Array) -> Array:
        return weight[owner_B]

    return jax.tree.map(own, weights)


def _added(
    owners: Array, of_weight: Array, sums: Array, own: Array
) -> tuple[Array, Array]:
    """The gradients ``[E, ...]`` with those of each block, and of the last expert.

    Args:
      owners: The experts of the last block of the turn before, and of these blocks. All
        blocks of an expert follow each other.
      of_weight: The gradients.
      sums: Those of the first of these experts, f32.
      own: Of each block.
    """
    for block in range(TURN):
        before, owner = owners[block], owners[block + 1]
        sums = jnp.where(owner == before, sums, of_weight[owner].astype(sums.dtype))
        sums = sums + own[block].astype(sums.dtype)
        of_weight = of_weight.at[owner].set(sums.astype(of_weight.dtype))
    return of_weight, sums


def _rows(begin_G: Array, end_G: Array, number: int, order_R: Array) -> Array:
    """``number`` rows from each beginning; from its end on, none: other indices."""
    nth_GC = begin_G[:, None] + jnp.arange(number, dtype=jnp.int32)
    absent_GC = jnp.arange(nth_GC.size, dtype=jnp.int32).reshape(nth_GC.shape)
    row_GC = order_R.at[nth_GC].get(mode="clip")
    return jnp.where(nth_GC < end_G[:, None], row_GC, len(order_R) + absent_GC)


def _taken(rows_RD: Array, row_GC: Array) -> Array:
    """Rows, and zeros where there is none."""
    return rows_RD.at[row_GC].get(mode="fill", fill_value=0, unique_indices=True)


def _in_order(values_GCD: Array, row_GC: Array, num_rows: int) -> Array:
    """The values of rows, and zeros for other rows: a buffer that is filled once."""
    values = values_GCD.reshape(row_GC.size, values_GCD.shape[-1])
    if not row_GC.size:
        zeros = jnp.zeros((num_rows, values.shape[1]), values.dtype)
        return varying_as(values_GCD, zeros)
    slot_GC = jnp.arange(row_GC.size, dtype=jnp.int32).reshape(row_GC.shape)
    slot_R = jnp.full(num_rows, row_GC.size, jnp.int32)
    slot_R = slot_R.at[row_GC].set(slot_GC, mode="drop", unique_indices=True)
    return values.at[slot_R].get(mode="fill", fill_value=0)


def _put(rows_RD: Array, row_GC: Array, values_GCD: Array) -> Array:
    """The rows with new values."""
    return rows_RD.at[row_GC].set(values_GCD, mode="drop", unique_indices=True)
