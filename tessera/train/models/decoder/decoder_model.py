# SPDX-License-Identifier: Apache-2.0
"""A model as a pure function of a parameter tree, for training steps.

``Decoder`` is an nnx module. ``DecoderModel`` knows the names, shapes and layouts of
its parameters, initializes them, and computes with any such tree. The tree is nested
plain dicts, with leaves such as ``params["decoder"]["mlp"]["up"]["kernel"]``.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tessera.errors import SettingConflictError, ShardDivisibilityError
from tessera.foundations.tree import Tree, named_leaves
from tessera.mesh import AnyMesh, Mesh, as_mesh
from tessera.ops.attention.all_to_all import check_exchange
from tessera.ops.losses import Reduction
from tessera.train.models.decoder.attention_inputs import context_note, layer_attention
from tessera.train.models.decoder.config import FIELDS_OF_KIND, DecoderConfig
from tessera.train.models.decoder.decoder import (
    RESIDUAL,
    Decoder,
    Statistics,
    default_positions,
)
from tessera.train.models.decoder.expert_mlp import ROUTER_METRICS, router_sums
from tessera.train.models.decoder.head_division import check_heads
from tessera.train.models.decoder.lora import BLOCK
from tessera.train.models.decoder.rotary import rotation
from tessera.train.models.decoding import Decoding
from tessera.train.models.layer_scan import policies_of_stage, scan_layers
from tessera.train.models.model import Batch, DimNames, Model, Sums
from tessera.train.models.partition_rules import Method, Placement


@lru_cache(maxsize=64)
def _abstract_parts(
    config: DecoderConfig,
) -> tuple[nnx.GraphDef[Decoder], nnx.State[str, Any]]:
    """Models that differ in their layout alone have the same parts."""

    def new() -> Decoder:
        return Decoder(config, rngs=nnx.Rngs(params=jax.random.key(0)))

    return nnx.split(nnx.eval_shape(new))


@lru_cache(maxsize=64)
def _names(config: DecoderConfig) -> frozenset[str]:
    """The names of the parameters."""
    return frozenset(named_leaves(nnx.to_pure_dict(_abstract_parts(config)[1])))


@dataclass(frozen=True)
class DecoderModel(Model):
    """A decoder without arrays.

    Attributes:
      config: Sizes.
      sequence_parallel: Shard norms and residuals along the sequence over ``tp``. The
        results are the same, and a residual takes 1 / tp of the memory: each all-reduce
        becomes a reduce-scatter, which XLA on CPU compiles to all-reduce and slice, and
        an all-gather (arXiv 2205.05198).
      context_parallel: The attention over sequences that ``cp`` shards: ``ring`` passes
        keys and values around, ``all_to_all`` exchanges sequence shards for heads.
      fp8: Whether the projections of blocks multiply 8-bit operands.

    Example:
      >>> from tessera.train.models.named_models import config_of
      >>> model = DecoderModel(config_of("gemma3_270m"))
      >>> model.abstract()["decoder"]["mlp"]["up"]["kernel"].shape
      (18, 640, 2048)
    """

    config: DecoderConfig
    sequence_parallel: bool = False
    context_parallel: Method = "ring"
    fp8: bool = False

    blocks = "decoder"

    @cached_property
    def _parts(self) -> tuple[nnx.GraphDef[Decoder], nnx.State[str, Any]]:
        """The module's graph definition, and its abstract parameters."""
        return _abstract_parts(self.config)

    @cached_property
    def _plain(self) -> Tree:
        return nnx.to_pure_dict(self._parts[1])

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.config.vocab_size

    @property
    def num_active_params(self) -> int:
        """Number of parameters that one token uses: not all experts."""
        config = self.config
        unused = max(config.num_experts - config.experts_per_token, 0)
        expert = 3 * config.d_model * config.mlp_dim
        if config.expert_biases:
            expert += 2 * config.mlp_dim + config.d_model
        return self.num_params - config.num_layers * unused * expert

    @property
    def couples_rows(self) -> bool:
        """Whether rows share something: routers balance a whole batch."""
        return self.config.num_experts > 0

    @property
    def block_sum_names(self) -> tuple[str, ...]:
        """With experts, ``ROUTER_METRICS``."""
        return tuple(ROUTER_METRICS) if self.config.num_experts else ()

    @cached_property
    def adapters(self) -> frozenset[str]:
        """The names of the parameters of LoRA."""
        names = _names(self.config)
        return frozenset(n for n in names if n.endswith(("/lora_a", "/lora_b")))

    @cached_property
    def quantized(self) -> frozenset[str]:
        """The names of the codes and scales of quantized weights."""
        names = _names(self.config)
        return frozenset(n for n in names if n.endswith(("/codes", "/scales")))

    def dequantized(self) -> Self:
        """See ``Model.dequantized``."""
        lora = replace(self.config.lora, quantize_base="none")
        frozen = frozenset(n.replace("/codes", "/kernel") for n in self.frozen)
        return replace(self, config=replace(self.config, lora=lora), frozen=frozen)

    def new_params(self, key: jax.Array) -> Tree:
        """Newly initialized float32 parameters without stages."""
        module = Decoder(self.config, rngs=nnx.Rngs(params=key))
        return nnx.to_pure_dict(nnx.split(module)[1])

    def plain_dim_names(self) -> Tree:
        """The logical names of each parameter's dims, as the module declares them."""

        def names(param: nnx.Variable[Any]) -> DimNames:
            return param.shard_spec.mesh_axes

        def is_param(node: Any) -> bool:
            return isinstance(node, nnx.Variable)

        return nnx.to_pure_dict(jax.tree.map(names, self._parts[1], is_leaf=is_param))

    def place(self, mesh: AnyMesh | None) -> Placement:
        """The placement of this model on a mesh, and the dtype of activations.

        With fewer key/value heads than ``tp``, each device keeps them all. If ``pp``
        does not divide the width, each stage keeps the whole embedding table. If ``tp``
        does not divide the vocabulary, it splits the width of the tables instead, but
        not with ``pp``.

        Raises:
          HeadCountError: [T402] the heads cannot be divided over ``tp``, or over
            ``cp`` by all-to-all attention.
          SettingConflictError: [T507] ``cp`` would split sequences of a model with
            attention sinks.
        """
        config, method = self.config, self.context_parallel
        mesh = as_mesh(mesh)
        whole = frozenset({"sequence"} if not self.sequence_parallel else ())
        place = Placement(mesh, whole, frozenset(), method, self.dtype, self.fp8)
        tp, cp = place.size("heads"), place.size("context")
        check_heads(config, tp)
        if config.attention_sinks and cp > 1:
            raise SettingConflictError(
                "attention with sinks needs whole sequences",
                got=f"attention_sinks=True, mesh axis 'cp' of {cp} devices",
                fix="use a mesh without 'cp': fsdp, tp and pp split this model, too",
            )
        if method == "all_to_all" and cp > 1:
            kv_heads = max(config.num_kv_heads // tp, 1)
            check_exchange(config.num_heads // tp, kv_heads, cp, "cp")
        if config.num_kv_heads % tp:
            whole |= {"kv_heads"}
        if config.d_model % place.size("table"):
            whole |= {"table", "columns"}
        if config.vocab_size % place.size("vocab"):
            whole |= {"vocab"}
            # The stages of a pipeline scatter the gradient of a whole width.
            is_staged = mesh is not None and "pp" in mesh.axes
            if is_staged or config.d_model % place.size("wide_table"):
                whole |= {"wide_table"}
        return replace(place, whole=whole)

    def check(self, mesh: Mesh) -> None:
        """See ``Model.check``.

        Raises:
          SettingConflictError: [T507] matmuls of experts cannot have 8-bit operands, or
            quantized weights are in a pipeline or would have such operands.
          ShardDivisibilityError: [T201] devices would share blocks of such weights.
        """
        super().check(mesh)
        if self.quantized:
            self._check_quantized(mesh)
        if self.fp8 and self.config.num_experts:
            raise SettingConflictError(
                "the matmuls of experts have no 8-bit operands",
                got="training.mixed_precision=fp8, "
                f"model.num_experts={self.config.num_experts}",
                fix="use training.mixed_precision=bf16, or a model without experts",
            )

    def _check_quantized(self, mesh: Mesh) -> None:
        """Check that a mesh and a precision leave whole blocks in all devices."""
        place, config = self.place(mesh), self.config
        fix = "or model.lora.quantize_base=none"
        if self.fp8 or self.split is not None:
            raise SettingConflictError(
                "neither pipelines nor 8-bit matmuls have quantized weights",
                got=f"model.lora.quantize_base={config.lora.quantize_base}",
                fix=f"use a mesh without 'pp' and training.mixed_precision=bf16, {fix}",
            )
        heads = config.num_heads * config.head_dim
        widths = {"embed": config.d_model, "mlp": config.mlp_dim, "heads": heads}
        for name, width in widths.items():
            if width // BLOCK % (size := place.size(name)):
                axes = ", ".join(place.axes(name))
                raise ShardDivisibilityError(
                    f"{axes} would cut blocks of {BLOCK} quantized weights",
                    got=f"{name} of {width}: {width // BLOCK} blocks, {size} devices",
                    fix=f"use {axes} {math.gcd(width // BLOCK, size)}, {fix}",
                )

    def layout_notes(self, mesh: Mesh) -> list[str]:
        """Notes on layouts that a reader may not expect, one sentence each.

        Raises:
          HeadCountError: [T402] the heads cannot be divided over ``tp``.
        """
        place, config = self.place(mesh), self.config
        notes: list[str] = []
        tp = place.size("heads")
        if "kv_heads" in place.whole:
            notes.append(
                f"num_kv_heads {config.num_kv_heads} < tp {tp}: the key and value "
                "projections are replicated over 'tp', and each device uses the one "
                f"head that its {config.num_heads // tp} query head(s) attend with"
            )
        if "vocab" in place.whole:
            columns = (
                "replicated" if "wide_table" in place.whole else "split by columns"
            )
            notes.append(
                f"vocab_size {config.vocab_size:,} is no multiple of tp {tp}: a step "
                f"pads its tables by {-config.vocab_size % tp} rows, which have no "
                f"probability; they are stored without them, {columns} over 'tp'"
            )
        if "table" in place.whole:
            notes.append(
                f"the embedding table is replicated over 'pp', which does not divide "
                f"d_model {config.d_model}"
            )
        if self.sequence_parallel and tp == 1:
            notes.append("sequence_parallel changes nothing: 'tp' has one device")
        if place.size("context") > 1:
            notes.append(context_note(config.window, self.context_parallel, mesh))
        elif self.context_parallel != "ring":
            notes.append("context_parallel changes nothing: 'cp' has one device")
        return [*notes, *self._unused_notes()]

    def _unused_notes(self) -> Iterator[str]:
        """Sizes that no layer of this model reads."""
        for kind, names in FIELDS_OF_KIND.items():
            other = "global" if kind == "local" else "local"
            twins = {name: name.replace(kind, other) for name in names}
            # Published models have one base of RoPE for both kinds.
            is_usual = all(
                getattr(self.config, n) in (None, getattr(DecoderConfig, n))
                or (n != twin and getattr(self.config, n) == getattr(self.config, twin))
                for n, twin in twins.items()
            )
            if not is_usual and kind not in self.config.layer_kinds:
                listed = f"{', '.join(names[:-1])} and {names[-1]}"
                yield f"{listed} change nothing: no layer is {kind}"

    def merge(self, params: Tree) -> Decoder:
        """The nnx module with these parameters, which may be of some layers only."""
        return nnx.merge(self._parts[0], nnx.State(params))

    def decoding(self, mesh: Mesh | None, dtype: Any = None) -> Decoding:
        """The decoder with a cache of keys and values of a dtype; see ``generate``."""
        from tessera.train.models.decoder.cached_decoding import CachedDecoding

        return CachedDecoding.of(self, mesh, dtype)

    @property
    def block_kinds(self) -> tuple[str, ...]:
        """``local`` or ``global`` for each layer."""
        return self.config.layer_kinds

    @property
    def layer_costs(self) -> tuple[list[float], float]:
        """Multiplications per token of each layer and of the logits, in millions."""
        return self.config.layer_costs

    def wire(self, rows: int, length: int) -> jax.ShapeDtypeStruct:
        """The residual ``[B, S, D]``, in the dtype of activations."""
        shape = (rows, length, self.config.d_model)
        return jax.ShapeDtypeStruct(shape, self.dtype or jnp.float32)

    def constrain_wire(self, wire: Array, place: Placement) -> Array:
        """The residual in its layout."""
        return place.constrain(wire, *RESIDUAL)

    def embed(self, params: Tree, batch: Batch, place: Placement) -> Array:
        """See ``Model.embed``."""
        return self.merge(params).embed(batch["tokens"], place=place)

    def run_blocks(
        self,
        params: Tree,
        hidden: Array,
        batch: Batch,
        place: Placement,
        numbers: Int[Array, " layers"] | None = None,
    ) -> tuple[Array, Statistics]:
        """See ``Model.run_blocks``; ``segment_ids`` may be None."""
        config, segment_ids = self.config, batch["segment_ids"]
        config.check_length(hidden.shape[1])
        attention = layer_attention(config, hidden.shape[1], segment_ids, place)
        graphdef, layers = nnx.split(self.merge(params).decoder)
        count = config.num_layers
        policies = policies_of_stage(self.policies, self.split)
        exists = None if numbers is None or self.is_even else numbers < count
        numbers = jnp.arange(count) if numbers is None else numbers

        def body(x_BSD: Array, layer: Any) -> tuple[Array, Statistics]:
            state, is_global = layer
            block = nnx.merge(graphdef, state)
            turn = rotation(config, batch["positions"], is_global)
            return block(x_BSD, turn, attention(is_global), place)

        with jax.named_scope("decoder"):
            return scan_layers(
                body,
                hidden,
                (layers, _are_global(config, numbers)),
                policies,
                exists=exists,
                leanly=self.split is not None,
                unroll=config.scan_unroll,
            )

    def block_sums(
        self, statistics: Statistics, count: Float[Array, ""]
    ) -> tuple[Float[Array, ""] | float, Sums]:
        """The losses of the routers, means over one batch, weighted by its count."""
        routers = router_sums(self.config, statistics, count)
        return routers.get("router_loss", 0.0), routers

    def head(
        self, params: Tree, hidden: Array, batch: Batch, place: Placement
    ) -> Float[Array, "batch seq vocab"]:
        """See ``Model.head``; float32."""
        del batch
        return self.merge(params).logits(hidden, place=place)

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
        """See ``Model.head_loss``."""
        return self.merge(params).loss(
            hidden,
            batch["targets"],
            chunk=chunk,
            place=place,
            reduction=reduction,
            temperature=temperature,
        )

    def apply(
        self,
        params: Tree,
        tokens: Int[Array, "batch seq"],
        *,
        positions: Int[Array, "batch seq"] | None = None,
        segment_ids: Int[Array, "batch seq"] | None = None,
        mesh: AnyMesh | None = None,
    ) -> Float[Array, "batch seq vocab"]:
        """Logits of the token after each one.

        Args:
          params: As from ``init``.
          tokens: int32, global ``[B, S]``; per device ``[B / (dp · fsdp), S]``. A
            token outside the vocabulary makes its row NaN. Sequences are in their own
            order; ``cp`` shards what is computed from them.
          positions: int32; by default 0, 1, 2, ... from the start of each segment.
          segment_ids: int32; a token attends only to its own segment, a run of equal
            ids. None is one segment a row.
          mesh: The mesh of the step; None leaves every layout to XLA.

        Returns:
          float32, global ``[B, S, V]``; per device
          ``[B / (dp · fsdp), S / cp, V / tp]``.

        Raises:
          HeadCountError: [T402] the heads cannot be divided over ``tp``.
          ParameterTreeError: [T306] names or shapes are not those of this model.
          ShardDivisibilityError: [T201] batch, or with sequence_parallel or ``cp`` the
            sequence, is not a multiple of its axes' size.
        """
        self.check_params(params)
        place = self.place(mesh)
        if positions is None:
            positions = default_positions(tokens.shape[1], segment_ids)
        batch = {"tokens": tokens, "positions": positions, "segment_ids": segment_ids}
        batch = jax.tree.map(place.arranged, batch)
        logits = place.restored(self.logits(params, batch, place), dim=1)
        return place.constrain(logits, "batch", "context", "vocab")


def _are_global(
    config: DecoderConfig, numbers: Int[Array, " layers"]
) -> Bool[Array, " layers"]:
    """Whether layers are global, by their index; a table would be an argument."""
    every = config.global_every
    if config.layer_types is None and every is not None:
        return (numbers + 1) % every == 0
    result = jnp.zeros(numbers.shape, bool)
    for layer, kind in enumerate(config.layer_kinds):
        if kind == "global":
            result |= numbers == layer
    return result
