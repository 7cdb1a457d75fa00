# SPDX-License-Identifier: Apache-2.0
"""The mask of a call, for kernels: by row and block indices."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from tessera.ops.attention.dispatch import Options


@dataclass(frozen=True)
class Rules:
    """Which keys each query attends to, and the scores.

    The position of a query is its index plus an offset, that of a key its index.

    Attributes:
      options: Those of the call; the offset is not read here.
      num_keys: The number of keys without padding.
      padded: Whether the keys are padded; padding is masked.
    """

    options: Options
    num_keys: int
    padded: bool

    def key_blocks(self, position: Any, rows: int, block: int) -> tuple[Array, Array]:
        """The range of blocks of keys that ``rows`` queries from a position attend to.

        Example:
          >>> rules = Rules(Options(causal=True, scale=1.0, window=40), 256, False)
          >>> [int(i) for i in rules.key_blocks(128, 64, 32)]
          [2, 6]
        """
        start, stop = jnp.int32(0), jnp.int32(-(-self.num_keys // block))
        if self.options.causal:
            stop = lax.min(_divided(position + rows + block - 1, block), stop)
        if self.options.window is not None:
            start = _divided(position - self.options.window + 1, block)
        return lax.min(start, stop), stop

    def whole_key_blocks(
        self, position: Any, rows: int, block: int
    ) -> tuple[Array, Array]:
        """The range of blocks of keys that are unmasked for all of these queries.

        Example:
          >>> rules = Rules(Options(causal=True, scale=1.0, window=96), 256, False)
          >>> [int(i) for i in rules.whole_key_blocks(128, 64, 32)]
          [3, 4]
        """
        start, stop = jnp.int32(0), jnp.int32(self.num_keys // block)
        if self.options.causal:
            stop = lax.min(_divided(position + 1, block), stop)
        if self.options.window is not None:
            start = _divided(position + rows - self.options.window + block - 1, block)
        return start, stop

    def query_blocks(
        self, position: Any, keys: int, block: int, count: int
    ) -> tuple[Array, Array]:
        """The range of the ``count`` blocks of queries that attend to ``keys`` keys.

        The position is that of the first key minus the offset of the queries.

        Example:
          >>> rules = Rules(Options(causal=True, scale=1.0, window=40), 256, False)
          >>> [int(i) for i in rules.query_blocks(64, 32, block=64, count=4)]
          [1, 3]
        """
        start, stop = jnp.int32(0), jnp.int32(count)
        if self.options.causal:
            start = _divided(position, block)
        if self.options.window is not None:
            last = position + keys + self.options.window - 1
            stop = lax.min(_divided(last + block - 1, block), stop)
        return lax.min(start, stop), stop

    def whole_query_blocks(
        self, position: Any, keys: int, block: int, count: int
    ) -> tuple[Array, Array]:
        """The range of blocks of queries that attend to all of these keys.

        Padding counts as visible: the caller knows whether there is any.

        Example:
          >>> rules = Rules(Options(causal=True, scale=1.0, window=192), 256, False)
          >>> [int(i) for i in rules.whole_query_blocks(64, 32, block=64, count=4)]
          [2, 4]
        """
        start, stop = jnp.int32(0), jnp.int32(count)
        if self.options.causal:
            start = _divided(position + keys - 1 + block - 1, block)
        if self.options.window is not None:
            stop = lax.min(_divided(position + self.options.window, block), stop)
        return start, stop

    def visible(self, query: Array, key: Array) -> Array | None:
        """The mask of queries and keys at some positions; None if nothing is masked."""
        visible = None
        if self.options.causal:
            visible = key <= query
        if self.options.window is not None:
            visible = _both(visible, query - key < self.options.window)
        if self.padded:
            visible = _both(visible, key < self.num_keys)
        return visible

    def scores(self, products: Array) -> tuple[Array, Array | None]:
        """Scores of products of queries and keys, and the slope of the soft cap.

        The slope times ``scale`` is the derivative of a score by a product; None is 1.
        """
        scores = products * self.options.scale
        cap = self.options.soft_cap
        if cap is None:
            return scores, None
        capped = jnp.tanh(scores * (1 / cap))
        return capped * cap, 1.0 - capped * capped


def _both(a: Array | None, b: Array) -> Array:
    return b if a is None else a & b


def _divided(x: Any, by: int) -> Array:
    """The quotient, or zero for negative numbers."""
    return lax.div(lax.max(jnp.asarray(x, jnp.int32), jnp.int32(0)), jnp.int32(by))
