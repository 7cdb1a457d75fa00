# SPDX-License-Identifier: Apache-2.0
"""``RegisteredModel``: what ``register_model`` was given, as the trainer uses it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tessera.analysis.flops import count
from tessera.errors import DimTableError, ModelDefinitionError, OperandError
from tessera.foundations.tree import Tree, named_leaves, nest, zeros
from tessera.mesh import Mesh
from tessera.ops.rematerialization import names_values
from tessera.ops.wide_gradients import is_copy
from tessera.train.models.block_methods import INDEX, call
from tessera.train.models.decoding import Decoding, RecomputedDecoding
from tessera.train.models.dim_table import dim_names
from tessera.train.models.layer_scan import (
    NAMED,
    Policies,
    policies_of_stage,
    scan_layers,
)
from tessera.train.models.model import Batch, DimNames, Model
from tessera.train.models.module_adapters import Adapter, Inputs, adapt
from tessera.train.models.partition_rules import NO_MESH, Placement

if TYPE_CHECKING:
    from tessera.train.models.register_model import RegisteredDefinition

# Names of dims whose parameters are stacked: a scan takes one layer at a time.
_STACKED: Final = frozenset({"layers"})
_ROWS, _LENGTH = 2, 8


@dataclass(frozen=True, eq=False)
class RegisteredModel(Model):
    """A registered model with a configuration; the parameters are named by paths.

    A model that names no blocks has none, and its hidden state is its logits.

    Attributes:
      config: An instance of the configuration class.
      definition: What was registered.
    """

    config: Any
    definition: "RegisteredDefinition"

    @property
    def blocks(self) -> str | None:
        """The attribute that is the list of blocks."""
        return self.definition.blocks

    @property
    def block_kinds(self) -> tuple[str, ...]:
        """One kind, without a name."""
        return ("",) * len(self._blocks)

    @cached_property
    def _adapter(self) -> Adapter:
        of = self.definition
        return adapt(of.target, of.init, self.config, of.blocks)

    @cached_property
    def _shapes(self) -> Tree:
        """The parameters as the adapter has them."""
        return jax.eval_shape(lambda: self._adapter.init(jax.random.key(0)))

    @cached_property
    def _blocks(self) -> list[dict[str, jax.ShapeDtypeStruct]]:
        """The parameters of each block, which differ in their values alone."""
        if self.blocks is None:
            return []
        forms: list[tuple[Any, str]] = []

        def describe(params: Tree) -> None:
            _, blocks = self._adapter.open(params)
            forms.extend(map(self._adapter.describe, blocks))

        jax.eval_shape(describe, self._shapes)
        each: list[dict[str, Any]] = [{} for _ in forms]
        for name, leaf in named_leaves(self._shapes).items():
            for number, own in enumerate(each):
                if name.startswith(begin := self._name(number, "")):
                    own[name.removeprefix(begin)] = leaf
        for number, own in enumerate(each):
            line = _difference(each[0], own)
            if line is None and forms[number][0] != forms[0][0]:
                line = _first_line(forms[0][1], forms[number][1])
            if line or not own:
                raise ModelDefinitionError(
                    "the blocks of a model differ in the values of their parameters "
                    "alone: one program runs them all",
                    got=f"block 0 and block {number}: {line or 'without parameters'}",
                    fix="make them alike; what depends on the number of the block can "
                    "be computed from index, an argument of the method block",
                )
        return each

    def _name(self, block: int, name: str) -> str:
        """The name in the whole model of a block's parameter."""
        return f"{self.blocks}/{block}/{name}"

    @cached_property
    def _dim_names(self) -> dict[str, DimNames]:
        shapes = {name: x.shape for name, x in named_leaves(self._shapes).items()}
        return dim_names(self.definition.dims, shapes)

    @cached_property
    def _own_dims(self) -> Mapping[str, DimNames]:
        """The dims of a block's parameters, which are those of all blocks.

        Raises:
          DimTableError: [T408] the table does not fit the parameters.
        """
        first: dict[str, DimNames] = {}
        for number, own in enumerate(self._blocks):
            for name in own:
                full = self._name(number, name)
                dims = self._dim_names[full]
                if first.setdefault(name, dims) != dims:
                    raise DimTableError(
                        "the parameters of blocks are stacked, but their dims differ",
                        got=f"{full}: {dims}, in block 0 {first[name]}",
                        fix="use patterns with * for the number of the block",
                    )
        return first

    @cached_property
    def _rest_dims(self) -> Mapping[str, DimNames]:
        """The dims of the parameters beside the blocks."""
        of_blocks = {
            self._name(number, name)
            for number, own in enumerate(self._blocks)
            for name in own
        }
        return {n: dims for n, dims in self._dim_names.items() if n not in of_blocks}

    def plain_dim_names(self) -> Tree:
        """The logical names of each parameter's dims; of blocks, ``layers`` first."""
        dims = dict(self._rest_dims)
        for name, own in self._own_dims.items():
            dims[f"{self.blocks}/{name}"] = ("layers", *own)
        return nest(dims)

    def new_params(self, key: jax.Array) -> Tree:
        """Newly initialized parameters, those of the blocks stacked."""
        named = named_leaves(self._adapter.init(key))
        params = {name: named[name] for name in self._rest_dims}
        for name in self._own_dims:
            layers = [named[self._name(i, name)] for i in range(len(self._blocks))]
            params[f"{self.blocks}/{name}"] = jnp.stack(layers)
        return nest(params)

    def check(self, mesh: Mesh) -> None:
        """See ``Model.check``; also the parameters, their table, and what is computed.

        Raises:
          ModelDefinitionError: [T407] parameters, blocks, the hidden state or logits
            are not of the right form.
          DimTableError: [T408] the table does not fit the parameters.
        """
        if self.blocks is not None:
            self._check_hidden_state()
        super().check(mesh)
        leaves = jax.tree.leaves(self._shapes)
        named = named_leaves(self._shapes)
        wrong = [f"{n}: {x.dtype}" for n, x in named.items() if x.dtype != jnp.float32]
        if wrong or len(named) < len(leaves):
            raise ModelDefinitionError(
                "parameters are float32, and each has a name of its own",
                got="\n".join(wrong or ["two parameters have one name"]),
                fix="make them float32; training.mixed_precision=bf16 computes in bf16",
            )
        self.dim_names()
        shape, dtype = self._logits.shape, self._logits.dtype
        is_floating = jnp.issubdtype(dtype, jnp.floating)
        if shape[:2] != (_ROWS, _LENGTH) or len(shape) != 3 or not is_floating:
            raise ModelDefinitionError(
                "a model gives logits [batch, sequence, vocabulary]",
                got=f"{dtype}{[*shape]} for tokens [{_ROWS}, {_LENGTH}]",
                fix="return the logits of every position, floating-point",
            )

    def _check_hidden_state(self) -> None:
        before, after = self._hidden, jax.eval_shape(self._block_of_zeros, self._hidden)
        if _described(before) != _described(after):
            raise ModelDefinitionError(
                "a block returns a hidden state of the shape and dtype that it takes",
                got=f"{_described(before)} before, {_described(after)} after",
                fix="return such an array from block",
            )

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

    @cached_property
    def _logits(self) -> jax.ShapeDtypeStruct:
        """Those of the hidden state before the blocks, which has the same shape."""

        def logits(params: Tree, inputs: Inputs) -> Array:
            hidden = self.embed(params, inputs, NO_MESH)
            return self.head(params, hidden, inputs, NO_MESH)

        inputs = self._abstract_inputs(_ROWS, _LENGTH)
        return jax.eval_shape(logits, self._plain, inputs)

    def _abstract_inputs(self, rows: int, length: int) -> dict[str, Any]:
        struct = jax.ShapeDtypeStruct((rows, length), jnp.int32)
        return dict.fromkeys(self.definition.inputs, struct)

    @property
    def vocab_size(self) -> int:
        """The last dim of the logits."""
        return self._logits.shape[-1]

    def layout_notes(self, mesh: Mesh) -> list[str]:
        """What the model does not read of a batch."""
        del mesh
        if "segment_ids" in self.definition.inputs:
            return []
        return [
            "the model does not read segment_ids: a token attends to all documents "
            "before it in its row"
        ]

    @property
    def layer_costs(self) -> tuple[list[float], float]:
        """Multiplications per token of each block and of the logits, in millions."""

        def head(params: Tree, hidden: Array, inputs: Inputs) -> Array:
            return self.head(params, hidden, inputs, NO_MESH)

        inputs = self._abstract_inputs(_ROWS, _LENGTH)
        programs = (
            jax.make_jaxpr(self._block_of_zeros)(self._hidden),
            jax.make_jaxpr(head)(self._plain, self._hidden, inputs),
        )
        one, last = (count(each).total / (2e6 * _ROWS * _LENGTH) for each in programs)
        return [one] * len(self._blocks), last

    @cached_property
    def _known_policies(self) -> Policies:
        """The policies; ``dots`` for ``named`` where the blocks name nothing.

        They would compute everything again.
        """
        if NAMED not in self.policies:
            return self.policies
        block = jax.make_jaxpr(self._block_of_zeros)(self._hidden)
        if names_values(block):
            return self.policies
        return tuple("dots" if name == NAMED else name for name in self.policies)

    def _block_of_zeros(self, hidden: Array) -> Array:
        """One block, whose parameters and inputs are zeros."""
        place = self.place(None)
        named = named_leaves(self._shapes)
        rest = zeros({name: named[name] for name in self._rest_dims})
        model, blocks = self._open(rest, zeros(self._blocks[0]), place)
        inputs = zeros(self._abstract_inputs(*hidden.shape[:2]))
        inputs[INDEX] = jnp.int32(0)
        hidden = call(model.block, inputs, blocks[0], hidden)
        return self.constrain_wire(hidden, place)

    def wire(self, rows: int, length: int) -> jax.ShapeDtypeStruct:
        """The hidden state of so many sequences."""

        def embed(params: Tree, inputs: Inputs) -> Array:
            return self.embed(params, inputs, self.place(None))

        return jax.eval_shape(embed, self._plain, self._abstract_inputs(rows, length))

    def constrain_wire(self, wire: Array, place: Placement) -> Array:
        """A hidden state in the dtype of activations, ``[batch, sequence, ...]``."""
        if place.mesh is not None:
            others = (None,) * (wire.ndim - 2)
            wire = place.constrain(wire, "batch", "sequence", *others)
        return wire if place.dtype is None else wire.astype(place.dtype)

    def embed(self, params: Tree, batch: Batch, place: Placement) -> Array:
        """See ``Model.embed``."""
        model, _ = self._open(self._rest(params), {}, place)
        with place.autocast():
            if self.blocks is None:
                return model(**self._inputs(batch))
            hidden = call(model.embed, self._inputs(batch))
        return self.constrain_wire(hidden, place)

    def run_blocks(
        self,
        params: Tree,
        hidden: Array,
        batch: Batch,
        place: Placement,
        numbers: Int[Array, " layers"] | None = None,
    ) -> tuple[Array, Tree]:
        """See ``Model.run_blocks``."""
        if self.blocks is None:
            return hidden, ()
        inputs, total, rest = self._inputs(batch), len(self._blocks), self._rest(params)

        def body(hidden: Array, layer: tuple[Tree, Array]) -> tuple[Array, Tree]:
            named, number = layer
            # Cast here, or the loop would add up the gradients by its layers narrow.
            model, blocks = self._open(rest, named, place)
            own = {**inputs, INDEX: number}
            with place.autocast():
                hidden = call(model.block, own, blocks[0], hidden)
            return self.constrain_wire(hidden, place), ()

        exists = None if numbers is None or self.is_even else numbers < total
        numbers = jnp.arange(total, dtype=jnp.int32) if numbers is None else numbers
        layers = named_leaves(params[self.blocks], is_leaf=is_copy), numbers
        policies = policies_of_stage(self._known_policies, self.split)
        return scan_layers(
            body,
            hidden,
            layers,
            policies,
            exists=exists,
            leanly=place.mesh is not None,
        )

    def head(
        self, params: Tree, hidden: Array, batch: Batch, place: Placement
    ) -> Float[Array, "batch seq vocab"]:
        """See ``Model.head``."""
        if self.blocks is None:
            return hidden
        model, _ = self._open(self._rest(params), {}, place)
        with place.autocast():
            return call(model.head, self._inputs(batch), hidden)

    def _rest(self, params: Tree) -> dict[str, Array]:
        """The parameters beside the blocks, by name."""
        return named_leaves(self.divide(params)[1])

    def _open(
        self, rest: Mapping[str, Array], own: Mapping[str, Array], place: Placement
    ) -> tuple[Any, Sequence[Any]]:
        """The model and its blocks, of which the first alone has parameters."""
        named = self._gathered(rest, self._rest_dims, place)
        if own:
            own = self._gathered(own, self._own_dims, place)
            named |= {self._name(0, name): leaf for name, leaf in own.items()}
        leaves = [named.get(name) for name in named_leaves(self._shapes)]
        structure = jax.tree.structure(self._shapes)
        return self._adapter.open(jax.tree.unflatten(structure, leaves))

    def _inputs(self, batch: Inputs) -> dict[str, Array]:
        """What the model reads of a batch."""
        return {name: batch[name] for name in self.definition.inputs}

    def _gathered(
        self, named: Mapping[str, Array], dims: Mapping[str, DimNames], place: Placement
    ) -> dict[str, Array]:
        """Parameters, cast, and gathered over the data axes.

        XLA is not left to choose between them and the batch, which the same axes shard.
        """
        gathering = frozenset(("dp", "fsdp", "pp"))
        gathered = replace(place, vmapped_axes=place.vmapped_axes | gathering)
        whole: dict[str, Array] = {}
        for name, names in dims.items():
            whole[name] = place.cast(named[name], *names)
            if not _STACKED & set(names):
                whole[name] = gathered.constrain(whole[name], *names)
        return whole

    def decoding(self, mesh: Mesh | None, dtype: Any = None) -> Decoding:
        """Generation that computes the whole row for each token.

        Raises:
          OperandError: [T401] a dtype is given, and there is no cache.
        """
        if dtype is not None:
            raise OperandError(
                "a registered model has no cache whose dtype could be chosen",
                got=f"cache_dtype={dtype}",
                fix="leave cache_dtype out",
            )
        # In the dtype of the parameters, as decoders generate.
        place = replace(self.place(mesh), dtype=None)
        return RecomputedDecoding(self, place=place)


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
