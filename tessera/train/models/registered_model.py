# SPDX-License-Identifier: Apache-2.0
"""``register_model``: lets the trainer train a model of one's own.

    @register_model(config=Sizes, dims={"embed/embedding": "vocab embed", ...})
    class Decoder(nnx.Module):
        def __init__(self, config, *, rngs): ...
        def __call__(self, tokens, segment_ids, positions): ...  # logits

``tessera train model=my_package.my_module:Decoder`` imports the module and trains it.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, Final, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tessera.errors import (
    ModelDefinitionError,
    OperandError,
    SettingConflictError,
    TesseraError,
)
from tessera.foundations.tree import Tree, named_leaves, nest
from tessera.mesh import Mesh
from tessera.ops.losses import cross_entropy
from tessera.train.models.block_methods import check_methods
from tessera.train.models.decoding import Decoding
from tessera.train.models.definition import (
    MODEL_SETTINGS,
    ModelDefinition,
    ModelOptions,
    define,
)
from tessera.train.models.dim_table import dim_names
from tessera.train.models.model import Batch, DimNames, Model, Sums
from tessera.train.models.module_adapters import Adapter, Inputs, adapt
from tessera.train.models.partition_rules import NO_MESH, Placement
from tessera.train.models.recomputed_decoding import RecomputedDecoding

INPUTS: Final = ("tokens", "segment_ids", "positions")
"""What a model may read of a batch, int32 ``[B, S]`` each."""

# Names of dims whose parameters are stacked: a scan takes one layer at a time.
_STACKED: Final = frozenset({"layers"})
_MESH_AXES: Final = ("dp", "fsdp", "tp", "ep_outer", "ep")

Target = TypeVar("Target")


def register_model(
    *,
    config: type,
    dims: Mapping[str, str],
    inputs: Sequence[str] = INPUTS,
    init: Callable[..., Tree] | None = None,
    blocks: str | None = None,
) -> Callable[[Target], Target]:
    """A decorator that lets configurations name a model.

    Decorates a class, which is called with ``config`` and ``rngs=`` (flax.nnx),
    ``config`` (Linen) or ``config`` and ``key=`` (Equinox), and whose instances are
    called with the inputs by name; or a function ``(config, params, **inputs)``. The
    result is logits, floating-point ``[B, S, V]``. Parameters are float32.

    A model that names its repeated ``blocks`` has three methods in the place of the
    call, which are static methods of a class for functions. Each takes by name what it
    reads of the inputs, and ``block`` may take ``index``, the number of the block:

    ================== ====================== ================================
    method             of a module            of functions
    ================== ====================== ================================
    the hidden state   ``embed(self)``        ``embed(config, params)``
    after a block      ``block(self, block,   ``block(config, params, block,
                       hidden)``              hidden)``
    the logits         ``head(self, hidden)`` ``head(config, params, hidden)``
    ================== ====================== ================================

    The blocks are then scanned, ``training.remat`` applies to each, and pipelines run
    them in stages. Their parameters are stacked: ``layers/0/up`` and ``layers/1/up``
    are ``layers/up``, whose first dim is that of the layers.

    Args:
      config: A dataclass, whose fields become the settings of the group ``model``.
      dims: The logical names of each parameter's dims, by patterns of its name; see
        ``tessera.train.models.dim_table``.
      inputs: What the model reads of a batch, of ``INPUTS``. Rows hold several
        documents: without ``segment_ids`` tokens attend to other documents.
      init: For a function: ``(config, key) -> params``.
      blocks: The attribute, or for functions the entry of the parameters, that is the
        list of blocks; they differ in nothing but the values of their parameters.

    Raises:
      ModelDefinitionError: [T407] the arguments do not fit each other.
    """
    _check_config(config)
    if unknown := set(inputs) - set(INPUTS):
        raise ModelDefinitionError(
            "a batch does not have these inputs",
            got=f"inputs={tuple(inputs)}: {', '.join(sorted(unknown))}",
            fix=f"use some of {', '.join(INPUTS)}",
        )

    def register(target: Target) -> Target:
        if blocks is None:
            _check_call(target, init, inputs)
        else:
            owner = ("self",) if init is None else ("config", "params")
            check_methods(target, inputs, owner)
        definition = RegisteredDefinition(
            target, config, dims, tuple(inputs), init, blocks
        )
        define(definition)
        return target

    return register


class RegisteredDefinition(ModelDefinition):
    """What ``register_model`` was given."""

    def __init__(
        self,
        target: Any,
        config: type,
        dims: Mapping[str, str],
        inputs: tuple[str, ...],
        init: Callable[..., Tree] | None,
        blocks: str | None = None,
    ) -> None:
        self.name = f"{target.__module__}:{target.__name__}"
        self.config_class = config
        self.target, self.dims, self.inputs, self.init = target, dims, inputs, init
        self.blocks = blocks

    def build(
        self, config: Any, options: ModelOptions, mesh: Mesh | None
    ) -> "RegisteredModel":
        """The model, with the stages of a mesh that has ``pp``."""
        if self.blocks is None:
            return RegisteredModel(config, self, dtype=options.dtype)
        from tessera.train.models.registered_blocks import RegisteredBlocks

        return RegisteredBlocks.of(config, self, options, mesh)

    def problems(
        self, config: Any, options: ModelOptions, mesh: Mesh
    ) -> Iterator[TesseraError]:
        """Settings that need more of a model than this one has, T311, T407, T408."""
        default, has_blocks = ModelOptions(), self.blocks is not None
        axes = (*_MESH_AXES, "pp") if has_blocks else _MESH_AXES
        values = {
            "model.sequence_parallel": options.sequence_parallel,
            "model.context_parallel": options.context_parallel != "ring",
            "training.remat": not has_blocks and options.remat != default.remat,
            "training.loss_chunk": isinstance(options.loss_chunk, int),
            "training.mixed_precision=fp8": options.fp8,
        }
        lacking = [name for name, is_set in values.items() if is_set]
        lacking += [f"mesh axis {a!r}" for a in mesh.axes if a not in axes]
        for what in lacking:
            yield SettingConflictError(
                f"a registered model has no use for {what}",
                got=f"{self.name}, {what}",
                fix=f"leave it out; mesh axes are {', '.join(axes)}"
                + (
                    "; pp and training.remat need register_model(blocks=)"
                    if not has_blocks
                    else ""
                ),
            )
        try:
            self.build(config, options, mesh).check()
        except TesseraError as error:
            yield error


@dataclass(frozen=True, eq=False)
class RegisteredModel(Model):
    """A registered model with a configuration; the parameters are named by paths.

    Attributes:
      config: An instance of the configuration class.
      definition: What was registered.
    """

    config: Any
    definition: RegisteredDefinition

    @cached_property
    def _adapter(self) -> Adapter:
        of = self.definition
        return adapt(of.target, of.init, self.config, of.inputs, of.blocks)

    @cached_property
    def _shapes(self) -> Tree:
        """The parameters as the adapter has them."""
        return jax.eval_shape(lambda: self._adapter.init(jax.random.key(0)))

    @cached_property
    def _logits(self) -> jax.ShapeDtypeStruct:
        def logits(params: Tree, inputs: Inputs) -> Array:
            return self.logits(params, inputs, NO_MESH)

        return jax.eval_shape(logits, self._plain, self._abstract_inputs(2, 8))

    def _abstract_inputs(self, rows: int, length: int) -> dict[str, Any]:
        struct = jax.ShapeDtypeStruct((rows, length), jnp.int32)
        return dict.fromkeys(self.definition.inputs, struct)

    def check(self) -> None:
        """Check the parameters, the table of their dims, and the logits.

        Raises:
          ModelDefinitionError: [T407] parameters or logits are not of the right form.
          DimTableError: [T408] the table does not fit the parameters.
        """
        leaves = jax.tree.leaves(self._shapes)
        named = named_leaves(self._shapes)
        wrong = [
            f"{name}: {leaf.dtype}"
            for name, leaf in named.items()
            if leaf.dtype != jnp.float32
        ]
        if wrong or len(named) < len(leaves):
            raise ModelDefinitionError(
                "parameters are float32, and each has a name of its own",
                got="\n".join(wrong or ["two parameters have one name"]),
                fix="make them float32; training.mixed_precision=bf16 computes in bf16",
            )
        self.dim_names()
        shape, dtype = self._logits.shape, self._logits.dtype
        if (
            shape[:2] != (2, 8)
            or len(shape) != 3
            or not jnp.issubdtype(dtype, jnp.floating)
        ):
            raise ModelDefinitionError(
                "a model gives logits [batch, sequence, vocabulary]",
                got=f"{dtype}{[*shape]} for tokens [2, 8]",
                fix="return the logits of every position, floating-point",
            )

    @property
    def vocab_size(self) -> int:
        """The last dim of the logits."""
        return self._logits.shape[-1]

    def new_params(self, key: jax.Array) -> Tree:
        """Newly initialized parameters, in nested dicts by the parts of their names."""
        return nest(named_leaves(self._adapter.init(key)))

    @cached_property
    def _dim_names(self) -> dict[str, DimNames]:
        shapes = {name: x.shape for name, x in named_leaves(self._shapes).items()}
        return dim_names(self.definition.dims, shapes)

    def dim_names(self) -> Tree:
        """The logical names of each parameter's dims, by the table."""
        return nest(self._dim_names)

    def layout_notes(self, mesh: Mesh) -> list[str]:
        """What the model does not read of a batch."""
        del mesh
        if "segment_ids" in self.definition.inputs:
            return []
        return [
            "the model does not read segment_ids: a token attends to all documents "
            "before it in its row"
        ]

    def logits(
        self, params: Tree, batch: Inputs, place: Placement
    ) -> Float[Array, "batch seq vocab"]:
        """Logits of the token after each one.

        Parameters that ``dp`` or ``fsdp`` shard are gathered where they are used: XLA
        is not left to choose between them and the batch, which the same axes shard.
        """
        tree = self._gathered(
            named_leaves(params), self._dim_names, self._shapes, place
        )
        with place.autocast():
            return self._adapter.bind(tree)(**self._inputs(batch))

    def _inputs(self, batch: Inputs) -> dict[str, Array]:
        """What the model reads of a batch."""
        return {name: batch[name] for name in self.definition.inputs}

    def _gathered(
        self,
        named: Mapping[str, Array],
        dims: Mapping[str, DimNames],
        like: Tree,
        place: Placement,
    ) -> Tree:
        """Parameters as the adapter has them, cast and gathered over the data axes."""
        gathering = frozenset(("dp", "fsdp", "pp"))
        gathered = replace(place, vmapped_axes=place.vmapped_axes | gathering)
        leaves: list[Array] = []
        for name in named_leaves(like):
            leaf = place.cast(named[name], *dims[name])
            if not _STACKED & set(dims[name]):
                leaf = gathered.constrain(leaf, *dims[name])
            leaves.append(leaf)
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

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
        return RecomputedDecoding(self, place=replace(self.place(mesh), dtype=None))

    def loss(
        self, params: Tree, batch: Batch, place: Placement, *, chunk: int | str
    ) -> tuple[Float[Array, ""], Sums]:
        """See ``Model.loss``: the cross-entropy of all logits at once."""
        del chunk
        logits = self.logits(params, batch, place)
        loss = cross_entropy(logits, batch["targets"], reduction="sum")
        return loss, {"loss": loss}


def _check_config(config: type) -> None:
    if not is_dataclass(config) or not isinstance(config, type):
        got, fix = f"{config!r}", "give a class that @dataclass decorates"
    elif clash := [one.name for one in fields(config) if one.name in MODEL_SETTINGS]:
        got, fix = f"{config.__name__}.{clash[0]}", "give the field another name"
    else:
        return
    raise ModelDefinitionError(
        "the configuration of a model is a dataclass whose fields are settings",
        got=got,
        fix=fix,
    )


def _check_call(target: Any, init: Any, inputs: Sequence[str]) -> None:
    call: Any = target if init is not None else getattr(target, "__call__")  # noqa: B004, B009
    before = [None, None] if init is not None else [None]
    try:
        inspect.signature(call).bind(*before, **dict.fromkeys(inputs))
    except (TypeError, ValueError) as error:
        raise ModelDefinitionError(
            f"{getattr(target, '__name__', target)} cannot be called with its inputs",
            got=f"inputs={tuple(inputs)}: {error}",
            fix="take these arguments by name, or declare the ones that it takes: "
            'inputs=("tokens",)',
        ) from error
