# SPDX-License-Identifier: Apache-2.0
"""``Decoding``: what generation needs of a model, with or without keys and values."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tessera.foundations.tree import Tree
from tessera.train.models.paged_cache import Pages, gather_blocks, store
from tessera.train.models.partition_rules import NO_MESH, Placement

if TYPE_CHECKING:
    from tessera.train.models.registered_model import RegisteredModel

Logits: TypeAlias = Float[Array, "parts slots vocab"]
# Of each layer, arrays of blocks [P, B, G, block, K].
Cache: TypeAlias = list[tuple[Array, ...]]
# Of each layer, the tokens that are not yet in the cache: [P * N, G, F, K].
NewTokens: TypeAlias = list[tuple[Array, ...]]


@dataclass(frozen=True)
class Decoding(ABC):
    """The functions of one model that are compiled to generate text.

    Programs are cached by it. ``paged_cache.py`` describes blocks and parts.

    Attributes:
      place: Shards the parts as the batch; sequences and weights are whole but for
        the shards of ``tp``.
    """

    place: Placement = field(kw_only=True)

    @property
    @abstractmethod
    def windows(self) -> tuple[int | None, ...]:
        """The kinds of layers: how many tokens each attends to, None for all."""

    @property
    @abstractmethod
    def kinds(self) -> tuple[int, ...]:
        """The index in ``windows`` of each layer of the cache."""

    def check_length(self, length: int) -> None:
        """Check that rows may have so many tokens that are read.

        Raises:
          ModelShapeError: [T405] they may not.
        """
        del length

    @abstractmethod
    def weights(self, params: Tree) -> Any:
        """The parameters, as from ``init``, in the form that decoding uses.

        A program makes it once, before the tokens that it computes.
        """

    @abstractmethod
    def new_cache(
        self, params: Tree, parts: int, blocks: Sequence[int], block: int
    ) -> Cache:
        """An empty cache.

        Args:
          params: Those of the model, or their shapes and dtypes.
          parts: Shards of the batch.
          blocks: Of each part, by kind of layer.
          block: Tokens of a block.
        """

    @abstractmethod
    def reads(self, cache: Cache, pages: Pages, *, once: bool) -> Any:
        """What ``extend``, called once or often, needs to find the cached tokens."""

    @abstractmethod
    def extend(
        self,
        weights: Any,
        cache: Cache,
        new: NewTokens,
        tokens: Int[Array, "parts slots more"],
        index: Int[Array, ""],
        pages: Pages,
        reads: Any,
    ) -> tuple[Logits, NewTokens]:
        """The logits after some more tokens of each row, and these in the buffers.

        Args:
          weights: As from ``weights``.
          cache: The tokens up to ``pages.starts``.
          new: Those from there on.
          tokens: What is added behind ``index`` new ones.
          index: How many new tokens there are.
          pages: Where the cached tokens are.
          reads: As from ``reads``.
        """

    def new_tokens(self, cache: Cache, slots: int, count: int) -> NewTokens:
        """Empty buffers for so many tokens of each slot."""

        def empty(pool: Array) -> Array:
            parts, _, heads, _, width = pool.shape
            return jnp.zeros((parts * slots, heads, count, width), pool.dtype)

        return jax.tree.map(empty, cache)

    def stored(self, cache: Cache, new: NewTokens, pages: Pages) -> Cache:
        """The cache with the new tokens."""
        return [
            tuple(
                store(pool, more, pages, kind)
                for pool, more in zip(pools, buffers, strict=True)
            )
            for pools, buffers, kind in zip(cache, new, self.kinds, strict=True)
        ]

    def alone(self) -> "Decoding":
        """The same on one device, with whole weights."""
        return replace(self, place=replace(NO_MESH, dtype=self.place.dtype))


@dataclass(frozen=True)
class RecomputedDecoding(Decoding):
    """Computes the whole row for each token: every causal model can.

    Its cache is the tokens themselves.

    Attributes:
      model: The model.
    """

    model: "RegisteredModel"

    windows = (None,)
    kinds = (0,)

    def weights(self, params: Tree) -> Tree:
        """The parameters as they are."""
        return params

    def new_cache(
        self, params: Tree, parts: int, blocks: Sequence[int], block: int
    ) -> Cache:
        """See ``Decoding``."""
        del params
        return [(jnp.zeros((parts, blocks[0], 1, block, 1), jnp.int32),)]

    def reads(
        self, cache: Cache, pages: Pages, *, once: bool
    ) -> Int[Array, "parts slots length"]:
        """The cached tokens of each row."""
        del once
        return gather_blocks(cache[0][0], pages.tables[0])[:, :, 0, :, 0]

    def extend(
        self,
        weights: Tree,
        cache: Cache,
        new: NewTokens,
        tokens: Int[Array, "parts slots more"],
        index: Int[Array, ""],
        pages: Pages,
        reads: Any,
    ) -> tuple[Logits, NewTokens]:
        """See ``Decoding``. What follows the last token is another document."""
        del cache
        parts, slots, length = reads.shape
        more = tokens.astype(jnp.int32).reshape(parts * slots, 1, -1, 1)
        buffer = jax.lax.dynamic_update_slice(new[0][0], more, (0, 0, index, 0))
        positions = jnp.arange(length, dtype=jnp.int32)[None]
        starts = pages.starts.reshape(-1, 1)
        added = buffer.reshape(parts * slots, -1)
        last = starts + index + tokens.shape[2] - 1
        source = jnp.clip(positions - starts, 0, added.shape[1] - 1)
        rows = jnp.where(
            positions < starts,
            reads.reshape(-1, length),
            jnp.take_along_axis(added, source, axis=1),
        )
        is_later = positions > last
        inputs = {
            "tokens": self.place.constrain(jnp.where(is_later, 0, rows), "batch", None),
            "segment_ids": 1 + is_later.astype(jnp.int32),
            "positions": jnp.broadcast_to(positions, rows.shape),
        }
        logits = self.model.logits(weights, inputs, self.place)
        logits = jnp.take_along_axis(logits, last[:, :, None], axis=1)
        return logits.astype(jnp.float32).reshape(parts, slots, -1), [(buffer,)]
