# SPDX-License-Identifier: Apache-2.0
"""Generation from a model that has no cache of its own."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from tessera.errors import OperandError
from tessera.foundations.tree import Tree
from tessera.train.models.decoding import Decoding, Logits, Pads

if TYPE_CHECKING:
    from tessera.train.models.registered_model import RegisteredModel


@dataclass(frozen=True)
class RecomputedDecoding(Decoding):
    """Computes the whole row for each token: every causal model can, without a cache.

    Attributes:
      model: The model.
    """

    model: "RegisteredModel"

    def unstack(self, params: Tree) -> Tree:
        """The parameters as they are."""
        return params

    def prefill(
        self, weights: Tree, tokens: Int[Array, "batch seq"], pads: Pads, length: int
    ) -> tuple[Logits, Array]:
        """See ``Decoding``; the cache is the rows of tokens.

        Raises:
          OperandError: [T401] prompts differ in length, and the model does not read
            where they begin.
        """
        lacking = {"segment_ids", "positions"} - {*self.model.definition.inputs}
        if pads is not None and lacking:
            raise OperandError(
                "this model cannot continue prompts of different lengths",
                got=f"it does not read {' and '.join(sorted(lacking))}",
                fix="give it prompts of one length, or one after the other",
            )
        size = tokens.shape[1]
        rows = jnp.pad(tokens.astype(jnp.int32), ((0, 0), (0, length - size)))
        return self._logits(weights, rows, jnp.int32(size - 1), pads), rows

    def step(
        self,
        weights: Tree,
        cache: Int[Array, "batch length"],
        tokens: Int[Array, " batch"],
        slot: Int[Array, ""],
        pads: Pads,
    ) -> tuple[Logits, Array]:
        """See ``Decoding``."""
        rows = jax.lax.dynamic_update_slice(cache, tokens[:, None], (0, slot))
        return self._logits(weights, rows, slot, pads), rows

    def _logits(
        self, weights: Tree, rows: Array, slot: Int[Array, ""], pads: Pads
    ) -> Logits:
        """The logits after ``slot``; padding and later slots are other documents."""
        slots = jnp.arange(rows.shape[1], dtype=jnp.int32)[None]
        first = jnp.int32(0) if pads is None else pads[:, None]
        own = (slots >= first).astype(jnp.int32) + (slots > slot).astype(jnp.int32)
        inputs = {
            "tokens": self.place.constrain(rows, "batch", None),
            "segment_ids": jnp.broadcast_to(own, rows.shape),
            "positions": jnp.broadcast_to(jnp.maximum(slots - first, 0), rows.shape),
        }
        logits = self.model.logits(weights, inputs, self.place)
        last = jax.lax.dynamic_index_in_dim(logits, slot, 1, keepdims=False)
        return last.astype(jnp.float32)
