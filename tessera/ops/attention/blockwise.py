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

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tessera import _jax

# A block of scores of one head takes 1 MiB.
MOST_ROWS = 512
# Blocks are smaller where those of all heads, 4 MiB, would not stay in the caches of
# two cores, and where a sequence had less than eight: half of those on a causal mask's
# diagonal are computed for nothing.
_MOST_SCORES = 2**20
_FEWEST_BLOCKS = 8
_FEWEST_ROWS = 128
_LOWEST = float(np.finfo(np.float32).min)


@dataclass(frozen=True)
class Tiling:
    """How rows are cut into blocks.

    Attributes:
      runs: Parts of the rows whose places follow each other; no block crosses one.
      length: Rows in all, a multiple of ``runs``.
      heads_at_once: Of query heads times batch: the more, the smaller the blocks.
    """

    runs: int
    length: int
    heads_at_once: int = 1

    @property
    def most_rows(self) -> int:
        """Rows of a block at most."""
        rows = MOST_ROWS
        while rows > _FEWEST_ROWS and (
            self.heads_at_once * rows**2 > _MOST_SCORES
            or _FEWEST_BLOCKS * rows > self.length // self.runs
        ):
            rows //= 2
        return rows

    @property
    def blocks_per_run(self) -> int:
        """Blocks of one run."""
        return -(-(self.length // self.runs) // self.most_rows)

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
        return self.blocks(jnp.swapaxes(x_BSHK, 1, 2), groups)

    def unheads(self, blocks: Array) -> Array:
        """Undo :meth:`heads`, with groups or without."""
        return jnp.swapaxes(self.unblocks(blocks), 1, 2)

    def blocks(self, x_BHSK: Array, groups: int = 0) -> Array:
        """Blocks of ``[B, H, S, K]``, as :meth:`heads` has them."""
        blocks = self.split(x_BHSK, dim=2)
        if not groups:
            return blocks
        count, batch, _, _, width = blocks.shape
        return blocks.reshape(count, batch, groups, -1, width)

    def unblocks(self, blocks: Array) -> Array:
        """Undo :meth:`blocks`, with groups or without."""
        count, batch, *_, width = blocks.shape
        return self.join(blocks.reshape(count, batch, -1, self.rows, width), dim=2)


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
            return varying_as(queries.q, jnp.full(shape, value, sum_dtype(queries.q)))

        return cls(full(shape, 0.0), full(shape[:-1], _LOWEST), full(shape[:-1], 0.0))

    def result(self) -> tuple[Array, Array]:
        """What each query reads, and the logarithm of its sum of weights; f32.

        A query that has seen no key reads zeros.
        """
        # Its logarithm gives every key the weight 0, and its gradients are 0.
        blind = self.highest == _LOWEST
        total = jnp.where(blind, jnp.inf, self.total)
        highest = jnp.where(blind, 0.0, self.highest)
        return self.read / total[..., None], highest + jnp.log(total)


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
    wide = sum_dtype(out)
    product = out.astype(wide) * gradient.astype(wide)
    return product.sum(axis=-1)


@dataclass(frozen=True)
class Mask:
    """Which keys a query may see, besides the segments, and how strongly.

    The product of query and key becomes a score by ``scale`` and ``soft_cap``.

    Attributes:
      causal: Whether it sees those that come before it alone.
      window: int32 scalar: how many tokens back it sees, its own included; it has a
        meaning where ``causal`` is.
      scale: What products of queries and keys are multiplied by.
      soft_cap: Scores s become ``soft_cap * tanh(s / soft_cap)``; None leaves them.
    """

    causal: bool
    window: Any
    scale: float = 1.0
    soft_cap: float | None = None

    def scores(self, products: Array) -> Array:
        """Of products of queries and keys."""
        scores = products * self.scale
        if self.soft_cap is None:
            return scores
        return jnp.tanh(scores / self.soft_cap) * self.soft_cap

    def slope(self, products: Array) -> Any:
        """The derivative of :meth:`scores`."""
        if self.soft_cap is None:
            return self.scale
        bent = jnp.tanh(products * (self.scale / self.soft_cap))
        return (1.0 - bent * bent) * self.scale

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

    def sees_all(self, queries: Rows, keys: Rows) -> Array:
        """True only where :meth:`visible` is true everywhere, from ranges alone."""
        first, last = keys.place.min(), keys.place.max()
        seen = first >= 0
        if self.causal:
            seen = seen & (last <= queries.place.min())
            seen = seen & (queries.place.max() - first < self.window)
        return seen & ((queries.segment is None) | (keys.segment is None))


def met(queries: Rows, keys: Rows, mask: Mask) -> Array:
    """What each block of queries has to do with each of keys: int32 ``[N, M]``.

    0 where all its queries see all its keys, 1 where some see some, 2 where none does.
    """

    def kind(queries: Rows, keys: Rows) -> Array:
        some = jnp.where(mask.may_see(queries, keys), jnp.int32(1), jnp.int32(2))
        return jnp.where(mask.sees_all(queries, keys), jnp.int32(0), some)

    return jax.vmap(jax.vmap(kind, (None, 0)), (0, None))(queries, keys)


def fold(state: Softmax, queries: Queries, keys: Keys, mask: Mask) -> Softmax:
    """The state of all queries after they have seen some more keys."""

    def one_query_block(_: None, block: tuple[Softmax, Queries, Array]) -> Any:
        state, queries, kinds = block

        def one_key_block(state: Softmax, block: tuple[Keys, Array]) -> Any:
            keys, kind = block
            now = state, queries, keys
            return lax.switch(
                kind,
                (
                    lambda: _folded(*now, mask, masked=False),
                    lambda: _folded(*now, mask, masked=True),
                    lambda: state,
                ),
            ), None

        return None, lax.scan(one_key_block, state, (keys, kinds))[0]

    kinds = met(queries.at, keys.at, mask)
    return lax.scan(one_query_block, None, (state, queries, kinds))[1]


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

    def one_query_block(of_key_blocks: tuple[Array, Array], block: Any) -> Any:
        of_query, queries, saved, kinds = block
        turned = _turned(queries.q), _turned(saved.out_gradient)

        def one_key_block(carry: tuple[Array, Array, Array], block: Any) -> Any:
            of_query, of_keys, of_values = carry
            keys, kind, n = block
            before = of_query, _at(of_keys, n), _at(of_values, n)
            now = before, queries, turned, saved, keys
            of_query, of_key, of_value = lax.switch(
                kind,
                (
                    lambda: _with_gradients(*now, mask, masked=False),
                    lambda: _with_gradients(*now, mask, masked=True),
                    lambda: before,
                ),
            )
            of_keys = lax.dynamic_update_index_in_dim(of_keys, of_key, n, 0)
            of_values = lax.dynamic_update_index_in_dim(of_values, of_value, n, 0)
            return (of_query, of_keys, of_values), None

        numbers = jnp.arange(kinds.size, dtype=jnp.int32)
        carry, _ = lax.scan(
            one_key_block, (of_query, *of_key_blocks), (keys, kinds, numbers)
        )
        return carry[1:], carry[0]

    kinds = met(queries.at, keys.at, mask)
    # Of keys and values turned: XLA multiplies on CPU at less than half the speed where
    # a product contracts the first dim of its left operand. And carried, since what a
    # scan stacks is copied from one query block to the next.
    of_key_blocks = _turned(gradients[1]), _turned(gradients[2])
    (of_keys, of_values), of_queries = lax.scan(
        one_query_block, of_key_blocks, (gradients[0], queries, saved, kinds)
    )
    return of_queries, _turned(of_keys), _turned(of_values)


def _at(blocks: Array, n: Array) -> Array:
    return lax.dynamic_index_in_dim(blocks, n, keepdims=False)


def _turned(x: Array) -> Array:
    return jnp.swapaxes(x, -1, -2)


def _scores(products: Array, queries: Queries, keys: Keys, mask: Mask) -> Array:
    """``[B, G, X, T]`` of one block of each, lowest where nothing may be seen."""
    visible = mask.visible(queries.at, keys.at)
    scores = mask.scores(products)
    by_heads = scores.reshape(*scores.shape[:2], -1, *visible.shape[1:])
    return jnp.where(visible[:, None, None], by_heads, _LOWEST).reshape(scores.shape)


def _folded(
    state: Softmax, queries: Queries, keys: Keys, mask: Mask, *, masked: bool
) -> Softmax:
    products = _product("bgxk,bgtk->bgxt", queries.q, keys.k)
    if masked:
        scores = _scores(products, queries, keys, mask)
        highest = scores.max(axis=-1)
    else:
        scores = mask.scores(products)
        # Scores rise with the products, or fall: what is there already is enough.
        extreme = products.max(axis=-1) if mask.scale > 0 else products.min(axis=-1)
        highest = mask.scores(extreme)
    highest = jnp.maximum(state.highest, highest)
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
    turned: tuple[Array, Array],
    saved: Saved,
    keys: Keys,
    mask: Mask,
    *,
    masked: bool,
) -> tuple[Array, Array, Array]:
    """Those of one block of each; of keys and values they are turned: ``[…, K, T]``.

    As ``turned``, the queries and the gradients of what they read, ``[…, K, X]``, are.
    """
    of_query, of_key, of_value = gradients
    products = _product("bgxk,bgtk->bgxt", queries.q, keys.k)
    scores = mask.scores(products)
    if masked:
        scores = _scores(products, queries, keys, mask)
    weights = jnp.exp(scores - saved.log_total[..., None])
    of_weights = _product("bgxk,bgtk->bgxt", saved.out_gradient, keys.v)
    of_scores = weights * (of_weights - saved.share[..., None]) * mask.slope(products)
    of_scores, weights = (x.astype(queries.q.dtype) for x in (of_scores, weights))
    return (
        of_query + _product("bgxt,bgtk->bgxk", of_scores, keys.k),
        of_key + _product("bgkx,bgxt->bgkt", turned[0], of_scores),
        of_value + _product("bgkx,bgxt->bgkt", turned[1], weights),
    )


def _product(equation: str, left: Array, right: Array) -> Array:
    return jnp.einsum(equation, left, right, preferred_element_type=sum_dtype(left))


def sum_dtype(x: Array) -> Any:
    """The dtype of scores and of sums: f32, and f64 for what is f64."""
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def varying_as(like: Array, value: Array) -> Array:
    """A value that may differ between devices wherever another one may.

    A loop's state has to be so from the beginning (JAX checks it, with ``check_vma``).
    """
    return _jax.varying_over(value, _jax.varying_axes(like))


def all_varying(axis: str, *values: Any) -> list[Any]:
    """Values that may differ over ``axis`` and wherever any of them may; or None."""
    # Outside of check_vma nothing is known to vary, not even the rank.
    return varying_alike(*values, lax.axis_index(axis))[:-1]


def varying_alike(*values: Any) -> list[Any]:
    """Values that may all differ wherever any of them may; or None."""
    axes = frozenset[str]().union(
        *(_jax.varying_axes(x) for x in values if x is not None)
    )
    return [None if x is None else _jax.varying_over(x, axes) for x in values]


def zeros_like(x: Array) -> Array:
    """f32 zeros of a shape, to add gradients to; f64 for what is f64."""
    return varying_as(x, jnp.zeros(x.shape, sum_dtype(x)))
