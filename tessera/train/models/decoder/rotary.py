# SPDX-License-Identifier: Apache-2.0
"""The frequencies of rotary embeddings, and how a longer context scales them.

Sources: RoFormer, arXiv 2104.09864; linear scaling, arXiv 2306.15595; YaRN, arXiv
2309.00071; Llama 3, arXiv 2407.21783; LongRoPE, arXiv 2402.13753.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tessera.train.models.decoder.config import DecoderConfig


class Rotation(NamedTuple):
    """How a layer rotates its queries and keys.

    Attributes:
      positions: Of the tokens, int32 ``[#B, S]``.
      frequencies: Of each pair of rotated dims, in radians per position, f32
        ``[rope_dims / 2]``.
      factor: Of the rotated queries and keys, an f32 scalar; None is 1.
    """

    positions: Int[Array, "#batch seq"]
    frequencies: Float[Array, " half_head_dim"]
    factor: Float[Array, ""] | None = None

    @property
    def angles(self) -> Float[Array, "#batch seq half_head_dim"]:
        """Of each pair of dims, in radians."""
        return self.positions[..., None].astype(jnp.float32) * self.frequencies


def rotation(
    config: DecoderConfig,
    positions: Int[Array, "#batch seq"],
    is_global: Bool[Array, ""],
) -> Rotation:
    """The rotation of a layer, whose kind is traced."""
    local_K, local_factor = frequencies(config, "local")
    global_K, global_factor = frequencies(config, "global")
    frequency_K = jnp.where(is_global, global_K, local_K)
    if local_factor == global_factor == 1:
        return Rotation(positions, frequency_K)
    factors = jnp.float32(global_factor), jnp.float32(local_factor)
    return Rotation(positions, frequency_K, jnp.where(is_global, *factors))


def frequencies(config: DecoderConfig, kind: str) -> tuple[Array, float]:
    """The rotary frequencies of one kind of layer, and the factor of what they rotate.

    Args:
      config: The model's sizes.
      kind: ``local`` or ``global``.

    Returns:
      Radians per position, f32 ``[rope_dims / 2]``, and the factor.

    Example:
      >>> from tessera.train.models.named_models import config_of
      >>> slow, _ = frequencies(config_of("gemma3_4b"), "global")
      >>> print(slow[:2].round(4))
      [0.125  0.1122]
    """
    base, scale = (
        (config.rope_base_global, config.rope_scale_global)
        if kind == "global"
        else (config.rope_base_local, config.rope_scale_local)
    )
    dims = jnp.arange(0, config.rotated_dims, 2, dtype=jnp.float32)
    unscaled = base ** -(dims / config.rotated_dims)
    if config.rope_kind == "longrope":
        factors = jnp.array(config.rope_short_factors, jnp.float32)
        return unscaled / factors, config.rope_attention_factor or 1.0
    if config.rope_kind == "linear" or scale == 1:
        return unscaled / scale, 1.0
    length = config.rope_original_length
    assert length is not None, "DecoderConfig has checked this"
    bounds = config.rope_low_rotations, config.rope_high_rotations
    factor = 1.0
    if config.rope_kind == "llama3":
        low, high = bounds
        rotations = length * unscaled / (2 * math.pi)
        unscaled_share = (rotations - low) / (high - low)
    else:
        first, last = _ramp_dims(config, base, length)
        unscaled_share = 1 - (dims / 2 - first) / (last - first)
        factor = config.rope_attention_factor
        if factor is None:
            factor = 0.1 * math.log(scale) + 1.0 if scale > 1 else 1.0
    unscaled_share = jnp.clip(unscaled_share, 0, 1)
    scaled = unscaled / scale * (1 - unscaled_share) + unscaled * unscaled_share
    return scaled, factor


def _ramp_dims(config: DecoderConfig, base: float, length: int) -> tuple[float, float]:
    """Between which pairs of dims YaRN goes from unscaled to scaled frequencies."""

    def pair_of(rotations: float) -> float:
        ratio = math.log(length / (2 * math.pi * rotations)) / math.log(base)
        return config.rotated_dims * ratio / 2

    first = pair_of(config.rope_high_rotations)
    last = pair_of(config.rope_low_rotations)
    if config.rope_truncate:
        first, last = math.floor(first), math.ceil(last)
    # The upper bound counts dims and not pairs, as in the paper's own program.
    first, last = max(first, 0), min(last, config.rotated_dims - 1)
    return first, last + 0.001 if first == last else last
