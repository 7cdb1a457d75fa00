# SPDX-License-Identifier: Apache-2.0
"""Attention by blocks: what one device does with some of the keys at a time.

Queries and keys are cut into blocks of a few hundred rows. Block after block of keys is
folded into the state of the queries, an online softmax, so no array is as large as the
square of the sequence, and the keys may come in any order: masks follow from the place
that each row has in its sequence. A pair of blocks that the mask empties is skipped.

Dims: N blocks of queries, M of keys, B batch, G key/value heads, R query heads of each,
X = R · rows of a block of queries, T rows of a block of keys, K head_dim.

Source: M. Milakov, N. Gimelshein, arXiv 1805.02867; T. Dao et al., arXiv 2205.14135.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tessera import _jax

# A block of scores of one head takes 1 MiB.
MOST_ROWS = 512
_LOWEST = float(np.finfo(np.float32).min)


@dataclass(frozen=True)
class Tiling:
    """How rows are cut into blocks.

    Attributes:
      runs: Parts of the rows whose places follow each other; no block crosses one.
      length: Rows in all, a multiple of ``runs``.
    """

    runs: int
    length: int

    @property
    def blocks_per_run(self) -> int:
        """Blocks of one run."""
        return -(-(self.length // self.runs) // MOST_ROWS)

    @property
    def rows(self) -> int:
        """Rows of a block; the last of a run may be padded by a few."""
        return -(-(self.length // self.runs) // self.blocks_per_run)

    @property
    def count(self) -> int:
        """Blocks in all."""
        return self.runs * self.blocks_per_run

    def split(self, x: Array, dim: int = 0, fill: int = 0) -> Array:
        """Cut one dim into blocks, which become the leading dim."""
        run = self.length // self.runs
        x = x.reshape(*x.shape[:dim], self.runs, run, *x.shape[dim + 1 :])
        if padding := self.blocks_per_run * self.rows - run:
            widths = [(0, padding if d == dim + 1 else 0) for d in range(x.ndim)]
            x = jnp.pad(x, widths, constant_values=fill)
        x = x.reshape(*x.shape[:dim], self.count, self.rows, *x.shape[dim + 2 :])
        return jnp.moveaxis(x, dim, 0)

    def join(self, blocks: Array, dim: int = 0) -> Array:
        """Undo :meth:`split`."""
        x = jnp.moveaxis(blocks, 0, dim)
        padded = self.blocks_per_run * self.rows
        x = x.reshape(*x.shape[:dim], self.runs, padded, *x.shape[dim + 2 :])
        x = lax.slice_in_dim(x, 0, self.length // self.runs, axis=dim + 1)
        return x.reshape(*x.shape[:dim], self.length, *x.shape[dim + 2 :])

    def heads(self, x_BSHK: Array, groups: int = 0) -> Array:
        """Blocks of ``[B, S, H, K]``: ``[N, B, H, rows, K]``.

        With ``groups``, the rows of the H / groups heads of a group stand together:
        ``[N, B, groups, X, K]``.
        """
        blocks = jnp.swapaxes(self.split(x_BSHK, dim=1), 2, 3)
        if not groups:
            return blocks
        count, batch, _, _, width = blocks.shape
        return blocks.reshape(count, batch, groups, -1, width)

    def unheads(self, blocks: Array) -> Array:
        """Undo :meth:`heads`, with groups or without."""
        count, batch, *_, width = blocks.shape
        blocks = blocks.reshape(count, batch, -1, self.rows, width)
        return self.join(jnp.swapaxes(blocks, 2, 3), dim=1)


class Rows(NamedTuple):
    """Where the rows of some blocks lie.

    Attributes:
      place: int32 ``[N, rows]``, in the sequence; negative for what is no token.
      segment: int32 ``[N, B, rows]``, or None where a row of the batch is one segment.
    """

    place: Array
    segment: Array | None

    @classmethod
    def of(cls, tiling: Tiling, place: Array, segment: Array | None) -> "Rows":
        """Of places ``[S]`` and segments ``[B, S]``."""
        cut = None if segment is None else tiling.split(segment, dim=1)
        return cls(tiling.split(place, fill=-1), cut)


class Queries(NamedTuple):
    """Blocks of queries: ``[N, B, G, X, K]``, and where they lie."""

    q: Array
    at: Rows


class Keys(NamedTuple):
    """Blocks of keys and values: ``[M, B, G, T, K]`` each, and where they lie."""

    k: Array
    v: Array
    at: Rows


class Softmax(NamedTuple):
    """The online softmax of blocks of queries, f32.

    Attributes:
      read: ``[N, B, G, X, K]``: weighted sum of values, not divided yet.
      highest: ``[N, B, G, X]``: highest score so far.
      total: ``[N, B, G, X]``: sum of weights, relative to the highest.
    """

    read: Array
    highest: Array
    total: Array

    @classmethod
    def before(cls, queries: Queries) -> "Softmax":
        """Of queries that have seen no key."""
        shape = queries.q.shape

        def full(shape: tuple[int, ...], value: float) -> Array:
            return varying_as(queries.q, jnp.full(shape, value, jnp.float32))

        return cls(full(shape, 0.0), full(shape[:-1], _LOWEST), full(shape[:-1], 0.0))

    def result(self) -> tuple[Array, Array]:
        """What each query reads, and the logarithm of its sum of weights; f32."""
        read = self.read / self.total[..., None]
        return read, self.highest + jnp.log(self.total)


class Saved(NamedTuple):
    """What the backward pass knows of the queries.

    Attributes:
      out_gradient: ``[N, B, G, X, K]``, of what each query read.
      log_total: f32 ``[N, B, G, X]``, from :meth:`Softmax.result`.
      share: f32 ``[N, B, G, X]``: sum over K of the read times its gradient.
    """

    out_gradient: Array
    log_total: Array
    share: Array

    @classmethod
    def of(
        cls,
        tiling: Tiling,
        groups: int,
        log_total: Array,
        out: Array,
        gradient: Array,
    ) -> "Saved":
        """Of arrays ``[B, S, H]`` and ``[B, S, H, K]``."""
        share = share_of(out, gradient)
        return cls(
            tiling.heads(gradient, groups),
            tiling.heads(log_total[..., None], groups)[..., 0],
            tiling.heads(share[..., None], groups)[..., 0],
        )


def share_of(out: Array, gradient: Array) -> Array:
    """Each query's sum of what it read times its gradient: f32 ``[B, S, H]``."""
    product = out.astype(jnp.float32) * gradient.astype(jnp.float32)
    return product.sum(axis=-1)


@dataclass(frozen=True)
class Mask:
    """Which keys a query may see, besides the segments, and how strongly.

    Attributes:
      causal: Whether it sees those that come before it alone.
      window: int32 scalar: how many tokens back it sees, its own included; it has a
        meaning where ``causal`` is.
      soft_cap: Scores s become ``soft_cap * tanh(s / soft_cap)``; None leaves them.
    """

    causal: bool
    window: Any
    soft_cap: float | None = None

    def visible(self, queries: Rows, keys: Rows) -> Array:
        """Whether: bool ``[B or 1, rows, T]`` for one block of each."""
        distance = queries.place[:, None] - keys.place[None]
        seen = jnp.broadcast_to(keys.place >= 0, distance.shape)
        if self.causal:
            seen = seen & (distance >= 0) & (distance < self.window)
        if queries.segment is None or keys.segment is None:
            return seen[None]
        return seen & (queries.segment[:, :, None] == keys.segment[:, None])

    def may_see(self, queries: Rows, keys: Rows) -> Array:
        """False only where :meth:`visible` is false everywhere, from ranges alone."""
        last = keys.place.max()
        seen = last >= 0
        if self.causal:
            far = np.iinfo(np.int32).max
            first = jnp.where(keys.place >= 0, keys.place, far).min()
            earliest = jnp.where(queries.place >= 0, queries.place, far).min()
            seen = seen & (first <= queries.place.max())
            seen = seen & (earliest - last < self.window)
        if queries.segment is None or keys.segment is None:
            return seen
        overlap = queries.segment.min(1) <= keys.segment.max(1)
        overlap = overlap & (keys.segment.min(1) <= queries.segment.max(1))
        return seen & overlap.any()


def fold(state: Softmax, queries: Queries, keys: Keys, mask: Mask) -> Softmax:
    """The state of all queries after they have seen some more keys.

    Every query must see a key at last; until then its state is finite, and of no use.
    """

    def one_query_block(_: None, block: tuple[Softmax, Queries]) -> Any:
        state, queries = block

        def one_key_block(state: Softmax, keys: Keys) -> tuple[Softmax, None]:
            seen = mask.may_see(queries.at, keys.at)
            return lax.cond(
                seen, lambda: _folded(state, queries, keys, mask), lambda: state
            ), None

        return None, lax.scan(one_key_block, state, keys)[0]

    return lax.scan(one_query_block, None, (state, queries))[1]


def fold_gradients(
    gradients: tuple[Array, Array, Array],
    queries: Queries,
    saved: Saved,
    keys: Keys,
    mask: Mask,
) -> tuple[Array, Array, Array]:
    """Add what some keys contribute to the gradients of queries, keys and values.

    Args:
      gradients: f32, of the shapes of ``queries.q``, ``keys.k`` and ``keys.v``.
      queries: Blocks of queries.
      saved: What is known of them.
      keys: Blocks of keys.
      mask: Which of them each query sees.
    """
    of_queries, of_keys, of_values = gradients

    def one_query_block(of_key_blocks: Any, block: Any) -> Any:
        of_query, queries, saved = block

        def one_key_block(of_query: Array, block: Any) -> Any:
            keys, of_key, of_value = block
            now = of_query, of_key, of_value
            of_query, *rest = lax.cond(
                mask.may_see(queries.at, keys.at),
                lambda: _with_gradients(now, queries, saved, keys, mask),
                lambda: now,
            )
            return of_query, tuple(rest)

        of_query, of_key_blocks = lax.scan(
            one_key_block, of_query, (keys, *of_key_blocks)
        )
        return of_key_blocks, of_query

    (of_keys, of_values), of_queries = lax.scan(
        one_query_block, (of_keys, of_values), (of_queries, queries, saved)
    )
    return of_queries, of_keys, of_values


def _scores(queries: Queries, keys: Keys, mask: Mask) -> tuple[Array, Any]:
    """f32 ``[B, G, X, T]`` of one block of each, lowest where nothing may be seen.

    And their derivative by the product of query and key.
    """
    scores, slope = _product("bgxk,bgtk->bgxt", queries.q, keys.k), 1.0
    if mask.soft_cap is not None:
        bent = jnp.tanh(scores / mask.soft_cap)
        scores, slope = bent * mask.soft_cap, 1.0 - bent * bent
    visible = mask.visible(queries.at, keys.at)
    heads = scores.shape[2] // visible.shape[1]
    visible = jnp.tile(visible, (1, heads, 1))[:, None]
    return jnp.where(visible, scores, _LOWEST), slope


def _folded(state: Softmax, queries: Queries, keys: Keys, mask: Mask) -> Softmax:
    scores, _ = _scores(queries, keys, mask)
    highest = jnp.maximum(state.highest, scores.max(axis=-1))
    weights = jnp.exp(scores - highest[..., None])
    kept = jnp.exp(state.highest - highest)
    read = _product("bgxt,bgtk->bgxk", weights.astype(keys.v.dtype), keys.v)
    return Softmax(
        read=state.read * kept[..., None] + read,
        highest=highest,
        total=state.total * kept + weights.sum(axis=-1),
    )


def _with_gradients(
    gradients: tuple[Array, Array, Array],
    queries: Queries,
    saved: Saved,
    keys: Keys,
    mask: Mask,
) -> tuple[Array, Array, Array]:
    of_query, of_key, of_value = gradients
    dtype = queries.q.dtype
    scores, slope = _scores(queries, keys, mask)
    weights = jnp.exp(scores - saved.log_total[..., None])
    of_value += _product("bgxt,bgxk->bgtk", weights.astype(dtype), saved.out_gradient)
    of_weights = _product("bgxk,bgtk->bgxt", saved.out_gradient, keys.v)
    of_scores = weights * (of_weights - saved.share[..., None])
    if mask.soft_cap is not None:
        of_scores *= slope
    of_scores = of_scores.astype(dtype)
    of_query += _product("bgxt,bgtk->bgxk", of_scores, keys.k)
    of_key += _product("bgxt,bgxk->bgtk", of_scores, queries.q)
    return of_query, of_key, of_value


def _product(equation: str, left: Array, right: Array) -> Array:
    return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32)


def varying_as(like: Array, value: Array) -> Array:
    """A value that may differ between devices wherever another one may.

    A loop's state has to be so from the beginning (JAX checks it, with ``check_vma``).
    """
    return _varying(value, _jax.varying_axes(like))


def all_varying(axis: str, *values: Any) -> list[Any]:
    """Values that may differ over ``axis`` and wherever any of them may; or None."""
    # Outside of check_vma nothing is known to vary, not even the rank.
    return varying_alike(*values, lax.axis_index(axis))[:-1]


def varying_alike(*values: Any) -> list[Any]:
    """Values that may all differ wherever any of them may; or None."""
    axes = frozenset[str]().union(
        *(_jax.varying_axes(x) for x in values if x is not None)
    )
    return [None if x is None else _varying(x, axes) for x in values]


def _varying(value: Array, axes: frozenset[str]) -> Array:
    missing = tuple(axes - _jax.varying_axes(value))
    return lax.pcast(value, missing, to="varying") if missing else value


def zeros_like(x: Array) -> Array:
    """f32 zeros of a shape, to add gradients to."""
    return varying_as(x, jnp.zeros(x.shape, jnp.float32))
