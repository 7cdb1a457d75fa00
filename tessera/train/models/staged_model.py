# SPDX-License-Identifier: Apache-2.0
"""``StagedModel``: a model whose blocks repeat, of which pipelines run stages.

The parameters of the blocks are stacked: each kind has one array ``[layers, ...]``,
which a scan iterates over, so that one block is compiled. A subclass computes what is
before the blocks, the blocks, and the loss after them. The loss of a batch and the
stages of a pipeline are compositions of these three.
"""

from abc import abstractmethod
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tessera.foundations.tree import Tree
from tessera.train.models.layer_scan import NONE, Policies, policies_of
from tessera.train.models.model import Batch, Model, Sums
from tessera.train.models.partition_rules import Placement
from tessera.train.models.pipeline_stages import StageSplit


@dataclass(frozen=True)
class StagedModel(Model):
    """A model whose blocks repeat.

    Attributes:
      remat: The rematerialization policies of the blocks; see ``policies_of``.
      split: The pipeline stages of the blocks, whose parameters are then stored by
        stage, see ``StageSplit``.
    """

    remat: Any = field(default=NONE, kw_only=True)
    split: StageSplit | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.remat, str):  # a list is not hashable; a model is
            object.__setattr__(self, "remat", self.policies)

    @property
    @abstractmethod
    def blocks(self) -> str:
        """The entry of the parameters that has those of the blocks."""

    @property
    @abstractmethod
    def block_kinds(self) -> tuple[str, ...]:
        """The kind of each block, as ``policies_of`` takes them."""

    @property
    @abstractmethod
    def layer_costs(self) -> tuple[list[float], float]:
        """Multiplications per token of each block and of the logits, in millions."""

    @abstractmethod
    def plain_dim_names(self) -> Tree:
        """The logical names of each parameter's dims without stages."""

    @abstractmethod
    def wire(self, rows: int, length: int) -> jax.ShapeDtypeStruct:
        """The hidden state of so many sequences, which stages send on."""

    @abstractmethod
    def constrain_wire(self, wire: Array, place: Placement) -> Array:
        """A hidden state in its layout."""

    @abstractmethod
    def embed(self, params: Tree, batch: Batch, place: Placement) -> Array:
        """The hidden state before the first block.

        Args:
          params: Without stages; those of the blocks may be of some blocks only.
          batch: See ``loss``.
          place: See ``loss``.
        """

    @abstractmethod
    def run_blocks(
        self,
        params: Tree,
        hidden: Array,
        batch: Batch,
        place: Placement,
        numbers: Int[Array, " layers"] | None = None,
    ) -> tuple[Array, Float[Array, ""] | float, Sums]:
        """The hidden state after the blocks.

        Args:
          params: See ``embed``.
          hidden: The state before them.
          batch: See ``loss``.
          place: See ``loss``.
          numbers: The index in the model of each block in ``params``; None has all.
            An index past the last block is of padding, which does nothing.

        Returns:
          The state, what is trained beside the loss, and the sums to report.
        """

    @abstractmethod
    def head_loss(
        self,
        params: Tree,
        hidden: Array,
        batch: Batch,
        place: Placement,
        *,
        chunk: int | str,
    ) -> Float[Array, ""]:
        """The summed loss of the logits after the last block; see ``loss``."""

    @property
    def is_even(self) -> bool:
        """Whether no stage has padding."""
        return self.split is None or self.split.is_even

    @property
    def policies(self) -> Policies:
        """The rematerialization policy of each block.

        Raises:
          SettingValueError: [T502] a policy does not exist, or there is not one for
            each block.
        """
        return policies_of(self.remat, self.block_kinds)

    def remat_notes(self) -> list[str]:
        """Which layers the backward pass computes again."""
        return [
            f"{name} in {count} of {len(self.policies)} layers"
            for name, count in Counter(self.policies).items()
            if name != NONE
        ]

    def dim_names(self) -> Tree:
        """The logical names of each parameter's dims as it is stored."""
        names = self.plain_dim_names()
        if self.split is None:
            return names

        def staged(dims: tuple[str | None, ...]) -> tuple[str | None, ...]:
            return (None, "stages", *dims)

        def is_dims(node: Any) -> bool:
            return isinstance(node, tuple)

        blocks = jax.tree.map(staged, names[self.blocks], is_leaf=is_dims)
        return {**names, self.blocks: blocks}

    def stored(self, params: Tree) -> Tree:
        """Convert parameters without stages to the form of ``init``."""
        if self.split is None:
            return params
        return {**params, self.blocks: self.split.stack(params[self.blocks])}

    def plain(self, params: Tree) -> Tree:
        """Convert parameters from the form of ``init`` to that without stages."""
        if self.split is None:
            return params
        return {**params, self.blocks: self.split.unstack(params[self.blocks])}

    def without_stages(self) -> Self:
        """See ``Model.without_stages``."""
        return replace(self, split=None)

    def divide(self, params: Tree) -> tuple[Tree, Tree]:
        """The parameters of the blocks, and the others.

        Also of trees like the parameters, such as their layouts.
        """
        shared = {name: part for name, part in params.items() if name != self.blocks}
        return params[self.blocks], shared

    def join(self, blocks: Tree, shared: Tree) -> Tree:
        """Undo ``divide``."""
        return {**shared, self.blocks: blocks}

    def loss(
        self, params: Tree, batch: Batch, place: Placement, *, chunk: int | str
    ) -> tuple[Float[Array, ""], Sums]:
        """See ``Model.loss``.

        Raises:
          ParameterTreeError: [T306] names or shapes are not those of this model.
        """
        self.check_params(params)
        params = self.plain(params)
        hidden = self.embed(params, batch, place)
        hidden, extra, sums = self.run_blocks(params, hidden, batch, place)
        loss = self.head_loss(params, hidden, batch, place, chunk=chunk)
        return loss + extra, {"loss": loss, **sums}

    def run_stage(
        self,
        params: tuple[Tree, Tree],
        wire: Array,
        batch: Batch,
        index: Int[Array, ""],
        place: Placement,
        *,
        chunk: int | str,
    ) -> tuple[Array, Float[Array, ""], Sums]:
        """One virtual stage on one microbatch.

        Args:
          params: As from ``divide``; of the blocks the stage's own ``[depth, …]``.
          wire: What the stage before has sent; the first one reads ``batch``.
          batch: See ``loss``.
          index: The number of the stage.
          place: See ``loss``.
          chunk: See ``loss``.

        Returns:
          What is sent to the next stage, and the stage's share of both results of
          ``loss``, which are added up over stages.
        """
        split, joined = self.split, self.join(*params)
        assert split is not None, "the model of a pipeline has stages"
        numbers = jnp.asarray(split.numbers.reshape(-1, split.depth))
        own = jax.lax.dynamic_index_in_dim(numbers, index, 0, keepdims=False)
        hidden = jax.lax.cond(
            index == 0, lambda: self.embed(joined, batch, place), lambda: wire
        )
        hidden, extra, sums = self.run_blocks(joined, hidden, batch, place, own)

        def last() -> Float[Array, ""]:
            return self.head_loss(joined, hidden, batch, place, chunk=chunk)

        is_last = index == len(split.layers) - 1
        loss = jax.lax.cond(is_last, last, lambda: jnp.float32(0.0))
        return hidden, loss + extra, {"loss": loss, **sums}
