# SPDX-License-Identifier: Apache-2.0
"""``Decoding``: what generation needs of a model, with or without a cache."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tessera.errors import OperandError
from tessera.foundations.tree import Tree
from tessera.train.models.partition_rules import Placement

if TYPE_CHECKING:
    from tessera.train.models.registered_model import RegisteredModel

Logits: TypeAlias = Float[Array, "batch vocab"]
# How much padding each row has on its left; None if there is none.
Pads: TypeAlias = Int[Array, " batch"] | None


@dataclass(frozen=True)
class Decoding(ABC):
    """The functions of one model that are compiled to generate text.

    Programs are cached by it.

    Attributes:
      place: Shards the batch; sequences are whole.
    """

    place: Placement = field(kw_only=True)

    @abstractmethod
    def unstack(self, params: Tree) -> Any:
        """The parameters without stages in the form that decoding uses."""

    @abstractmethod
    def prefill(
        self, weights: Any, tokens: Int[Array, "batch seq"], pads: Pads, length: int
    ) -> tuple[Logits, Any]:
        """The logits after the prompts, and what later steps need of them.

        Args:
          weights: As from ``unstack``.
          tokens: The prompts, padded on the left.
          pads: How much padding each row has.
          length: The slots of a row that will be used, at least those of the prompts.
        """

    @abstractmethod
    def step(
        self,
        weights: Any,
        cache: Any,
        tokens: Int[Array, " batch"],
        slot: Int[Array, ""],
        pads: Pads,
    ) -> tuple[Logits, Any]:
        """The logits after one more token of each row, and the cache with it.

        Args:
          weights: As from ``unstack``.
          cache: Of the slots before.
          tokens: The tokens at ``slot``.
          slot: Where the tokens are in their padded rows.
          pads: As for ``prefill``.
        """


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
