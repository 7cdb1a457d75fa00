# SPDX-License-Identifier: Apache-2.0
"""Blockwise attention: an online softmax over blocks of keys, and its gradient.

Block after block of keys is folded into the online softmax of the queries, so no array
is as large as the square of the sequence, and the keys may come in any order: the mask
follows from the position of each row. Fully masked pairs of blocks are skipped.

JAX's ``dot_product_attention`` has no implementation for CPU or TPU whose memory does
not grow with the square of the sequence, and none that takes the keys in parts.

Dims: N blocks of queries, M of keys, B batch, G key/value heads, R query heads of each,
X = R · rows of a block of queries, T rows of a block of keys, K head_dim.

Source: M. Milakov, N. Gimelshein, arXiv 1805.02867; T. Dao et al., arXiv 2205.14135.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tessera.jax_compat import traces
from tessera.ops.attention.tiling import Rows, Tiling
from tessera.tracing.scope import TAKEN

_LOWEST = float(np.finfo(np.float32).min)

# Gradients of queries, keys and values.
Gradients: TypeAlias = tuple[Array, Array, Array]


class Queries(NamedTuple):
    """Blocks of queries ``[N, B, G, X, K]``, and their positions."""

    q: Array
    rows: Rows


class Keys(NamedTuple):
    """Blocks of keys and values, ``[M, B, G, T, K]`` each, and their positions."""

    k: Array
    v: Array
    rows: Rows


class Softmax(NamedTuple):
    """The online softmax of blocks of queries, f32.

    Attributes:
      out: ``[N, B, G, X, K]``: weighted sum of values, not yet divided.
      highest: ``[N, B, G, X]``: highest score so far.
      total: ``[N, B, G, X]``: sum of weights, relative to the highest score.
    """

    out: Array
    highest: Array
    total: Array

    @classmethod
    def initial(cls, queries: Queries) -> "Softmax":
        """Of queries that have attended to no key."""
        shape = queries.q.shape

        def full(shape: tuple[int, ...], value: float) -> Array:
            return varying_as(queries.q, jnp.full(shape, value, sum_dtype(queries.q)))

        return cls(full(shape, 0.0), full(shape[:-1], _LOWEST), full(shape[:-1], 0.0))

    def result(self) -> tuple[Array, Array]:
        """The output of each query, and the log of its sum of weights (lse); f32.

        A query without keys has an output of zeros.
        """
        # Its infinite lse makes every weight, and so its gradients, zero.
        is_empty = self.highest == _LOWEST
        total = jnp.where(is_empty, jnp.inf, self.total)
        highest = jnp.where(is_empty, 0.0, self.highest)
        return self.out / total[..., None], highest + jnp.log(total)


class OutputGradients(NamedTuple):
    """What the backward pass needs of each query.

    Attributes:
      dout: ``[N, B, G, X, K]``, the gradient of the output.
      lse: f32 ``[N, B, G, X]``, from :meth:`Softmax.result`.
      delta: f32 ``[N, B, G, X]``, from :func:`delta_of`.
    """

    dout: Array
    lse: Array
    delta: Array

    @classmethod
    def of(
        cls, tiling: Tiling, groups: int, dout: Array, lse: Array, delta: Array
    ) -> "OutputGradients":
        """Of ``dout [B, S, H, K]``, and ``lse`` and ``delta [B, S, H]``."""
        return cls(
            tiling.heads(dout, groups),
            tiling.heads(lse[..., None], groups)[..., 0],
            tiling.heads(delta[..., None], groups)[..., 0],
        )


def delta_of(out: Array, dout: Array) -> Array:
    """The sum over K of each output times its gradient: f32 ``[B, S, H]``."""
    wide = sum_dtype(out)
    return (out.astype(wide) * dout.astype(wide)).sum(axis=-1)


@dataclass(frozen=True)
class Mask:
    """Which keys a query attends to, apart from segments, and the scores.

    Attributes:
      causal: Whether a query attends only to keys at or before its position.
      window: int32 scalar: how many positions back a query attends, including its own;
        only used where ``causal`` is set.
      scale: The factor of the products of queries and keys.
      soft_cap: Scores s become ``soft_cap * tanh(s / soft_cap)``; None leaves them.
      skips_by_segments: Whether blocks without a common segment are skipped. Where a
        batch is sharded by the compiler, the check would need a collective for each
        pair of blocks.
      blocks: Of a sequence that attends to itself, into how many blocks it is cut on
        all devices together, so that predictions know how many pairs are skipped.
    """

    causal: bool
    window: Any
    scale: float = 1.0
    soft_cap: float | None = None
    skips_by_segments: bool = True
    blocks: int | None = None

    def scores(self, products: Array) -> Array:
        """The scores of products of queries and keys."""
        scores = products * self.scale
        if self.soft_cap is None:
            return scores
        return jnp.tanh(scores / self.soft_cap) * self.soft_cap

    def slope(self, products: Array) -> Any:
        """The derivative of :meth:`scores`."""
        if self.soft_cap is None:
            return self.scale
        capped = jnp.tanh(products * (self.scale / self.soft_cap))
        return (1.0 - capped * capped) * self.scale

    def visible(self, queries: Rows, keys: Rows) -> Array:
        """The mask of one block of each: bool ``[B or 1, rows, T]``."""
        distance = queries.position[:, None] - keys.position[None]
        visible = jnp.broadcast_to(keys.position >= 0, distance.shape)
        if self.causal:
            visible = visible & (distance >= 0) & (distance < self.window)
        if queries.segment is None or keys.segment is None:
            return visible[None]
        return visible & (queries.segment[:, :, None] == keys.segment[:, None])

    def any_visible(self, queries: Rows, keys: Rows) -> Array:
        """False only where :meth:`visible` is false everywhere, from ranges alone."""
        last = keys.position.max()
        some = last >= 0
        if self.causal:
            far = np.iinfo(np.int32).max
            first = jnp.where(keys.position >= 0, keys.position, far).min()
            earliest = jnp.where(queries.position >= 0, queries.position, far).min()
            some = some & (first <= queries.position.max())
            some = some & (earliest - last < self.window)
        if not self.skips_by_segments:
            return some
        if queries.segment is None or keys.segment is None:
            return some
        overlap = queries.segment.min(1) <= keys.segment.max(1)
        overlap = overlap & (keys.segment.min(1) <= queries.segment.max(1))
        return some & overlap.any()

    def all_visible(self, queries: Rows, keys: Rows) -> Array:
        """True only where :meth:`visible` is true everywhere, from ranges alone."""
        first, last = keys.position.min(), keys.position.max()
        every = first >= 0
        if self.causal:
            every = every & (last <= queries.position.min())
            every = every & (queries.position.max() - first < self.window)
        return every & ((queries.segment is None) | (keys.segment is None))


# What the mask leaves of a pair of blocks.
_ALL, _SOME, _NONE = range(3)


def _visibility(queries: Rows, keys: Rows, mask: Mask) -> Array:
    """What the mask leaves of each pair of blocks: int32 ``[N, M]``."""

    def kind(queries: Rows, keys: Rows) -> Array:
        some, every = mask.any_visible(queries, keys), mask.all_visible(queries, keys)
        rest = jnp.where(some, jnp.int32(_SOME), jnp.int32(_NONE))
        return jnp.where(every, jnp.int32(_ALL), rest)

    return jax.vmap(jax.vmap(kind, (None, 0)), (0, None))(queries, keys)


def _by_visibility(
    kind: Array, compute: Callable[..., Any], unchanged: Any, mask: Mask
) -> Any:
    """``compute(masked=…)`` of a pair of blocks; ``unchanged`` if it is all masked."""
    every, some = partial(compute, masked=False), partial(compute, masked=True)
    if mask.causal and (count := mask.blocks):
        bound = f"{TAKEN}at_most_{{}}_of_{count**2}"
        every = jax.named_scope(bound.format(count * (count - 1) // 2))(every)
        some = jax.named_scope(bound.format(count))(some)
    return lax.switch(kind, (every, some, lambda: unchanged))


def attend_blocks(queries: Queries, keys: Keys, mask: Mask) -> tuple[Array, Array]:
    """The output of queries that attend to these keys alone, and its lse."""
    return fold(Softmax.initial(queries), queries, keys, mask).result()


def fold(state: Softmax, queries: Queries, keys: Keys, mask: Mask) -> Softmax:
    """The online softmax of all queries after they attend to some more keys."""

    def one_query_block(_: None, block: tuple[Softmax, Queries, Array]) -> Any:
        state, queries, kinds = block

        def one_key_block(state: Softmax, block: tuple[Keys, Array]) -> Any:
            keys, kind = block
            fold_block = partial(_fold_block, state, queries, keys, mask)
            return _by_visibility(kind, fold_block, state, mask), None

        return None, lax.scan(one_key_block, state, (keys, kinds))[0]

    kinds = _visibility(queries.rows, keys.rows, mask)
    return lax.scan(one_query_block, None, (state, queries, kinds))[1]


def fold_gradients(
    gradients: Gradients,
    queries: Queries,
    outputs: OutputGradients,
    keys: Keys,
    mask: Mask,
) -> Gradients:
    """Add what some keys contribute to the gradients of queries, keys and values.

    Args:
      gradients: f32, of the shapes of ``queries.q``, ``keys.k`` and ``keys.v``.
      queries: Blocks of queries.
      outputs: The gradients of their outputs.
      keys: Blocks of keys.
      mask: Which of them each query attends to.
    """

    def one_query_block(key_gradients: tuple[Array, Array], block: Any) -> Any:
        dq, queries, outputs, kinds = block
        transposed = _transposed(queries.q), _transposed(outputs.dout)

        def one_key_block(carry: Gradients, block: Any) -> Any:
            dq, dk_blocks, dv_blocks = carry
            keys, kind, n = block
            before = dq, _at(dk_blocks, n), _at(dv_blocks, n)
            add = partial(
                _add_gradients, before, queries, transposed, outputs, keys, mask
            )
            dq, dk, dv = _by_visibility(kind, add, before, mask)
            dk_blocks = lax.dynamic_update_index_in_dim(dk_blocks, dk, n, 0)
            dv_blocks = lax.dynamic_update_index_in_dim(dv_blocks, dv, n, 0)
            return (dq, dk_blocks, dv_blocks), None

        numbers = jnp.arange(kinds.size, dtype=jnp.int32)
        carry, _ = lax.scan(one_key_block, (dq, *key_gradients), (keys, kinds, numbers))
        return carry[1:], carry[0]

    kinds = _visibility(queries.rows, keys.rows, mask)
    # Those of keys and values are transposed: on CPU XLA multiplies at less than half
    # the speed where a product contracts the first dim of its left operand. They are
    # carried, since XLA copies what a scan stacks from one query block to the next.
    key_gradients = _transposed(gradients[1]), _transposed(gradients[2])
    (dk, dv), dq = lax.scan(
        one_query_block, key_gradients, (gradients[0], queries, outputs, kinds)
    )
    return dq, _transposed(dk), _transposed(dv)


def _at(blocks: Array, n: Array) -> Array:
    return lax.dynamic_index_in_dim(blocks, n, keepdims=False)


def _transposed(x: Array) -> Array:
    return jnp.swapaxes(x, -1, -2)


def _scores(products: Array, queries: Queries, keys: Keys, mask: Mask) -> Array:
    """``[B, G, X, T]`` of one block of each, the lowest number where masked."""
    visible = mask.visible(queries.rows, keys.rows)
    scores = mask.scores(products)
    by_heads = scores.reshape(*scores.shape[:2], -1, *visible.shape[1:])
    return jnp.where(visible[:, None, None], by_heads, _LOWEST).reshape(scores.shape)


def _fold_block(
    state: Softmax, queries: Queries, keys: Keys, mask: Mask, *, masked: bool
) -> Softmax:
    products = _product("bgxk,bgtk->bgxt", queries.q, keys.k)
    if masked:
        scores = _scores(products, queries, keys, mask)
        highest = scores.max(axis=-1)
    else:
        scores = mask.scores(products)
        # Scores are monotonic in the products, so their extreme has the highest score.
        extreme = products.max(axis=-1) if mask.scale > 0 else products.min(axis=-1)
        highest = mask.scores(extreme)
    highest = jnp.maximum(state.highest, highest)
    weights = jnp.exp(scores - highest[..., None])
    correction = jnp.exp(state.highest - highest)
    out = _product("bgxt,bgtk->bgxk", weights.astype(keys.v.dtype), keys.v)
    return Softmax(
        out=state.out * correction[..., None] + out,
        highest=highest,
        total=state.total * correction + weights.sum(axis=-1),
    )


def _add_gradients(
    gradients: Gradients,
    queries: Queries,
    transposed: tuple[Array, Array],
    outputs: OutputGradients,
    keys: Keys,
    mask: Mask,
    *,
    masked: bool,
) -> Gradients:
    """Those of one block of each; those of keys and values are transposed.

    They are ``[…, K, T]``; ``transposed``, the queries and output gradients, are
    ``[…, K, X]``.
    """
    dq, dk, dv = gradients
    products = _product("bgxk,bgtk->bgxt", queries.q, keys.k)
    scores = mask.scores(products)
    if masked:
        scores = _scores(products, queries, keys, mask)
    weights = jnp.exp(scores - outputs.lse[..., None])
    dweights = _product("bgxk,bgtk->bgxt", outputs.dout, keys.v)
    dscores = weights * (dweights - outputs.delta[..., None]) * mask.slope(products)
    dscores, weights = (x.astype(queries.q.dtype) for x in (dscores, weights))
    return (
        dq + _product("bgxt,bgtk->bgxk", dscores, keys.k),
        dk + _product("bgkx,bgxt->bgkt", transposed[0], dscores),
        dv + _product("bgkx,bgxt->bgkt", transposed[1], weights),
    )


def _product(equation: str, left: Array, right: Array) -> Array:
    return jnp.einsum(equation, left, right, preferred_element_type=sum_dtype(left))


def sum_dtype(x: Array) -> Any:
    """The dtype of scores and of sums: f32, and f64 for f64 operands."""
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def varying_as(like: Array, value: Array) -> Array:
    """A value marked as varying over the mesh axes that another one varies over.

    JAX (``check_vma``) demands this of the initial state of a loop.
    """
    return traces.varying_over(value, traces.varying_axes(like))


def all_varying(axis: str, *values: Any) -> list[Any]:
    """Values marked as varying over ``axis`` and every axis that any varies over."""
    # Without check_vma nothing is known to vary, not even the rank.
    return varying_alike(*values, lax.axis_index(axis))[:-1]


def varying_alike(*values: Any) -> list[Any]:
    """Values marked as varying over every axis that any of them varies over."""
    axes = frozenset[str]().union(
        *(traces.varying_axes(x) for x in values if x is not None)
    )
    return [None if x is None else traces.varying_over(x, axes) for x in values]


def zeros_like(x: Array) -> Array:
    """Zeros of a shape, in :func:`sum_dtype`, to add gradients to."""
    return varying_as(x, jnp.zeros(x.shape, sum_dtype(x)))
