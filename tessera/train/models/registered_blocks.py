# SPDX-License-Identifier: Apache-2.0
"""A registered model that names its repeated blocks; see ``register_model``."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tessera.analysis.flops import count
from tessera.errors import DimTableError, ModelDefinitionError
from tessera.foundations.tree import Tree, named_leaves, nest
from tessera.graph.pipelining.ring_buffers import zeros
from tessera.graph.rewriting import contains
from tessera.mesh import Mesh
from tessera.ops.losses import cross_entropy
from tessera.ops.wide_gradients import is_copy
from tessera.train.models.block_methods import INDEX, call
from tessera.train.models.definition import ModelOptions
from tessera.train.models.layer_scan import (
    NAMED,
    Policies,
    policies_of_stage,
    scan_layers,
)
from tessera.train.models.model import Batch, DimNames, Sums
from tessera.train.models.module_adapters import Blocks, Inputs
from tessera.train.models.partition_rules import NO_MESH, Placement
from tessera.train.models.pipeline_stages import split_of
from tessera.train.models.registered_model import RegisteredDefinition, RegisteredModel
from tessera.train.models.staged_model import StagedModel

_ROWS, _LENGTH = 2, 8


@dataclass(frozen=True, eq=False)
class RegisteredBlocks(StagedModel, RegisteredModel):
    """A registered model whose blocks are stacked, and run one after the other."""

    @classmethod
    def of(
        cls,
        config: Any,
        definition: RegisteredDefinition,
        options: ModelOptions,
        mesh: Mesh | None,
    ) -> "RegisteredBlocks":
        """The model with the stages of a mesh that has ``pp``.

        Raises:
          ModelDefinitionError: [T407] its blocks cannot be stacked.
          PipelineSizeError: [T311] there are more virtual stages than blocks.
        """
        model = cls(config, definition, remat=options.remat, dtype=options.dtype)
        split = split_of(mesh, model, options.pipeline_chunks)
        if split is None:
            return model
        return replace(model, split=replace(split, blocks=model.blocks))

    @property
    def blocks(self) -> str:
        """The attribute that is the list of blocks."""
        assert self.definition.blocks is not None
        return self.definition.blocks

    @property
    def block_kinds(self) -> tuple[str, ...]:
        """One kind, without a name."""
        return ("",) * len(self._blocks.forms)

    @cached_property
    def _blocks(self) -> Blocks:
        """The blocks of the adapter, which differ only in the values of parameters."""
        blocks = self._adapter.blocks
        assert blocks is not None
        each = [named_leaves(tree) for tree in blocks.divide(self._shapes)[0]]
        for number, own in enumerate(each):
            line = _difference(each[0], own) or (
                None
                if blocks.forms[number] == blocks.forms[0]
                else _first_line(blocks.texts[0], blocks.texts[number])
            )
            if line or not own:
                raise ModelDefinitionError(
                    "the blocks of a model differ in the values of their parameters "
                    "alone: one program runs them all",
                    got=f"block 0 and block {number}: {line or 'without parameters'}",
                    fix="make them alike; what depends on the number of the block can "
                    "be computed from index, an argument of the method block",
                )
        return blocks

    @cached_property
    def _parts(self) -> tuple[Tree, Tree]:
        """Shapes of one block, and of what is beside the blocks, as adapted."""
        blocks, rest = self._blocks.divide(self._shapes)
        return blocks[0], rest

    @cached_property
    def _own_dims(self) -> Mapping[str, DimNames]:
        """The dims of a block's parameters, which are those of all blocks.

        Raises:
          DimTableError: [T408] the table does not fit the parameters.
        """
        first: dict[str, DimNames] = {}
        for number in range(len(self._blocks.forms)):
            for name in named_leaves(self._parts[0]):
                full = f"{self._blocks.prefix}{number}/{name}"
                dims = self._dim_names[full]
                if first.setdefault(name, dims) != dims:
                    raise DimTableError(
                        "the parameters of blocks are stacked, but their dims differ",
                        got=f"{full}: {dims}, in block 0 {first[name]}",
                        fix="use patterns with * for the number of the block",
                    )
        return first

    def plain_dim_names(self) -> Tree:
        """The logical names of each parameter's dims; of blocks, ``layers`` first."""
        own = {name: ("layers", *dims) for name, dims in self._own_dims.items()}
        rest = {name: self._dim_names[name] for name in named_leaves(self._parts[1])}
        return nest(self._named(own, rest))

    def new_params(self, key: jax.Array) -> Tree:
        """Newly initialized parameters, those of the blocks stacked."""
        blocks, rest = self._blocks.divide(self._adapter.init(key))

        def stack(*arrays: Array) -> Array:
            return jnp.stack(arrays)

        stacked = jax.tree.map(stack, *map(named_leaves, blocks))
        return nest(self._named(stacked, named_leaves(rest)))

    def _named(self, own: Mapping[str, Any], rest: Mapping[str, Any]) -> dict[str, Any]:
        return {**rest, **{f"{self.blocks}/{name}": x for name, x in own.items()}}

    def check(self) -> None:
        """See ``RegisteredModel.check``; also the hidden state, and the policies.

        Raises:
          ModelDefinitionError: [T407] parameters, blocks, the hidden state or logits
            are not of the right form.
          DimTableError: [T408] the table does not fit the parameters.
          SettingValueError: [T502] a policy does not exist.
          SettingConflictError: [T507] the blocks of a stage differ in their policies.
        """
        before, after = self._hidden, jax.eval_shape(self._block_of_zeros, self._hidden)
        if _described(before) != _described(after):
            raise ModelDefinitionError(
                "a block returns a hidden state of the shape and dtype that it takes",
                got=f"{_described(before)} before, {_described(after)} after",
                fix="return such an array from block",
            )
        policies = self.policies
        if self.split is not None:
            policies_of_stage(policies, self.split.depth)
        super().check()

    @cached_property
    def _hidden(self) -> jax.ShapeDtypeStruct:
        hidden = self.wire(_ROWS, _LENGTH)
        shape = getattr(hidden, "shape", ())
        is_sequence = shape[:2] == (_ROWS, _LENGTH) and len(shape) > 2
        if not is_sequence or not jnp.issubdtype(hidden.dtype, jnp.floating):
            raise ModelDefinitionError(
                "a hidden state is one floating-point array [batch, sequence, ...]",
                got=f"{_described(hidden)} for tokens [{_ROWS}, {_LENGTH}]",
                fix="return such an array from embed; block can compute the rest from "
                "its inputs",
            )
        return hidden

    @property
    def layer_costs(self) -> tuple[list[float], float]:
        """Multiplications per token of each block and of the logits, in millions."""

        def head(params: Tree, hidden: Array, inputs: Inputs) -> Array:
            return self._head(params, hidden, inputs, NO_MESH)

        inputs = self._abstract_inputs(_ROWS, _LENGTH)
        programs = (
            jax.make_jaxpr(self._block_of_zeros)(self._hidden),
            jax.make_jaxpr(head)(self._plain, self._hidden, inputs),
        )
        one, last = (count(each).total / (2e6 * _ROWS * _LENGTH) for each in programs)
        return [one] * len(self._blocks.forms), last

    @cached_property
    def _known_policies(self) -> Policies:
        """The policies; ``dots`` for ``named`` where the blocks name nothing.

        They would compute everything again.
        """
        if NAMED not in self.policies:
            return self.policies
        block = jax.make_jaxpr(self._block_of_zeros)(self._hidden)
        if contains(block, lambda equation: equation.primitive.name == "name"):
            return self.policies
        return tuple("dots" if name == NAMED else name for name in self.policies)

    def _block_of_zeros(self, hidden: Array) -> Array:
        """One block, whose parameters and inputs are zeros."""
        place = self.place(None)
        own, rest = jax.tree.map(place.cast, zeros(self._parts))
        inputs = zeros(self._abstract_inputs(*hidden.shape[:2]))
        model, block = self._blocks.bind(rest, own)
        hidden = call(model.block, {**inputs, INDEX: jnp.int32(0)}, block, hidden)
        return self.constrain_wire(hidden, place)

    def wire(self, rows: int, length: int) -> jax.ShapeDtypeStruct:
        """The hidden state of so many sequences."""

        def embed(params: Tree, inputs: Inputs) -> Array:
            return self.embed(params, inputs, self.place(None))

        return jax.eval_shape(embed, self._plain, self._abstract_inputs(rows, length))

    def constrain_wire(self, wire: Array, place: Placement) -> Array:
        """A hidden state in the dtype of activations; the data axes shard its rows."""
        if place.mesh is not None:
            wire = place.constrain(wire, "batch", *(None,) * (wire.ndim - 1))
        return wire if place.dtype is None else wire.astype(place.dtype)

    def embed(self, params: Tree, batch: Batch, place: Placement) -> Array:
        """See ``StagedModel.embed``."""
        model = self._adapter.bind(self._rest(params, place))
        with place.autocast():
            hidden = call(model.embed, self._inputs(batch))
        return self.constrain_wire(hidden, place)

    def run_blocks(
        self,
        params: Tree,
        hidden: Array,
        batch: Batch,
        place: Placement,
        numbers: Int[Array, " layers"] | None = None,
    ) -> tuple[Array, Float[Array, ""] | float, Sums]:
        """See ``StagedModel.run_blocks``."""
        inputs = self._inputs(batch)
        total = len(self._blocks.forms)

        def body(hidden: Array, layer: tuple[Tree, Array]) -> tuple[Array, Tree]:
            named, number = layer
            # Cast here, or the loop would add up the gradients by its layers narrow.
            rest = self._rest(params, place)
            own = self._gathered(named, self._own_dims, self._parts[0], place)
            model, block = self._blocks.bind(rest, own)
            with place.autocast():
                hidden = call(model.block, {**inputs, INDEX: number}, block, hidden)
            return self.constrain_wire(hidden, place), ()

        exists = None if numbers is None or self.is_even else numbers < total
        numbers = jnp.arange(total, dtype=jnp.int32) if numbers is None else numbers
        layers = named_leaves(params[self.blocks], is_leaf=is_copy), numbers
        policies = policies_of_stage(self._known_policies, len(numbers))
        hidden, _ = scan_layers(
            body,
            hidden,
            layers,
            policies,
            exists=exists,
            regathered=place.mesh is not None,
        )
        return hidden, 0.0, {}

    def head_loss(
        self,
        params: Tree,
        hidden: Array,
        batch: Batch,
        place: Placement,
        *,
        chunk: int | str,
    ) -> Float[Array, ""]:
        """See ``StagedModel.head_loss``: the cross-entropy of all logits at once."""
        del chunk
        logits = self._head(params, hidden, batch, place)
        return cross_entropy(logits, batch["targets"], reduction="sum")

    def logits(
        self, params: Tree, batch: Inputs, place: Placement
    ) -> Float[Array, "batch seq vocab"]:
        """Logits of the token after each one; parameters are without stages."""
        hidden = self.embed(params, batch, place)
        hidden, _, _ = self.run_blocks(params, hidden, batch, place)
        return self._head(params, hidden, batch, place)

    def _head(
        self, params: Tree, hidden: Array, batch: Inputs, place: Placement
    ) -> Array:
        model = self._adapter.bind(self._rest(params, place))
        with place.autocast():
            return call(model.head, self._inputs(batch), hidden)

    def _rest(self, params: Tree, place: Placement) -> Tree:
        """What is beside the blocks, as the adapter has it."""
        named = named_leaves(self.divide(params)[1])
        return self._gathered(named, self._dim_names, self._parts[1], place)


def _described(value: Any) -> str:
    shapes = [f"{x.dtype}{[*x.shape]}" for x in jax.tree.leaves(value)]
    return ", ".join(shapes) or type(value).__name__


def _difference(first: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """The first parameter in which two blocks differ."""
    for name in sorted(first.keys() | other.keys()):
        before, now = (
            _described(each[name]) if name in each else "none"
            for each in (first, other)
        )
        if before != now:
            return f"{name} is {before} and {now}"
    return None


def _first_line(first: str, other: str) -> str:
    """The first lines in which two texts differ."""
    pairs = zip_longest(first.splitlines(), other.splitlines(), fillvalue="")
    lines = ([line.strip(" ,") for line in pair] for pair in pairs)
    return next((f"{a} and {b}" for a, b in lines if a != b), "an attribute")
