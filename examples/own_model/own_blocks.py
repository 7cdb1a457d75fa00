# SPDX-License-Identifier: Apache-2.0
"""The decoder of ``own_decoder``, with its repeated block: scan, remat and pipelines.

tessera train model=own_blocks:BlockDecoder training.remat=full
"""

import jax
from own_decoder import DIMS, Block, Decoder, Sizes, attends

from tessera.train.models import register_model


@register_model(config=Sizes, dims=DIMS, blocks="blocks")
class BlockDecoder(Decoder):
    """The same parameters and logits; ``blocks`` is the list of blocks."""

    def embed(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """The residual before the first block, [batch, sequence, width]."""
        return self.tokens(tokens) + self.positions(positions)

    def block(self, block: Block, x: jax.Array, segment_ids: jax.Array) -> jax.Array:
        """The residual after a block."""
        return block(x, attends(segment_ids))

    def head(self, x: jax.Array) -> jax.Array:
        """Logits [batch, sequence, vocabulary]."""
        return self.tokens.attend(self.norm(x))
