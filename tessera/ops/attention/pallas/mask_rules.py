# SPDX-License-Identifier: Apache-2.0
"""Which keys a query sees, for kernels: by the numbers of rows and of blocks."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from tessera.ops.attention.attention_call import Setting


@dataclass(frozen=True)
class Rules:
    """What a call of attention asks for, besides its arrays.

    A query's place is its number and an offset; a key's place is its number.

    Attributes:
      setting: The call's; its offset is not read here.
      num_keys: Keys that there are.
      padded: Whether more rows than these are given; nobody sees the others.
    """

    setting: Setting
    num_keys: int
    padded: bool

    def key_blocks(self, place: Any, rows: int, block: int) -> tuple[Array, Array]:
        """Blocks of keys, from and to, that ``rows`` queries from a place on see.

        Example:
          >>> rules = Rules(Setting(causal=True, scale=1.0, window=40), 256, False)
          >>> [int(i) for i in rules.key_blocks(128, 64, 32)]
          [2, 6]
        """
        start, stop = jnp.int32(0), jnp.int32(-(-self.num_keys // block))
        if self.setting.causal:
            stop = lax.min(_divided(place + rows + block - 1, block), stop)
        if self.setting.window is not None:
            start = _divided(place - self.setting.window + 1, block)
        return lax.min(start, stop), stop

    def whole_key_blocks(
        self, place: Any, rows: int, block: int
    ) -> tuple[Array, Array]:
        """Blocks of keys, from and to, that each of these queries sees whole.

        Example:
          >>> rules = Rules(Setting(causal=True, scale=1.0, window=96), 256, False)
          >>> [int(i) for i in rules.whole_key_blocks(128, 64, 32)]
          [3, 4]
        """
        start, stop = jnp.int32(0), jnp.int32(self.num_keys // block)
        if self.setting.causal:
            stop = lax.min(_divided(place + 1, block), stop)
        if self.setting.window is not None:
            start = _divided(place + rows - self.setting.window + block - 1, block)
        return start, stop

    def query_blocks(
        self, place: Any, keys: int, block: int, count: int
    ) -> tuple[Array, Array]:
        """Blocks of queries, from and to, of ``count``, that see ``keys`` from a place.

        The place is that of the first key less the offset of the queries.

        Example:
          >>> rules = Rules(Setting(causal=True, scale=1.0, window=40), 256, False)
          >>> [int(i) for i in rules.query_blocks(64, 32, block=64, count=4)]
          [1, 3]
        """
        start, stop = jnp.int32(0), jnp.int32(count)
        if self.setting.causal:
            start = _divided(place, block)
        if self.setting.window is not None:
            last = place + keys + self.setting.window - 1
            stop = lax.min(_divided(last + block - 1, block), stop)
        return lax.min(start, stop), stop

    def whole_query_blocks(
        self, place: Any, keys: int, block: int, count: int
    ) -> tuple[Array, Array]:
        """Blocks of queries, from and to, that see each of these keys.

        Keys that are not there count as seen: the caller knows whether there are any.

        Example:
          >>> rules = Rules(Setting(causal=True, scale=1.0, window=192), 256, False)
          >>> [int(i) for i in rules.whole_query_blocks(64, 32, block=64, count=4)]
          [2, 4]
        """
        start, stop = jnp.int32(0), jnp.int32(count)
        if self.setting.causal:
            start = _divided(place + keys - 1 + block - 1, block)
        if self.setting.window is not None:
            stop = lax.min(_divided(place + self.setting.window, block), stop)
        return start, stop

    def visible(self, query: Array, key: Array) -> Array | None:
        """Whether queries at some places see keys at others; None where all do."""
        seen = None
        if self.setting.causal:
            seen = key <= query
        if self.setting.window is not None:
            seen = _both(seen, query - key < self.setting.window)
        if self.padded:
            seen = _both(seen, key < self.num_keys)
        return seen

    def scores(self, products: Array) -> tuple[Array, Array | None]:
        """Scores of products of queries and keys, and the bend of the cap.

        The bend times ``scale`` is the derivative of a score by its product; None is 1.
        """
        scores = products * self.setting.scale
        cap = self.setting.soft_cap
        if cap is None:
            return scores, None
        bent = jnp.tanh(scores * (1 / cap))
        return bent * cap, 1.0 - bent * bent


def _both(a: Array | None, b: Array) -> Array:
    return b if a is None else a & b


def _divided(x: Any, by: int) -> Array:
    """Of what is negative, zero."""
    return lax.div(lax.max(jnp.asarray(x, jnp.int32), jnp.int32(0)), jnp.int32(by))
