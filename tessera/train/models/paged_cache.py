# SPDX-License-Identifier: Apache-2.0
"""A cache of keys and values in blocks, and attention to it.

The slots of a batch are in parts, one for each shard of the batch. Each part has a pool
of blocks of its own, and each slot a table of the blocks that have its row, in order.
Block 0 belongs to nobody and is zero, as is every token of a block that its row has not
written: a row that is not finite leaves nothing to the next owner of its blocks.

A program reads the pool, and adds what it computes to a small buffer of new tokens; it
writes these to the pool once, at its end. So slots may share blocks that they read.

Attention reads the blocks of all slots as one list of chunks, some at a time, and
combines the softmax of each: its work is that of the tokens that are there, not of the
longest row.

Shape suffixes: P parts, N slots of a part, X slots of all, S new tokens, F their
buffer, H query heads, G key/value heads, K head_dim, T cached tokens, B blocks of a
pool, M items at a time.

Sources: PagedAttention, arXiv 2309.06180; Flash-Decoding, Dao et al. 2023.
"""

from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

# In place of the block of tokens that are not stored.
NO_WRITE: Final = 2**30
# Cached tokens of a slot that attention reads at a time, and of how many slots. Those
# of a round stay in the cache of a CPU's core.
CHUNK: Final = 128
ITEMS: Final = 16
# Below every score; finite, so that a row without any has no NaN.
_LOWEST: Final = -1e30


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("starts", "tables", "writes"),
    meta_fields=("block",),
)
@dataclass(frozen=True)
class Pages:
    """Where the rows of the slots are in the pools.

    Attributes:
      starts: Tokens of each slot that are cached: ``[P, N]``.
      tables: Of each kind of layer, the blocks of the cached tokens of each slot, and
        then block 0: ``[P, N, blocks]``.
      writes: Of each kind, the blocks in which the new tokens end up, from that of the
        first one on, and then ``NO_WRITE``: ``[P, N, few]``. The first may be another
        than that in the table, which others share.
      block: Tokens of a block.
    """

    starts: Int[Array, "parts slots"]
    tables: tuple[Int[Array, "parts slots blocks"], ...]
    writes: tuple[Int[Array, "parts slots few"], ...]
    block: int


class Chunks(NamedTuple):
    """The chunks of all slots that a layer reads, as one list of ``W`` items.

    Attributes:
      slots: Of each item ``[P, W]``; past the last item, the number of slots.
      blocks: ``[P, W, blocks of a chunk]``.
      firsts: The position of each item's first token ``[P, W]``.
      starts: Tokens of each slot that are cached ``[P, N]``.
      rounds: How many times ``ITEMS`` of them there are.
      copies: Keys and values of the first ones: ``copied``.
    """

    slots: Int[Array, "parts items"]
    blocks: Int[Array, "parts items few"]
    firsts: Int[Array, "parts items"]
    starts: Int[Array, "parts slots"]
    rounds: Int[Array, ""]
    copies: tuple[tuple[Array, Array], ...] = ()


def chunks_of(pages: Pages, kind: int, window: int | None) -> Chunks:
    """The chunks of a kind of layer: of all tokens, or those of a window."""
    block = pages.block
    slots, width = pages.tables[kind].shape[1:]
    if window is not None:
        width = min(width, -(-window // block) + 1)
    few = min(max(CHUNK // block, 1), width)
    items = ITEMS * -(-slots * -(-width // few) // ITEMS)

    def of_part(table: Array, starts: Array) -> tuple[Array, ...]:
        first = jnp.zeros_like(starts)
        if window is not None:
            first = jnp.maximum(starts + 1 - window, 0) // block
        counts = -(-(-(-starts // block) - first) // few)
        ends, item = jnp.cumsum(counts), jnp.arange(items, dtype=jnp.int32)
        slot = (ends <= item[:, None]).sum(-1, dtype=jnp.int32)
        own = jnp.minimum(slot, slots - 1)
        begin = first[own] + (item - (ends - counts)[own]) * few
        index = begin[:, None] + jnp.arange(few, dtype=jnp.int32)
        blocks = table.at[own[:, None], index].get(mode="fill", fill_value=0)
        return slot, blocks, begin * block, -(-ends[-1] // ITEMS)

    slot, blocks, firsts, rounds = jax.vmap(of_part)(pages.tables[kind], pages.starts)
    return Chunks(slot, blocks, firsts, pages.starts, rounds.max())


def _blocks_of(pool_BGTK: Array, ids_NC: Array) -> Array:
    """The blocks of each row side by side: ``[N, G, C * T, K]``."""
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(1, 3, 4), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    sizes = (1, *pool_BGTK.shape[1:])
    rows = lax.gather(pool_BGTK, ids_NC[..., None], numbers, sizes, mode="clip")
    return rows.reshape(*rows.shape[:2], -1, rows.shape[-1])


gather_blocks = jax.vmap(_blocks_of)
"""``[P, B, G, block, K]`` and ids ``[P, N, C]`` to ``[P, N, G, C * block, K]``."""


def _keys_and_values(pool: tuple[Array, ...], ids: Array) -> tuple[Array, Array]:
    """Of each row's blocks: ``[P, N, G, K, T]`` and ``[P, N, G, T, K]``."""
    keys, values = (gather_blocks(each, ids) for each in pool)
    return keys.swapaxes(-1, -2), values


def copied(chunks: Chunks, pool: tuple[Array, ...]) -> Chunks:
    """Chunks with copies of the first ones, for programs that read them many times.

    They take at most the memory of the pool and of a chunk of each slot, in arrays of
    ``ITEMS``, as many, twice as many, and so on: attention goes through those that have
    any. Chunks behind them are read from the pool.
    """
    items, few = chunks.blocks.shape[1:]
    room = min(items, pool[0].shape[1] // few + chunks.starts.shape[1])
    copies, first, size = list[tuple[Array, Array]](), 0, ITEMS

    def gather(ids: Array) -> tuple[Array, ...]:
        return _keys_and_values(pool, ids)

    def zeros(ids: Array) -> tuple[Array, ...]:
        return jax.tree.map(jnp.zeros_like, jax.eval_shape(gather, ids))

    while first < room:
        ids = chunks.blocks[:, first : first + size]
        copies.append(lax.cond(chunks.rounds * ITEMS > first, gather, zeros, ids))
        first += ids.shape[1]
        size = first
    return chunks._replace(copies=tuple(copies))


def store(
    pool_PBGTK: Array, new_XGFK: Array, pages: Pages, kind: int
) -> Float[Array, "parts blocks kv_heads block head_dim"]:
    """The pool with the new tokens, and zeros behind them in their blocks."""
    block, writes = pages.block, pages.writes[kind]

    def of_slot(old_GTK: Array, new_GFK: Array, offset: Array) -> Array:
        source = jnp.arange(old_GTK.shape[1], dtype=jnp.int32) - offset
        is_new = (source >= 0) & (source < new_GFK.shape[1])
        moved = new_GFK.at[:, source].get(mode="clip")
        old_GTK = jnp.where((source < 0)[:, None], old_GTK, 0)
        return jnp.where(is_new[:, None], moved, old_GTK)

    def of_part(
        pool: Array, new: Array, starts: Array, table: Array, writes: Array
    ) -> Array:
        slots, few = writes.shape
        first = starts[:, None] // block + jnp.arange(few, dtype=jnp.int32)
        reads = jnp.take_along_axis(table, first, axis=1, mode="fill", fill_value=0)
        rows = jax.vmap(of_slot)(_blocks_of(pool, reads), new, starts % block)
        rows = rows.reshape(slots, -1, few, *pool.shape[2:]).swapaxes(1, 2)
        return pool.at[writes].set(rows, mode="drop")

    new = new_XGFK.astype(pool_PBGTK.dtype)
    new = new.reshape(*pages.starts.shape, *new.shape[1:])
    return jax.vmap(of_part)(pool_PBGTK, new, pages.starts, pages.tables[kind], writes)


class _Softmax(NamedTuple):
    """A softmax of some keys, to be combined with that of others.

    Attributes:
      most: The largest score ``[P, N, G, Q]``, f32.
      total: The sum of ``exp(score - most)``.
      values: The sum of ``exp(score - most) * value``: ``[P, N, G, Q, K]``.
    """

    most: Array
    total: Array
    values: Array


def _partial_softmax(
    q_GQK: Array, k_GKT: Array, v_GTK: Array, mask: Array, cap: float | None
) -> _Softmax:
    """The softmax of each query over the keys of its own row."""
    scores = jnp.einsum(
        "...qk,...kt->...qt",
        q_GQK,
        k_GKT.astype(q_GQK.dtype),
        preferred_element_type=jnp.float32,
    )
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    scores = jnp.where(mask, scores, _LOWEST)
    most = scores.max(axis=-1)
    weights = jnp.exp(scores - most[..., None])
    values = jnp.einsum(
        "...qt,...tk->...qk",
        weights.astype(q_GQK.dtype),
        v_GTK.astype(q_GQK.dtype),
        preferred_element_type=jnp.float32,
    )
    return _Softmax(most, weights.sum(axis=-1), values)


def _combine(state: _Softmax, items: _Softmax, is_own: Array) -> _Softmax:
    """The softmax of each slot with those of its items; ``is_own`` is ``[P, N, M]``."""
    own = is_own[..., None, None]
    item_most = jnp.where(own, items.most[:, None], _LOWEST).max(axis=2)
    most = jnp.maximum(state.most, item_most)
    before = jnp.exp(state.most - most)
    factors = jnp.where(own, jnp.exp(items.most[:, None] - most[:, :, None]), 0.0)
    # What is not finite must not reach other rows through a product with zero.
    total = (items.total + (0 * items.values).sum(axis=-1))[:, None]
    values = jnp.where(jnp.isfinite(items.values), items.values, 0.0)
    return _Softmax(
        most,
        before * state.total + jnp.where(own, factors * total, 0.0).sum(axis=2),
        before[..., None] * state.values
        + jnp.einsum("pnmgq,pmgqk->pngqk", factors, values),
    )


def paged_attention(
    q_PNSHK: Float[Array, "parts slots new heads head_dim"],
    pool: tuple[Array, ...],
    new: tuple[Array, ...],
    chunks: Chunks,
    index: Int[Array, ""],
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks_H: Float[Array, " heads"] | None = None,
) -> Float[Array, "parts slots new heads head_dim"]:
    """Causal attention of new tokens to the cached ones of their slot, and to the new.

    Args:
      q_PNSHK: Queries, scaled.
      pool: Keys and values ``[P, B, G, block, K]``.
      new: Keys ``[P * N, G, K, F]`` and values ``[P * N, G, F, K]`` of the new tokens,
        those of the queries from ``index`` on.
      chunks: What is read of the pool, or of copies.
      index: New tokens before those of the queries.
      window: Tokens that a query attends to, its own included; None is all.
      soft_cap: Scores x become ``cap * tanh(x / cap)``.
      sinks_H: Scores of each head beside those of keys.
    """
    parts, slots, count, heads, width = q_PNSHK.shape
    kv_heads = pool[0].shape[2]
    grouped = q_PNSHK.reshape(parts, slots, count, kv_heads, -1, width)
    q_PNGQK = jnp.moveaxis(grouped, 2, 3).reshape(parts, slots, kv_heads, -1, width)
    # The new token of each query; all heads of a group follow each other.
    offset = index + jnp.repeat(jnp.arange(count), heads // kv_heads)

    def seen(key: Array, query: Array) -> Array:
        is_seen = key <= query
        return is_seen if window is None else is_seen & (key > query - window)

    # Without the dim of parts, whose size may be 1: XLA on CPUs would copy the buffers.
    q_XGQK, (k_XGKF, v_XGFK) = q_PNGQK.reshape(-1, *q_PNGQK.shape[2:]), new
    mask = seen(jnp.arange(v_XGFK.shape[2]), offset[:, None])
    state = _partial_softmax(q_XGQK, k_XGKF, v_XGFK, mask, soft_cap)
    state = _Softmax(*(x.reshape(parts, slots, *x.shape[1:]) for x in state))

    def attend(
        first: Array, k_PMGKT: Array, v_PMGTK: Array, state: _Softmax
    ) -> _Softmax:
        own, firsts = (
            lax.dynamic_slice_in_dim(x, first, v_PMGTK.shape[1], axis=1)
            for x in (chunks.slots, chunks.firsts)
        )
        is_own = own[:, None] == jnp.arange(slots)[:, None]
        own = jnp.minimum(own, slots - 1)
        q_PMGQK = jnp.take_along_axis(q_PNGQK, own[..., None, None, None], axis=1)
        start = jnp.take_along_axis(chunks.starts, own, axis=1)[..., None, None]
        key = firsts[..., None, None] + jnp.arange(v_PMGTK.shape[3])
        mask = (key < start) & seen(key, start + offset[:, None])
        items = _partial_softmax(q_PMGQK, k_PMGKT, v_PMGTK, mask[:, :, None], soft_cap)
        return _combine(state, items, is_own)

    def keep(_first: Array, _k: Array, _v: Array, state: _Softmax) -> _Softmax:
        return state

    first = 0
    for k_PMGKT, v_PMGTK in chunks.copies:
        has_any = chunks.rounds * ITEMS > first
        arguments = jnp.int32(first), k_PMGKT, v_PMGTK, state
        state = lax.cond(has_any, attend, keep, *arguments)
        first += v_PMGTK.shape[1]

    def round_(number: Array, state: _Softmax) -> _Softmax:
        first = number * ITEMS
        blocks = lax.dynamic_slice_in_dim(chunks.blocks, first, ITEMS, axis=1)
        return attend(first, *_keys_and_values(pool, blocks), state)

    state = lax.fori_loop(first // ITEMS, chunks.rounds, round_, state)
    most, total, values = state
    if sinks_H is not None:
        sinks = sinks_H.astype(jnp.float32).reshape(kv_heads, 1, -1)
        sinks = jnp.broadcast_to(sinks, (kv_heads, count, sinks.shape[-1]))
        total = total + jnp.exp(sinks.reshape(kv_heads, -1) - most)
    out = (values / total[..., None]).reshape(parts, slots, kv_heads, count, -1, width)
    out = jnp.moveaxis(out, 3, 2).reshape(q_PNSHK.shape)
    return out.astype(q_PNSHK.dtype)
