# SPDX-License-Identifier: Apache-2.0
"""The modules of a decoder block, each with the parameters of all layers stacked.

A parameter of a block has a leading ``layers`` dim. The scan over layers passes each
block its own slice, so ``__call__`` sees one layer and no leading dim.

Shape suffixes: B batch, S query position, T key position, D d_model, F mlp, H query
heads, G key/value heads, K head_dim.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from tessera.ops.activations import GATES
from tessera.ops.norms import rms_norm
from tessera.shard import ShardSpec
from tessera.tracing.casts import cast_parameter
from tessera.train.models.decoder.config import DecoderConfig
from tessera.train.models.decoder.fp8_matmul import fp8_tensordot
from tessera.train.models.decoder.quantized_kernel import dequantize, quantize
from tessera.train.models.decoder.rotary import Rotation
from tessera.train.models.partition_rules import Placement

# Logical dim names of queries, and of keys and values.
HEADS: Final = ("batch", "context", "heads", None)
KV_HEADS: Final = ("batch", "context", "kv_heads", None)

# From queries, keys, values and perhaps sinks to the outputs of attention.
Attend: TypeAlias = Callable[..., Array]


fan_in_init = partial(
    jax.nn.initializers.variance_scaling, 1.0, "fan_in", "truncated_normal"
)
"""Truncated normal with variance 1 / fan-in, of ``in_axis`` and ``out_axis``."""


def parameter(
    init: jax.nn.initializers.Initializer, key: Any, dims: Mapping[str, int]
) -> nnx.Param[Array]:
    """A parameter with the logical name and the size of each of its dims."""
    return _named(init(key, tuple(dims.values()), jnp.float32), tuple(dims))


def _named(value: Array, dims: tuple[str | None, ...]) -> nnx.Param[Array]:
    spec = ShardSpec(partition=tuple(range(len(dims))), mesh_axes=dims)
    return nnx.Param(value, shard_spec=spec)


def recomputed(function: Callable[..., Array]) -> Callable[..., Array]:
    """A function that saves its arguments for the backward pass and nothing else.

    For functions of single elements or rows, whose f32 intermediate values would take
    several times the memory of their arguments.
    """
    return jax.checkpoint(function, prevent_cse=False)


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last dim, with a scale; float32 inside.

    Args:
      dims: Logical names and sizes of the scale's dims; the last is normalized.
      config: For ``norm_epsilon``, which is added to the mean square, and
        ``norm_unit_offset``: whether the factor is 1 + scale.

    Source: arXiv 1910.07467.
    """

    def __init__(self, dims: Mapping[str, int], config: DecoderConfig) -> None:
        self.epsilon, self.offset = config.norm_epsilon, config.norm_unit_offset
        initializers = jax.nn.initializers
        initial = initializers.zeros if self.offset else initializers.ones
        self.scale = parameter(initial, None, dims)

    def __call__(self, x: Float[Array, "*dims last"]) -> Float[Array, "*dims last"]:
        """``x`` normalized, in its own dtype."""
        weight = self.scale[...].astype(jnp.float32)
        if self.offset:
            weight = 1.0 + weight
        return recomputed(partial(rms_norm, eps=self.epsilon))(x, weight)


class Projection(nnx.Module):
    """A matmul that contracts the dims ``inputs`` and adds the dims ``outputs``.

    Args:
      name: What ``config.lora.targets`` calls it.
      config: Of the decoder.
      inputs: Logical name and size of each contracted dim.
      outputs: Logical name and size of each output dim.
      rngs: Source of the initial values; see ``fan_in_init``.
      bias: Whether a bias is added, zero at first.
    """

    def __init__(
        self,
        name: str,
        config: DecoderConfig,
        inputs: dict[str, int],
        outputs: dict[str, int],
        *,
        rngs: nnx.Rngs,
        bias: bool = False,
    ) -> None:
        layers, key = {"layers": config.num_layers}, rngs.params()
        self.num_inputs = len(inputs)
        self.dims = (*inputs, *outputs)
        last = self.num_inputs + len(outputs) + 1
        first = self.num_inputs + 1

        init = fan_in_init(tuple(range(1, first)), tuple(range(first, last)), 0)
        zeros = jax.nn.initializers.zeros
        self.sizes = (*inputs.values(), *outputs.values())
        self.is_quantized = config.lora.is_quantized
        if self.is_quantized:
            weight = init(key, (config.num_layers, *self.sizes), jnp.float32)
            rows = weight.reshape(config.num_layers, -1, *outputs.values())
            of_layer = partial(quantize, kind=config.lora.quantize_base)
            codes, scales = jax.vmap(of_layer)(rows)
            # Axes split whole blocks, as they split the first input.
            self.code_dims = (self.dims[0], None, *outputs)
            self.scale_dims = (self.dims[0], *outputs)
            self.codes = _named(codes, ("layers", *self.code_dims))
            self.scales = _named(scales, ("layers", *self.scale_dims))
        else:
            self.kernel = parameter(init, key, layers | inputs | outputs)
        if bias:
            self.bias = parameter(zeros, key, layers | outputs)
        self.scale: float | None = None
        if name in config.lora_targets:
            self.scale = config.lora.scale
            rank = {"lora_rank": config.lora.rank}
            # Uniform up to 1 / sqrt(fan-in), as PEFT initializes A.
            uniform = jax.nn.initializers.variance_scaling(
                1 / 3, "fan_in", "uniform", tuple(range(1, first)), first, 0
            )
            self.lora_dims = (*inputs, "lora_rank"), ("lora_rank", *outputs)
            # A key of its own: the weights are those of the model without adapters.
            key = jax.random.fold_in(key, 1)
            self.lora_a = parameter(uniform, key, layers | inputs | rank)
            self.lora_b = parameter(zeros, key, layers | rank | outputs)

    def __call__(
        self, x: Float[Array, "batch seq ..."], place: Placement
    ) -> Float[Array, "batch seq ..."]:
        """``x`` with its trailing dims replaced by the output dims."""
        y = self._product(x, place)
        if self.scale is not None:
            # Gathered along fsdp as W is: XLA would permute matrices so small.
            a, b = (
                place.constrain(cast_parameter(factor[...], x.dtype), *_gathered(dims))
                for factor, dims in zip(
                    (self.lora_a, self.lora_b), self.lora_dims, strict=True
                )
            )
            low = self.scale * jnp.tensordot(x, a, axes=self.num_inputs)
            low = place.constrain(low, "batch", "context", "lora_rank")
            y = y + jnp.tensordot(low, b, axes=1)
        if hasattr(self, "bias"):
            y = y + cast_parameter(self.bias[...], y.dtype)
        return y

    def _product(self, x: Array, place: Placement) -> Array:
        """``x`` times the weight alone."""
        if self.is_quantized:
            return self._quantized_product(x, place)
        kernel = place.cast(self.kernel[...], *self.dims)

        def product(x: Array, kernel: Array) -> Array:
            # Once for all uses: XLA for TPUs would gather it for each of them.
            whole = place.constrain(kernel, *_gathered(self.dims))
            return jnp.tensordot(x, whole, self.num_inputs)

        if place.fp8:  # is gathered after it is cast
            return fp8_tensordot(x, kernel, self.num_inputs)
        if place.size("embed") > 1:
            # A backward pass gathers it again, whatever else it keeps.
            return recomputed(product)(x, kernel)
        return jnp.tensordot(x, kernel, self.num_inputs)

    def _quantized_product(self, x: Array, place: Placement) -> Array:
        """The same with the codes gathered; the backward pass dequantizes again."""

        @recomputed
        def product(x: Array, codes: Array, scales: Array) -> Array:
            codes = place.constrain(codes, *_gathered(self.code_dims))
            scales = place.constrain(scales, *_gathered(self.scale_dims))
            weight = dequantize(codes, scales, x.dtype).reshape(self.sizes)
            return jnp.tensordot(x, weight, self.num_inputs)

        return product(x, self.codes[...], self.scales[...])


def _gathered(dims: Iterable[str | None]) -> tuple[str | None, ...]:
    """Dims of a parameter that is gathered along fsdp."""
    return tuple(None if name == "embed" else name for name in dims)


def rotate(
    x_BSHK: Float[Array, "batch seq heads head_dim"],
    rotation: Rotation,
) -> Float[Array, "batch seq heads head_dim"]:
    """Rotate each pair (k, k + rope_dims / 2) by its angle; float32 inside.

    Source: arXiv 2104.09864.
    """
    cos, sin = (f(rotation.angles)[:, :, None] for f in (jnp.cos, jnp.sin))
    half = cos.shape[-1]
    pairs, rest_BSHK = jnp.split(x_BSHK, [2 * half], axis=-1)
    first, second = jnp.split(pairs.astype(jnp.float32), 2, axis=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    out_BSHK = jnp.concatenate(rotated, axis=-1)
    if rotation.factor is not None:
        out_BSHK = out_BSHK * rotation.factor
    out_BSHK = out_BSHK.astype(x_BSHK.dtype)
    return jnp.concatenate([out_BSHK, rest_BSHK], -1) if rest_BSHK.size else out_BSHK


class Attention(nnx.Module):
    """Grouped-query self-attention."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        embed = {"embed": config.d_model}
        heads = {"heads": config.num_heads, "head_dim": config.head_dim}
        kv_heads = {"kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
        new = partial(Projection, config=config, rngs=rngs)
        bias = config.qkv_bias
        self.query = new("q_proj", inputs=embed, outputs=heads, bias=bias)
        self.key = new("k_proj", inputs=embed, outputs=kv_heads, bias=bias)
        self.value = new("v_proj", inputs=embed, outputs=kv_heads, bias=bias)
        bias = config.output_bias
        self.output = new("o_proj", inputs=heads, outputs=embed, bias=bias)
        if config.attention_sinks:
            dims = {"layers": config.num_layers, "heads": config.num_heads}
            self.sinks = parameter(jax.nn.initializers.zeros, None, dims)
        if config.qk_norm:
            counts = config.num_heads, config.num_kv_heads
            widths = counts if config.qk_norm_joint else (1, 1)
            layers = {"layers": config.num_layers}
            self.query_norm, self.key_norm = (
                RMSNorm(layers | {"head_dim": n * config.head_dim}, config)
                for n in widths
            )

    def __call__(
        self,
        x_BSD: Float[Array, "batch seq d_model"],
        rotation: Rotation,
        attend: Attend,
        place: Placement,
    ) -> Float[Array, "batch seq d_model"]:
        """The attention outputs of each position; ``attend`` applies the mask."""
        q_BSHK = place.constrain(self.query(x_BSD, place), *HEADS)
        k_BTGK = place.constrain(self.key(x_BSD, place), *KV_HEADS)
        v_BTGK = place.constrain(self.value(x_BSD, place), *KV_HEADS)
        q_BSHK = checkpoint_name(q_BSHK, "query")
        k_BTGK = checkpoint_name(k_BTGK, "key")
        v_BTGK = checkpoint_name(v_BTGK, "value")
        if self.config.qk_norm:
            q_BSHK = normalized(self.query_norm, q_BSHK)
            k_BTGK = normalized(self.key_norm, k_BTGK)
        turn = recomputed(rotate)
        q_BSHK = turn(q_BSHK, rotation) * self.config.query_scale
        k_BTGK = turn(k_BTGK, rotation)
        copies = place.size("heads") // self.config.num_kv_heads
        if copies > 1:
            # Fewer key/value heads than tp: each device gets the head of its queries.
            k_BTGK = place.constrain(jnp.repeat(k_BTGK, copies, axis=2), *HEADS)
            v_BTGK = place.constrain(jnp.repeat(v_BTGK, copies, axis=2), *HEADS)
        sinks = (self.sinks[...],) if self.config.attention_sinks else ()
        out_BSHK = attend(q_BSHK, k_BTGK, v_BTGK, *sinks)
        return self.output(place.constrain(out_BSHK, *HEADS), place)


def normalized(
    norm: RMSNorm, x_BSHK: Float[Array, "batch seq heads head_dim"]
) -> Float[Array, "batch seq heads head_dim"]:
    """Each head normalized, or all of a token as one vector for a norm that wide."""
    width = norm.scale.shape[-1]
    return norm(x_BSHK.reshape(*x_BSHK.shape[:2], -1, width)).reshape(x_BSHK.shape)


def soft_capped(x: Float[Array, "..."], cap: float | None) -> Float[Array, "..."]:
    """``cap * tanh(x / cap)``; without a cap, ``x``."""
    return x if cap is None else cap * jnp.tanh(x / cap)


class MLP(nnx.Module):
    """The gated MLP of GeGLU, with gelu's tanh approximation, or of a SwiGLU.

    Source: arXiv 2002.05202.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        embed, mlp = {"embed": config.d_model}, {"mlp": config.mlp_dim}
        self.gate = Projection("gate_proj", config, embed, mlp, rngs=rngs)
        self.up = Projection("up_proj", config, embed, mlp, rngs=rngs)
        self.down = Projection("down_proj", config, mlp, embed, rngs=rngs)
        self.activation = config.activation

    def __call__(
        self, x_BSD: Float[Array, "batch seq d_model"], place: Placement
    ) -> Float[Array, "batch seq d_model"]:
        """Each position by itself, through its gate."""
        gate_BSF = checkpoint_name(self.gate(x_BSD, place), "gate")
        up_BSF = checkpoint_name(self.up(x_BSD, place), "up")

        @recomputed
        def product(gate_BSF: Array, up_BSF: Array) -> Array:
            return GATES[self.activation](gate_BSF, up_BSF)

        hidden_BSF = product(gate_BSF, up_BSF)
        hidden_BSF = place.constrain(hidden_BSF, "batch", "context", "mlp")
        return self.down(hidden_BSF, place)
