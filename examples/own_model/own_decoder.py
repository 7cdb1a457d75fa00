# SPDX-License-Identifier: Apache-2.0
"""A small decoder in flax.nnx, as a user of Tessera would bring it.

tessera train model=own_decoder:Decoder 'model.mesh_shape=[[2,2],[fsdp,tp]]'
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from tessera.train.models import register_model


@dataclass(frozen=True)
class Sizes:
    """Settings of the group ``model``: ``model.width=128``."""

    vocab_size: int = 264
    width: int = 64
    heads: int = 4
    layers: int = 2


class Block(nnx.Module):
    """Causal attention inside each document, then an MLP."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        width, heads = sizes.width, (sizes.heads, sizes.width // sizes.heads)
        self.norm1, self.norm2 = (nnx.RMSNorm(width, rngs=rngs) for _ in range(2))
        self.query, self.key, self.value = (
            nnx.LinearGeneral(width, heads, use_bias=False, rngs=rngs) for _ in range(3)
        )
        self.out = nnx.LinearGeneral(
            heads, width, axis=(-2, -1), use_bias=False, rngs=rngs
        )
        self.up = nnx.Linear(width, 4 * width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """The residual after the block."""
        y = self.norm1(x)
        query, key, value = self.query(y), self.key(y), self.value(y)
        x += self.out(jax.nn.dot_product_attention(query, key, value, mask=mask))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


def attends(segment_ids: jax.Array) -> jax.Array:
    """Which token attends to which: the mask, [batch, 1, sequence, sequence]."""
    same = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    return same & jnp.tril(jnp.ones(same.shape[-2:], bool))


DIMS = {
    "tokens/embedding": "vocab embed",
    "positions/embedding": "- embed",
    "*/out/kernel": "heads - embed",
    "*/up/kernel": "embed mlp",
    "*/down/kernel": "mlp embed",
    "*/kernel": "embed heads -",
    "*norm*/scale": "norm",
}


@register_model(config=Sizes, dims=DIMS)
class Decoder(nnx.Module):
    """Predicts each next token."""

    def __init__(self, sizes: Sizes, *, rngs: nnx.Rngs) -> None:
        self.tokens = nnx.Embed(sizes.vocab_size, sizes.width, rngs=rngs)
        self.positions = nnx.Embed(1024, sizes.width, rngs=rngs)
        self.blocks = nnx.List([Block(sizes, rngs) for _ in range(sizes.layers)])
        self.norm = nnx.RMSNorm(sizes.width, rngs=rngs)

    def __call__(
        self, tokens: jax.Array, segment_ids: jax.Array, positions: jax.Array
    ) -> jax.Array:
        """Logits [batch, sequence, vocabulary]."""
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, attends(segment_ids))
        return self.tokens.attend(self.norm(x))
