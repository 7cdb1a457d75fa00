# SPDX-License-Identifier: Apache-2.0
"""The sizes and features of a decoder, validated when constructed; imports no JAX.

A configuration is a frozen dataclass: it can be hashed and compared. Its defaults are
the features of Gemma 3.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Final

from tessera.errors import ModelShapeError, did_you_mean, nearest
from tessera.train.models.decoder.lora import ATTENTION_TARGETS, MLP_TARGETS, LoraConfig

ACTIVATIONS: Final = ("gelu_tanh", "silu", "clamped_swiglu")
ROPE_KINDS: Final = ("linear", "llama3", "yarn", "longrope")
LAYER_TYPES: Final = ("local", "global")
# Fields that only layers of one kind read.
FIELDS_OF_KIND: Final = {
    "local": ("window", "rope_base_local", "rope_scale_local"),
    "global": ("rope_base_global", "rope_scale_global"),
}
_CHOICES: Final = {"activation": ACTIVATIONS, "rope_kind": ROPE_KINDS}
# The kinds of rotary scaling that read a setting; others refuse it.
_ROPE_KINDS_OF: Final = {
    "rope_original_length": ("llama3", "yarn", "longrope"),
    "rope_low_rotations": ("llama3", "yarn"),
    "rope_high_rotations": ("llama3", "yarn"),
    "rope_truncate": ("yarn",),
    "rope_attention_factor": ("yarn", "longrope"),
    "rope_short_factors": ("longrope",),
    "rope_long_factors": ("longrope",),
}
_MAY_BE_ZERO = ("num_experts", "router_balance_weight", "router_z_weight", "lora.rank")
# Far above every model: anything larger is a typing error that would fill the memory.
_MOST = {"num_layers": 10_000, "num_heads": 2**16, "num_kv_heads": 2**16}
_MOST |= {"num_experts": 2**16, "experts_per_token": 2**16, "head_dim": 2**16}
_MOST |= {"d_model": 2**20, "mlp_dim": 2**24, "vocab_size": 2**28}
_MOST_COUNT = 2**31 - 1  # of a 32-bit integer, as positions and token ids are
# The smallest and largest normal float32, the dtype that a model computes in.
_LEAST_FLOAT, _MOST_FLOAT = 2.0**-126, 3.4028234663852886e38


# What is wrong, and how to mend it.
Problem = tuple[str, str]


def _out_of_range(name: str, value: Any) -> Problem | None:
    """The problem with one field by itself and its fix, or None."""
    if choices := _CHOICES.get(name):
        words = ", ".join(choices)
        return None if value in choices else (f"{name} = {value!r}", f"use {words}")
    if value is None or isinstance(value, (bool, str, tuple, LoraConfig)):
        return None
    if value == 0 and name in _MAY_BE_ZERO:
        return None
    if isinstance(value, int):
        most = _MOST.get(name, _MOST_COUNT)
        within = 0 < value <= most
    else:
        most = _MOST_FLOAT
        within = _LEAST_FLOAT <= value <= most
    if within:
        return None
    least = "0" if name in _MAY_BE_ZERO else "1"
    kind = "number from 0 up" if name in _MAY_BE_ZERO else "positive number"
    if most < value < math.inf:
        return f"{name} = {value!r} is too large", f"use {name} {most:g} or less"
    return f"{name} = {value!r} is not a {kind}", f"use {name} {least} or more"


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes, features and constants of one decoder.

    Attributes:
      vocab_size: Rows of the embedding table, and of the output head.
      d_model: Width of the residual stream.
      num_layers: Number of blocks.
      num_heads: Query heads.
      num_kv_heads: Key and value heads; each serves num_heads / num_kv_heads queries.
      head_dim: Width of one head; even, because rope rotates halves.
      mlp_dim: Hidden width of the gated MLP, or of each expert.
      window: Tokens that a local layer attends to, including its own; null if every
        layer is global.
      query_pre_attn_scalar: Queries are scaled by this to the power -1/2; null is
        head_dim.
      global_every: Layer i is global iff (i + 1) % global_every == 0; null makes every
        layer local.
      layer_types: Whether each layer is local or global, instead of global_every.
      rope_dims: The first dims of a head, which are rotated; null is all.
      rope_base_local: Base of the rotary frequencies of local layers.
      rope_base_global: Base of the rotary frequencies of global layers.
      rope_scale_local: Factor of the context length of local layers; 1 is no scaling.
      rope_scale_global: Factor of the context length of global layers.
      rope_kind: What a factor divides; linear divides all rotary frequencies, llama3
        and yarn the low ones, and longrope each one by its own.
      rope_original_length: Tokens of the context before scaling.
      rope_low_rotations: Frequencies with fewer rotations in the original length are
        divided by the factor.
      rope_high_rotations: Frequencies with more rotations in the original length stay;
        between the two, llama3 interpolates by rotations and yarn by dims.
      rope_truncate: Whether yarn rounds the dims between which it interpolates outward.
      rope_attention_factor: Factor of rotated queries and keys of scaled layers with
        yarn, null is 0.1 ln(scale) + 1; of all layers with longrope, null is 1.
      rope_short_factors: Of each frequency with longrope, for rows of up to
        rope_original_length tokens; longer ones are refused.
      rope_long_factors: Those for longer rows, which an export writes.
      norm_epsilon: Added to the mean square in every RMSNorm.
      norm_unit_offset: Whether norms multiply by 1 + w, or by w.
      pre_norms: Whether attention and MLP have a norm before them.
      post_norms: Whether attention and MLP have a norm after them.
      qk_norm: Whether the queries and keys of each head are normalized.
      qk_norm_joint: Whether all heads of a token are normalized as one vector instead.
      qkv_bias: Whether the projections to queries, keys and values have biases.
      output_bias: Whether the projection of attention's output has a bias.
      activation: Of the MLP's gate; gelu_tanh, silu, or that of GPT-OSS,
        clamped_swiglu.
      scale_embedding: Whether embeddings are multiplied by the root of d_model.
      tied_head: Whether the embedding table is the output head, too.
      attention_sinks: Whether each head has a learned score beside those of keys, whose
        weight is of no value.
      attention_soft_cap: Attention scores x become cap * tanh(x / cap); null is none.
      logit_soft_cap: Logits x become cap * tanh(x / cap); null is none.
      scan_unroll: Layers in one step of the scan over layers.
      num_experts: Experts (gated MLPs) of each layer; 0 is one dense MLP. The following
        attributes only apply with experts.
      experts_per_token: Experts that process each token.
      renormalize_experts: Whether the weights of a token's experts add up to 1, or are
        their probabilities among all experts.
      expert_biases: Whether the router and the matmuls of experts have biases.
      router_balance_weight: Weight in the training loss of each layer's load-balancing
        loss.
      router_z_weight: Weight in the training loss of each layer's router z-loss.
      lora: Adapters of the matmuls; see ``LoraConfig``.

    Raises:
      ModelShapeError: [T405] sizes are out of range or inconsistent, or a feature would
        change nothing; lists all.

    Example:
      >>> from tessera.train.models.named_models import config_of
      >>> config_of("gemma3_270m").layer_kinds[4:8]
      ('local', 'global', 'local', 'local')

    Source: Gemma 3 Technical Report, arXiv 2503.19786; YaRN, arXiv 2309.00071.
    """

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    window: int | None = None
    query_pre_attn_scalar: float | None = None
    global_every: int | None = 6
    layer_types: tuple[str, ...] | None = None
    rope_dims: int | None = None
    rope_base_local: float = 10_000.0
    rope_base_global: float = 1_000_000.0
    rope_scale_local: float = 1.0
    rope_scale_global: float = 1.0
    rope_kind: str = "linear"
    rope_original_length: int | None = None
    rope_low_rotations: float = 1.0
    rope_high_rotations: float = 32.0
    rope_truncate: bool = True
    rope_attention_factor: float | None = None
    rope_short_factors: tuple[float, ...] | None = None
    rope_long_factors: tuple[float, ...] | None = None
    norm_epsilon: float = 1e-6
    norm_unit_offset: bool = True
    pre_norms: bool = True
    post_norms: bool = True
    qk_norm: bool = True
    qk_norm_joint: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    activation: str = "gelu_tanh"
    scale_embedding: bool = True
    tied_head: bool = True
    attention_sinks: bool = False
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    scan_unroll: int = 1
    num_experts: int = 0
    experts_per_token: int = 2
    renormalize_experts: bool = True
    expert_biases: bool = False
    router_balance_weight: float = 0.01
    router_z_weight: float = 0.001
    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        for name in ("layer_types", "rope_short_factors", "rope_long_factors"):
            # A list is not hashable; a configuration is.
            if (values := getattr(self, name)) is not None:
                object.__setattr__(self, name, tuple(values))
        problems = [
            problem
            for prefix, group in (("", self), ("lora.", self.lora))
            for one in fields(group)
            if (problem := _out_of_range(prefix + one.name, getattr(group, one.name)))
        ] or [
            *self._size_problems(),
            *self._layer_problems(),
            *self._rope_problems(),
            *self._lora_problems(),
        ]
        if problems:
            raise ModelShapeError(
                "these sizes do not make a model",
                got="\n".join(got for got, _ in problems),
                fix="\n".join(fix for _, fix in problems),
            )

    def _size_problems(self) -> Iterator[Problem]:
        heads, kv_heads = self.num_heads, self.num_kv_heads
        if remainder := heads % kv_heads:
            legal = (n for n in range(1, heads + 1) if not heads % n)
            yield (
                f"num_heads = {heads}, num_kv_heads = {kv_heads},"
                f" remainder {remainder}",
                f"use num_kv_heads {nearest(legal, kv_heads)}",
            )
        if self.head_dim % 2:
            yield (
                f"head_dim = {self.head_dim} is odd, but rope rotates halves",
                f"use head_dim {self.head_dim - 1 or 2} or {self.head_dim + 1}",
            )
        if self.qk_norm_joint and not self.qk_norm:
            yield (
                "qk_norm_joint = True, qk_norm = False",
                "use qk_norm True, or leave out qk_norm_joint",
            )
        if 0 < self.num_experts < self.experts_per_token:
            yield (
                f"experts_per_token = {self.experts_per_token}, "
                f"num_experts = {self.num_experts}",
                f"use experts_per_token {self.num_experts} or less",
            )
        for name in (
            () if self.num_experts else ("renormalize_experts", "expert_biases")
        ):
            if (value := getattr(self, name)) != getattr(DecoderConfig, name):
                yield (
                    f"{name} = {value}, num_experts = 0",
                    f"use num_experts 1 or more, or leave out {name}",
                )

    def _layer_problems(self) -> Iterator[Problem]:
        types, count = self.layer_types, self.num_layers
        if types is not None:
            if self.global_every != DecoderConfig.global_every:
                yield (
                    f"layer_types and global_every = {self.global_every}",
                    "leave out one of the two: layer_types lists all layers",
                )
            if len(types) != count or not {*types} <= {*LAYER_TYPES}:
                yield (
                    f"layer_types = {[*types]}, num_layers = {count}",
                    f"list {count} of {' and '.join(LAYER_TYPES)}",
                )
                return
        if self.window is None and "local" in self.layer_kinds:
            first = next(i for i in range(count) if not self.is_global(i))
            yield (
                f"window = None, but layer {first} is local",
                "use a window, or global_every 1",
            )

    def _rope_problems(self) -> Iterator[Problem]:
        if self.rope_dims and (self.rope_dims % 2 or self.rope_dims > self.head_dim):
            yield (
                f"rope_dims = {self.rope_dims}, head_dim = {self.head_dim}",
                f"use an even rope_dims of {self.head_dim} or less",
            )
        for name, kinds in _ROPE_KINDS_OF.items():
            value = getattr(self, name)
            if self.rope_kind not in kinds and value != getattr(DecoderConfig, name):
                yield (
                    f"{name} = {value}, rope_kind = {self.rope_kind!r}",
                    f"use rope_kind {' or '.join(kinds)}, or leave out {name}",
                )
        if self.rope_kind == "linear":
            return
        if self.rope_kind == "longrope":
            yield from self._longrope_problems()
        elif self.rope_scale_local == self.rope_scale_global == 1:
            yield (
                f"rope_kind = {self.rope_kind!r}, but no layer is scaled",
                "use a rope_scale_global or rope_scale_local above 1, or leave out "
                "rope_kind",
            )
        if self.rope_original_length is None:
            yield (
                f"rope_kind = {self.rope_kind!r}, rope_original_length = None",
                "use the context length before scaling as rope_original_length",
            )
        if self.rope_low_rotations >= self.rope_high_rotations:
            yield (
                f"rope_low_rotations = {self.rope_low_rotations}, "
                f"rope_high_rotations = {self.rope_high_rotations}",
                "use rope_low_rotations below rope_high_rotations",
            )
        least = min(self.rope_base_local, self.rope_base_global)
        if self.rope_kind == "yarn" and least <= 1:
            yield (
                f"rope_kind = 'yarn', and a base of {least}",
                "use rope_base_local and rope_base_global above 1",
            )

    def _longrope_problems(self) -> Iterator[Problem]:
        if not self.rope_scale_local == self.rope_scale_global == 1:
            yield (
                "rope_kind = 'longrope', and a scale of the context",
                "leave out rope_scale_local and rope_scale_global",
            )
        for name in ("rope_short_factors", "rope_long_factors"):
            factors, count = getattr(self, name) or (), self.rotated_dims // 2
            if len(factors) != count or not all(0 < x < math.inf for x in factors):
                yield f"{name} = {[*factors]}", f"use {count} positive numbers"

    def _lora_problems(self) -> Iterator[Problem]:
        lora, sizes = self.lora, self.projections
        if lora.targets is not None and not lora.targets:
            yield "lora.targets = ()", "use lora.rank 0 for no adapters"
        unknown = [name for name in self.lora_targets if name not in sizes]
        for name in unknown:
            fix = did_you_mean(name, sizes)
            if self.num_experts and name in MLP_TARGETS:
                fix = f"{fix}; experts have no adapters"
            yield f"lora.targets has {name!r}", fix
        for name in sizes:
            most = min(sizes[name])
            if name in self.lora_targets and lora.rank > most:
                yield (
                    f"lora.rank = {lora.rank} is more than the rank of {name}, whose "
                    f"weight is a matrix of {' x '.join(map(str, sizes[name]))}",
                    f"use lora.rank {most} or less, or lora.targets without {name}",
                )
        yield from lora.base_problems(sizes, self.num_experts)

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """How many numbers enter and leave each matmul of a layer, without experts."""
        d, f = self.d_model, self.mlp_dim
        q, k = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        sizes = dict(
            zip(ATTENTION_TARGETS, ((d, q), (d, k), (d, k), (q, d)), strict=True)
        )
        if not self.num_experts:
            sizes |= zip(MLP_TARGETS, ((d, f), (d, f), (f, d)), strict=True)
        return sizes

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """The matmuls that have adapters."""
        if not self.lora.rank:
            return ()
        targets = self.lora.targets
        return tuple(self.projections if targets is None else dict.fromkeys(targets))

    @property
    def rotated_dims(self) -> int:
        """How many dims of a head are rotated."""
        return self.head_dim if self.rope_dims is None else self.rope_dims

    def check_length(self, length: int) -> None:
        """Check that the rotary frequencies hold for rows of so many tokens.

        Raises:
          ModelShapeError: [T405] they do not.
        """
        most = self.rope_original_length
        if self.rope_kind == "longrope" and most is not None and length > most:
            raise ModelShapeError(
                "longer rows have other rotary frequencies, which are not computed",
                got=f"{length} tokens, rope_kind = 'longrope', "
                f"rope_original_length = {most}",
                fix=f"use rows of {most} tokens or less, answers included",
            )

    def is_global(self, layer: int) -> bool:
        """Whether a layer (counted from 0) attends to the whole sequence."""
        if self.layer_types is not None:
            return self.layer_types[layer] == "global"
        return self.global_every is not None and (layer + 1) % self.global_every == 0

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """``local`` or ``global`` for each layer."""
        return tuple(
            "global" if self.is_global(i) else "local" for i in range(self.num_layers)
        )

    @property
    def layer_costs(self) -> tuple[list[float], float]:
        """Multiplications per token of each layer, and of the logits, in millions."""
        layer = sum(first * last for first, last in self.projections.values())
        for name in self.lora_targets:
            layer += self.lora.rank * sum(self.projections[name])
        if self.num_experts:
            experts = 3 * self.experts_per_token * self.mlp_dim + self.num_experts
            layer += self.d_model * experts
        return [layer / 1e6] * self.num_layers, self.d_model * self.vocab_size / 1e6

    @property
    def query_scale(self) -> float:
        """The factor of queries before attention."""
        return (self.query_pre_attn_scalar or self.head_dim) ** -0.5
