# SPDX-License-Identifier: Apache-2.0
"""``Decoding``: what generation needs of a model."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from jaxtyping import Array, Float, Int

from tessera.foundations.tree import Tree
from tessera.train.models.partition_rules import Placement

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
