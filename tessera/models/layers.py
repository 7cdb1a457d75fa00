# SPDX-License-Identifier: Apache-2.0
"""The parts of a decoder block, each holding the parameters of all layers at once.

A parameter of a block is made with a leading ``layers`` dim. The scan over layers hands
each block its own slice, so a part's ``__call__`` sees one layer and no leading dim.

Shape suffixes: B batch, S query position, T key position, D d_model, F mlp, H query
heads, G key/value heads, K head_dim.
"""

from collections.abc import Callable
from typing import Final, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from tessera.models.gemma3_config import Gemma3Config
from tessera.models.partition_rules import Placement
from tessera.ops.norms import rms_norm
from tessera.shard import ShardSpec

# Names of the dims of queries, and of keys and values.
HEADS: Final = ("batch", "context", "heads", None)
KV_HEADS: Final = ("batch", "context", "kv_heads", None)

# From queries, keys and values to what each query reads.
Read: TypeAlias = Callable[[Array, Array, Array], Array]


def parameter(value: Array, *names: str) -> nnx.Param[Array]:
    """A parameter that knows the logical name of each of its dims."""
    spec = ShardSpec(partition=tuple(range(len(names))), mesh_axes=names)
    return nnx.Param(value, shard_spec=spec)


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last dim, scaled by 1 + w; float32 inside.

    Args:
      shape: Of the scale; the last dim is the normalized one.
      names: Logical names of its dims.
      epsilon: Added to the mean square.

    Source: arXiv 1910.07467.
    """

    def __init__(
        self, shape: tuple[int, ...], names: tuple[str, ...], epsilon: float
    ) -> None:
        self.scale = parameter(jnp.zeros(shape, jnp.float32), *names)
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*dims last"]) -> Float[Array, "*dims last"]:
        """``x`` normalized, in its own dtype."""
        weight = 1.0 + self.scale[...].astype(jnp.float32)
        return rms_norm(x, weight, eps=self.epsilon)


class Projection(nnx.Module):
    """A matmul that takes the dims named ``inputs`` to the dims named ``outputs``.

    Args:
      num_layers: Size of the leading dim.
      inputs: Logical name and size of each contracted dim.
      outputs: Logical name and size of each dim that takes their place.
      rngs: Source of the values: truncated normal, variance 1 / fan-in.
    """

    def __init__(
        self,
        num_layers: int,
        inputs: dict[str, int],
        outputs: dict[str, int],
        *,
        rngs: nnx.Rngs,
    ) -> None:
        self.num_inputs = len(inputs)
        last = self.num_inputs + len(outputs) + 1
        init = jax.nn.initializers.variance_scaling(
            1.0,
            "fan_in",
            "truncated_normal",
            in_axis=tuple(range(1, self.num_inputs + 1)),
            out_axis=tuple(range(self.num_inputs + 1, last)),
            batch_axis=0,
        )
        shape = (num_layers, *inputs.values(), *outputs.values())
        value = init(rngs.params(), shape, jnp.float32)
        self.kernel = parameter(value, "layers", *inputs, *outputs)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """``x`` with its trailing dims replaced by the outputs."""
        return jnp.tensordot(x, self.kernel[...], axes=self.num_inputs)


def rotate(
    x_BSHK: Float[Array, "batch seq heads head_dim"],
    angles_BSK: Float[Array, "#batch seq half_head_dim"],
) -> Float[Array, "batch seq heads head_dim"]:
    """Turn each pair (k, k + head_dim / 2) by its angle in radians; float32 inside.

    Source: arXiv 2104.09864.
    """
    cos, sin = jnp.cos(angles_BSK)[:, :, None], jnp.sin(angles_BSK)[:, :, None]
    first, second = jnp.split(x_BSHK.astype(jnp.float32), 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x_BSHK.dtype)


class Attention(nnx.Module):
    """Grouped-query self-attention with normalized queries and keys."""

    def __init__(self, config: Gemma3Config, *, rngs: nnx.Rngs) -> None:
        layers, self.config = config.num_layers, config
        embed = {"embed": config.d_model}
        heads = {"heads": config.num_heads, "head_dim": config.head_dim}
        kv_heads = {"kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
        self.query = Projection(layers, embed, heads, rngs=rngs)
        self.key = Projection(layers, embed, kv_heads, rngs=rngs)
        self.value = Projection(layers, embed, kv_heads, rngs=rngs)
        self.output = Projection(layers, heads, embed, rngs=rngs)
        scale = ((layers, config.head_dim), ("layers", "head_dim"), config.norm_epsilon)
        self.query_norm = RMSNorm(*scale)
        self.key_norm = RMSNorm(*scale)

    def __call__(
        self,
        x_BSD: Float[Array, "batch seq d_model"],
        angles_BSK: Float[Array, "#batch seq half_head_dim"],
        read: Read,
        place: Placement,
    ) -> Float[Array, "batch seq d_model"]:
        """What each position reads from others, which ones ``read`` decides."""
        q_BSHK = place.constrain(self.query(x_BSD), *HEADS)
        q_BSHK = rotate(self.query_norm(q_BSHK), angles_BSK)
        q_BSHK = q_BSHK * self.config.query_pre_attn_scalar**-0.5
        k_BTGK = place.constrain(self.key(x_BSD), *KV_HEADS)
        k_BTGK = rotate(self.key_norm(k_BTGK), angles_BSK)
        v_BTGK = place.constrain(self.value(x_BSD), *KV_HEADS)
        copies = place.size("heads") // self.config.num_kv_heads
        if copies > 1:
            # Fewer key/value heads than tp: each device takes the one its queries read.
            k_BTGK = place.constrain(jnp.repeat(k_BTGK, copies, axis=2), *HEADS)
            v_BTGK = place.constrain(jnp.repeat(v_BTGK, copies, axis=2), *HEADS)
        out_BSHK = read(q_BSHK, k_BTGK, v_BTGK)
        return self.output(place.constrain(out_BSHK, *HEADS))


class MLP(nnx.Module):
    """The gated MLP of GeGLU, with gelu's tanh approximation.

    Source: arXiv 2002.05202.
    """

    def __init__(self, config: Gemma3Config, *, rngs: nnx.Rngs) -> None:
        layers = config.num_layers
        embed, mlp = {"embed": config.d_model}, {"mlp": config.mlp_dim}
        self.gate = Projection(layers, embed, mlp, rngs=rngs)
        self.up = Projection(layers, embed, mlp, rngs=rngs)
        self.down = Projection(layers, mlp, embed, rngs=rngs)

    def __call__(
        self, x_BSD: Float[Array, "batch seq d_model"], place: Placement
    ) -> Float[Array, "batch seq d_model"]:
        """Each position by itself, through ``gelu(gate) * up``."""
        gate_BSF = jax.nn.gelu(self.gate(x_BSD), approximate=True)
        hidden_BSF = gate_BSF * self.up(x_BSD)
        return self.down(place.constrain(hidden_BSF, "batch", "context", "mlp"))
