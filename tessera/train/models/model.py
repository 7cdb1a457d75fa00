# SPDX-License-Identifier: Apache-2.0
"""``Model``: all that the trainer knows of a model, in whatever framework it is.

A model is pure functions of a parameter tree. A subclass says how its parameters are
initialized, the logical names of their dims, and computes what is before its repeated
blocks, the blocks, and what follows them. Shapes, layouts, sharded initialization, the
loss of a batch and the stages of a pipeline follow from these.

The parameters of the blocks are stacked: each kind has one array ``[layers, ...]``,
which a scan iterates over, so that one block is compiled.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Self, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int, Num

from tessera.foundations.labels import IGNORE_INDEX
from tessera.foundations.tree import Tree, named_leaves, nest, path_name
from tessera.mesh import AnyMesh, Mesh, as_mesh
from tessera.ops.losses import Reduction, cross_entropy
from tessera.shard import ShardSpec
from tessera.train.models.decoding import Decoding
from tessera.train.models.layer_scan import (
    NONE,
    Policies,
    policies_of,
    policies_of_stage,
)
from tessera.train.models.parameter_tree import DimNames, check_tree, layouts_of
from tessera.train.models.partition_rules import Placement
from tessera.train.models.pipeline_stages import StageSplit

Batch: TypeAlias = Mapping[str, Num[Array, "..."]]
# Sums over the tokens of a batch that a step reports, ``loss`` among them.
Sums: TypeAlias = dict[str, Float[Array, ""]]
# From what ``head_loss`` takes to the sums of a loss.
HeadSums: TypeAlias = Callable[
    ["Model", Tree, Array, Batch, Placement, int | str], Sums
]


@dataclass(frozen=True)
class Model(ABC):
    """A model without arrays, as the trainer uses it.

    Subclasses are frozen dataclasses: a model is hashed and compared by its settings.

    Attributes:
      config: The model's own configuration, a dataclass.
      frozen: Names of the parameters that are not trained, as ``encoder/table``.
      dtype: Dtype of activations; None is that of the parameters.
      remat: The rematerialization policies of the blocks; see ``policies_of``.
      split: The pipeline stages of the blocks, whose parameters are then stored by
        stage, see ``StageSplit``.
    """

    config: Any
    frozen: frozenset[str] = field(default=frozenset(), kw_only=True)
    dtype: str | None = field(default=None, kw_only=True)
    remat: Any = field(default=NONE, kw_only=True)
    split: StageSplit | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.remat, str):  # a list is not hashable; a model is
            object.__setattr__(self, "remat", self.policies)

    @property
    @abstractmethod
    def blocks(self) -> str | None:
        """The entry of the parameters that has those of the blocks; None without."""

    @property
    @abstractmethod
    def block_kinds(self) -> tuple[str, ...]:
        """The kind of each block, as ``policies_of`` takes them."""

    @property
    @abstractmethod
    def layer_costs(self) -> tuple[list[float], float]:
        """Multiplications per token of each block and of the logits, in millions."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Token ids are below this."""

    @abstractmethod
    def new_params(self, key: jax.Array) -> Tree:
        """Newly initialized float32 parameters without stages: nested dicts."""

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
    ) -> tuple[Array, Tree]:
        """The hidden state after the blocks.

        Args:
          params: See ``embed``.
          hidden: The state before them.
          batch: See ``loss``.
          place: See ``loss``.
          numbers: The index in the model of each block in ``params``; None has all.
            An index past the last block is of padding, which does nothing.

        Returns:
          The state, and statistics of the blocks for ``block_sums``.
        """

    def block_sums(
        self, statistics: Tree, count: Float[Array, ""]
    ) -> tuple[Float[Array, ""] | float, Sums]:
        """What is trained and reported of the blocks; ``count`` weighs the batch."""
        del statistics, count
        return 0.0, {}

    @abstractmethod
    def head(
        self, params: Tree, hidden: Array, batch: Batch, place: Placement
    ) -> Float[Array, "batch seq vocab"]:
        """The logits of a hidden state; arguments as for ``embed``."""

    @abstractmethod
    def decoding(self, mesh: Mesh | None, dtype: Any = None) -> Decoding:
        """What generation needs of the model.

        Args:
          mesh: Where to run; None leaves every layout to XLA.
          dtype: Dtype of a cache; None is that of the model.

        Raises:
          HeadCountError: [T402] the heads cannot be divided over ``tp``.
        """

    def check(self, mesh: Mesh) -> None:
        """Check that the model can be laid out on a mesh.

        Raises:
          HeadCountError: [T402] the heads cannot be divided over ``tp``.
          SettingValueError: [T502] a policy of ``remat`` does not exist.
          SettingConflictError: [T507] the blocks of a stage differ in their policies.
        """
        self.place(mesh)
        policies_of_stage(self.policies, self.split)

    def check_params(self, params: Tree) -> None:
        """Check that a tree has the parameters of this model.

        Raises:
          ParameterTreeError: [T306] names or shapes are not those of this model.
        """
        check_tree(params, self.abstract())

    @property
    def block_sum_names(self) -> tuple[str, ...]:
        """What ``block_sums`` reports."""
        return ()

    @property
    def adapters(self) -> frozenset[str]:
        """Names of parameters that are trained beside weights that exist."""
        return frozenset()

    @property
    def quantized(self) -> frozenset[str]:
        """Names of the parameters that quantized weights are stored as."""
        return frozenset()

    def dequantized(self) -> Self:
        """The same model with all weights in float32."""
        return self

    @property
    def couples_rows(self) -> bool:
        """Whether the loss of a row depends on the other rows of its batch."""
        return False

    @property
    def num_params(self) -> int:
        """Number of scalars, quantized ones included."""
        leaves = jax.tree.leaves(self.dequantized()._plain)
        return sum(math.prod(leaf.shape) for leaf in leaves)

    @property
    def num_active_params(self) -> int:
        """Number of parameters that one token uses: not all experts."""
        return self.num_params

    def place(self, mesh: AnyMesh | None) -> Placement:
        """The layout of this model's dims on a mesh, and the dtype of activations."""
        return Placement(as_mesh(mesh), dtype=self.dtype)

    def layout_notes(self, mesh: Mesh) -> list[str]:
        """Notes on layouts that a reader may not expect, one sentence each."""
        del mesh
        return []

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
        return {**names, self.blocks: self.split.dim_names(names[self.blocks])}

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
        """The model whose parameters are stored without stages."""
        return self if self.split is None else replace(self, split=None)

    def divide(self, params: Tree) -> tuple[Tree, Tree]:
        """The parameters of the blocks, and the others.

        Also of trees like the parameters, such as their layouts.
        """
        shared = {name: part for name, part in params.items() if name != self.blocks}
        return params.get(self.blocks), shared

    def join(self, blocks: Tree, shared: Tree) -> Tree:
        """Undo ``divide``."""
        return {**shared, self.blocks: blocks}

    @cached_property
    def _plain(self) -> Tree:
        return jax.eval_shape(lambda: self.new_params(jax.random.key(0)))

    def abstract(self) -> Tree:
        """Shape and dtype of every parameter as it is stored; allocates nothing."""
        return jax.eval_shape(self.stored, self._plain)

    def trained(self, tree: Tree) -> Tree:
        """A tree like the parameters with None for each frozen one."""

        def kept(path: tuple[object, ...], leaf: Any) -> Any:
            return None if path_name(path) in self.frozen else leaf

        return jax.tree_util.tree_map_with_path(kept, tree) if self.frozen else tree

    def with_frozen(self, trained: Tree, params: Tree) -> Tree:
        """The parameters, of which the trained ones are those of another tree."""

        def chosen(new: Any, old: Any) -> Any:
            return old if new is None else new

        return jax.tree.map(chosen, trained, params, is_leaf=lambda x: x is None)

    def specs(self) -> Tree:
        """The ShardSpec of every parameter, with logical names for mesh axes."""

        def spec(_: jax.ShapeDtypeStruct, names: DimNames) -> ShardSpec:
            return ShardSpec(tuple(range(len(names))), names)

        return jax.tree.map(spec, self.abstract(), self.dim_names())

    def layouts(self, mesh: AnyMesh) -> Tree:
        """The PartitionSpec of every parameter on a mesh.

        Raises:
          HeadCountError: [T402] the heads cannot be divided over ``tp``.
          ShardDivisibilityError: [T201] a dim is not a multiple of its axes' size.
          AxisReusedError: [T202] an axis would shard two dims of a parameter.
        """
        return layouts_of(self.abstract(), self.dim_names(), self.place(mesh))

    def init(
        self,
        key: jax.Array,
        mesh: AnyMesh | None = None,
        *,
        layouts: Tree | None = None,
        only: frozenset[str] | None = None,
    ) -> Tree:
        """Initialize float32 parameters, each shard on its own device.

        Args:
          key: The same key gives the same values on every mesh, up to rounding of the
            last bit.
          mesh: Their mesh; None is the default device.
          layouts: PartitionSpecs other than ``layouts(mesh)``.
          only: Names of the parameters that are wanted; None is all.

        Raises:
          AbstractMeshError: [T105] this machine lacks some of the devices.
          HeadCountError: [T402] the heads cannot be divided over ``tp``.
          ShardDivisibilityError: [T201] a dim is not a multiple of its axes' size.
        """
        shardings, mesh = None, as_mesh(mesh)

        def wanted(tree: Tree) -> Tree:
            if only is None:
                return tree
            leaves = named_leaves(tree).items()
            return nest({name: leaf for name, leaf in leaves if name in only})

        if mesh is not None:
            layouts = self.layouts(mesh) if layouts is None else layouts
            shardings = jax.tree.map(partial(NamedSharding, mesh.jax), wanted(layouts))

        def make(key: jax.Array) -> Tree:
            return wanted(self.stored(self.new_params(key)))

        return jax.jit(make, out_shardings=shardings)(key)

    def loss(
        self,
        params: Tree,
        batch: Batch,
        place: Placement,
        *,
        chunk: int | str,
        head_sums: HeadSums | None = None,
        count: Float[Array, ""] | None = None,
    ) -> tuple[Float[Array, ""], Sums]:
        """The loss of a batch, in nats summed over its targets.

        Args:
          params: As from ``init``.
          batch: int32 ``[B, S]`` arrays ``tokens``, ``targets``, ``segment_ids`` and
            ``positions``; a target of ``IGNORE_INDEX`` does not count.
          place: The layout of activations.
          chunk: Of how many tokens a device computes logits at a time: a number,
            ``auto``, or ``none`` for all of them.
          head_sums: Another loss than that of the next token.
          count: As for ``block_sums``; None is the number of targets.

        Returns:
          What is differentiated, and the sums that are reported, ``loss`` among them.

        Raises:
          ParameterTreeError: [T306] names or shapes are not those of this model.
        """
        self.check_params(params)
        params = self.plain(params)
        hidden = self.embed(params, batch, place)
        hidden, statistics = self.run_blocks(params, hidden, batch, place)
        if head_sums is not None:
            sums = head_sums(self, params, hidden, batch, place, chunk)
        else:
            sums = {"loss": self.head_loss(params, hidden, batch, place, chunk=chunk)}
        count = num_targets(batch) if count is None else count
        extra, others = self.block_sums(statistics, count)
        return sums["loss"] + extra, {**sums, **others}

    def head_loss(
        self,
        params: Tree,
        hidden: Array,
        batch: Batch,
        place: Placement,
        *,
        chunk: int | str,
        reduction: Reduction = "sum",
        temperature: float = 1.0,
    ) -> Float[Array, "*batch_seq"]:
        """The cross-entropy of the logits over ``temperature``, in nats; see ``loss``.

        It is summed, or with ``reduction="none"`` of each target, f32 ``[B, S]``.
        """
        del chunk
        logits = self.head(params, hidden, batch, place)
        if temperature != 1.0:
            logits /= temperature
        return cross_entropy(logits, batch["targets"], reduction=reduction)

    def logits(
        self, params: Tree, batch: Batch, place: Placement
    ) -> Float[Array, "batch seq vocab"]:
        """Logits of the token after each one; arguments as for ``loss``.

        Sequences are in their own order: ``place`` does not shard them.
        """
        params = self.plain(params)
        hidden = self.embed(params, batch, place)
        hidden, _ = self.run_blocks(params, hidden, batch, place)
        return self.head(params, hidden, batch, place)


def num_targets(batch: Batch) -> Float[Array, ""]:
    """Tokens of a batch that count for the loss."""
    return (batch["targets"] != IGNORE_INDEX).sum(dtype=jnp.float32)
