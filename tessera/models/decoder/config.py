# SPDX-License-Identifier: Apache-2.0
"""The sizes of a Gemma 3 text model, validated when constructed.

A configuration is a frozen dataclass: it can be hashed and compared, and counts
parameters without allocating any. The published sizes are in ``registry.py``.
"""

import math
from dataclasses import dataclass, fields

from tessera.errors import ModelShapeError, nearest

_MAY_BE_ZERO = ("num_experts", "router_balance_weight", "router_z_weight")
# Far above every model: anything larger is a typing error that would fill the memory.
_MOST = {"num_layers": 10_000, "num_heads": 2**16, "num_kv_heads": 2**16}
_MOST |= {"num_experts": 2**16, "experts_per_token": 2**16, "head_dim": 2**16}
_MOST |= {"d_model": 2**20, "mlp_dim": 2**24, "vocab_size": 2**28}
_MOST_COUNT = 2**31 - 1  # of a 32-bit integer, as positions and token ids are
# The smallest and largest normal float32, the dtype that a model computes in.
_LEAST_FLOAT, _MOST_FLOAT = 2.0**-126, 3.4028234663852886e38


def _out_of_range(name: str, value: float | None) -> tuple[str, str] | None:
    """The problem with one number and its fix, or None."""
    if value is None or (value == 0 and name in _MAY_BE_ZERO):
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
    """Sizes and constants of one Gemma 3 text model.

    Attributes:
      vocab_size: Rows of the embedding table, which is also the output head.
      d_model: Width of the residual stream.
      num_layers: Number of blocks.
      num_heads: Query heads.
      num_kv_heads: Key and value heads; each serves num_heads / num_kv_heads queries.
      head_dim: Width of one head; even, because rope rotates halves.
      mlp_dim: Hidden width of the gated MLP, or of each expert.
      window: Tokens that a local layer attends to, including its own.
      query_pre_attn_scalar: Queries are scaled by this to the power -1/2.
      global_every: Layer i is global iff (i + 1) % global_every == 0.
      rope_base_local: Base of the rotary frequencies of local layers.
      rope_base_global: Base of the rotary frequencies of global layers.
      rope_scale_global: Global layers divide positions by this.
      norm_epsilon: Added to the mean square in every RMSNorm.
      scan_unroll: Layers in one step of the scan over layers.
      num_experts: Experts (gated MLPs) of each layer; 0 is one dense MLP. The following
        attributes only apply with experts.
      experts_per_token: Experts that process each token.
      capacity_factor: None is dropless: every expert computes all tokens routed to it.
        A number limits an expert's tokens of a sequence, in multiples of its even
        share.
      router_balance_weight: Weight in the training loss of each layer's load-balancing
        loss.
      router_z_weight: Weight in the training loss of each layer's router z-loss.

    Raises:
      ModelShapeError: [T405] sizes are out of range or inconsistent; lists all.

    Example:
      >>> from tessera.models.registry import config_of
      >>> f"{config_of('gemma3_270m').num_params:,}"
      '268,098,176'

    Source: Gemma 3 Technical Report, arXiv 2503.19786.
    """

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    window: int
    query_pre_attn_scalar: float
    global_every: int = 6
    rope_base_local: float = 10_000.0
    rope_base_global: float = 1_000_000.0
    rope_scale_global: float = 1.0
    norm_epsilon: float = 1e-6
    scan_unroll: int = 1
    num_experts: int = 0
    experts_per_token: int = 2
    capacity_factor: float | None = None
    router_balance_weight: float = 0.01
    router_z_weight: float = 0.001

    def __post_init__(self) -> None:
        problems = self._problems()
        if problems:
            raise ModelShapeError(
                "these sizes do not make a model",
                got="\n".join(got for got, _ in problems),
                fix="\n".join(fix for _, fix in problems),
            )

    def _problems(self) -> list[tuple[str, str]]:
        """Every problem and its fix."""
        problems = [
            problem
            for field in fields(self)
            if (problem := _out_of_range(field.name, getattr(self, field.name)))
        ]
        if problems:
            return problems
        heads, kv_heads = self.num_heads, self.num_kv_heads
        legal = (n for n in range(1, heads + 1) if not heads % n)
        checks = (
            (
                heads % kv_heads,
                f"num_heads = {heads}, num_kv_heads = {kv_heads},"
                f" remainder {heads % kv_heads}",
                f"use num_kv_heads {nearest(legal, kv_heads)}",
            ),
            (
                self.head_dim % 2,
                f"head_dim = {self.head_dim} is odd, but rope rotates halves",
                f"use head_dim {self.head_dim - 1 or 2} or {self.head_dim + 1}",
            ),
            (
                0 < self.num_experts < self.experts_per_token,
                f"experts_per_token = {self.experts_per_token}, "
                f"num_experts = {self.num_experts}",
                f"use experts_per_token {self.num_experts} or less",
            ),
        )
        return [(got, fix) for is_wrong, got, fix in checks if is_wrong]

    @property
    def num_params(self) -> int:
        """Number of trained scalars; the tied output head counts once."""
        d, heads = self.d_model, self.num_heads + self.num_kv_heads
        mlp = 3 * d * self.mlp_dim
        if self.num_experts:
            mlp = self.num_experts * (mlp + d)
        block = 2 * d * self.head_dim * heads + mlp
        return self.vocab_size * d + self.num_layers * block + self.num_norm_params

    @property
    def num_active_params(self) -> int:
        """Number of parameters that one token uses: not all experts."""
        unused = max(self.num_experts - self.experts_per_token, 0)
        return (
            self.num_params - self.num_layers * unused * 3 * self.d_model * self.mlp_dim
        )

    @property
    def num_norm_params(self) -> int:
        """Number of parameters that are scales of norms."""
        block = 4 * self.d_model + 2 * self.head_dim
        return self.num_layers * block + self.d_model

    @property
    def layer_costs(self) -> tuple[list[float], float]:
        """Multiplications per token of each layer, and of the logits, in millions."""
        heads = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        mlp = 3 * self.mlp_dim
        if self.num_experts:
            mlp = self.experts_per_token * mlp + self.num_experts
        layer = self.d_model * (heads + mlp)
        return [layer / 1e6] * self.num_layers, self.d_model * self.vocab_size / 1e6

    def is_global(self, layer: int) -> bool:
        """Whether a layer (counted from 0) attends to the whole sequence."""
        return (layer + 1) % self.global_every == 0
