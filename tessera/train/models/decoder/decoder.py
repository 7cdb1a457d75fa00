# SPDX-License-Identifier: Apache-2.0
"""The modules of a decoder-only transformer: one block for all layers.

The block's parameters are stacked along a leading ``layers`` dim, which ``lax.scan``
iterates over, so the program that XLA compiles has the same size for 34 layers as for
six. Local and global layers share the block: they differ in the window of the mask and
in the rotary frequencies, selected by a flag that is scanned with the parameters.

Source: Gemma 3 Technical Report, arXiv 2503.19786.
"""

from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from tessera.jax_compat.traces import manual_axes
from tessera.ops.embedding import look_up
from tessera.ops.linear_loss_chunks import LossLayout, Terms
from tessera.ops.linear_loss_vjp import fused_loss
from tessera.ops.losses import Reduction, cross_entropy
from tessera.ops.wide_gradients import with_wide_gradient
from tessera.train.models.decoder.config import DecoderConfig
from tessera.train.models.decoder.expert_mlp import Experts
from tessera.train.models.decoder.layers import (
    MLP,
    Attend,
    Attention,
    RMSNorm,
    parameter,
    soft_capped,
)
from tessera.train.models.decoder.rotary import Rotation
from tessera.train.models.partition_rules import NO_MESH, Placement

RESIDUAL = ("batch", "sequence", None)
GATHERED = ("batch", "context", None)

# The fields of ``RouterStatistics`` by name; empty without experts.
Statistics: TypeAlias = dict[str, Array]


class Block(nnx.Module):
    """Attention, then an MLP or experts; each between norms, with a residual."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        norm = {"layers": config.num_layers, "norm": config.d_model}
        self.attention = Attention(config, rngs=rngs)
        if config.num_experts:
            self.experts = Experts(config, rngs=rngs)
        else:
            self.mlp = MLP(config, rngs=rngs)
        self.has_pre_norms = config.pre_norms
        if config.pre_norms:
            self.pre_attention_norm = RMSNorm(norm, config)
            self.pre_mlp_norm = RMSNorm(norm, config)
        self.has_post_norms = config.post_norms
        if config.post_norms:
            self.post_attention_norm = RMSNorm(norm, config)
            self.post_mlp_norm = RMSNorm(norm, config)

    def __call__(
        self,
        x_BSD: Float[Array, "batch seq d_model"],
        rotation: Rotation,
        attend: Attend,
        place: Placement,
    ) -> tuple[Float[Array, "batch seq d_model"], Statistics]:
        """The residual after one layer, and its router's statistics."""
        with jax.named_scope("attention"):
            inner = self.pre_attention_norm(x_BSD) if self.has_pre_norms else x_BSD
            inner = place.constrain(inner, *GATHERED)
            inner = self.attention(inner, rotation, attend, place)
            inner = place.constrain(inner, *RESIDUAL)
            if self.has_post_norms:
                inner = self.post_attention_norm(inner)
            x_BSD = x_BSD + inner
        with jax.named_scope("mlp"):
            inner = self.pre_mlp_norm(x_BSD) if self.has_pre_norms else x_BSD
            inner = place.constrain(inner, *GATHERED)
            inner, statistics = self._transformed(inner, place)
            inner = place.constrain(inner, *RESIDUAL)
            if self.has_post_norms:
                inner = self.post_mlp_norm(inner)
            x_BSD = x_BSD + inner
        return place.constrain(x_BSD, *RESIDUAL), statistics

    def _transformed(
        self, x_BSD: Float[Array, "batch seq d_model"], place: Placement
    ) -> tuple[Float[Array, "batch seq d_model"], Statistics]:
        if hasattr(self, "experts"):
            return self.experts(x_BSD, place, GATHERED)
        return self.mlp(x_BSD, place), {}


class Decoder(nnx.Module):
    """A decoder that predicts each next token; ``DecoderModel`` scans its block.

    If ``place`` shards sequences, all methods take and return them in the order in
    which devices store them, ``place.arranged``.

    Args:
      config: Sizes.
      rngs: Its ``params`` stream draws the initial values.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        # Unit-variance inputs after the scaling by sqrt(d_model), unit-variance logits.
        init = jax.nn.initializers.normal(config.d_model**-0.5)
        table = {"vocab": config.vocab_size, "table": config.d_model}
        self.embedding = parameter(init, rngs.params(), table)
        if not config.tied_head:
            self.head = parameter(init, rngs.params(), table)
        self.decoder = Block(config, rngs=rngs)
        self.final_norm = RMSNorm({"norm": config.d_model}, config)

    def embed(
        self, tokens: Int[Array, "batch seq"], *, place: Placement = NO_MESH
    ) -> Float[Array, "batch seq d_model"]:
        """The residual before the first block.

        A token outside the table gives NaN instead of another token's row.
        """
        with jax.named_scope("embedding"):
            rows_of = partial(_rows_of, place)
            x_BSD = with_wide_gradient(
                partial(rows_of, narrow=True), rows_of, self.embedding[...], tokens
            )
            if self.config.scale_embedding:
                x_BSD = x_BSD * self.config.d_model**0.5
            return place.constrain(x_BSD, *RESIDUAL)

    def logits(
        self,
        x_BSD: Float[Array, "batch seq d_model"],
        *,
        place: Placement = NO_MESH,
    ) -> Float[Array, "batch seq vocab"]:
        """Logits of every token, float32, from the residual after the last block."""
        logits, words = self._padded_logits(x_BSD, place), self.config.vocab_size
        if logits.shape[-1] == words:
            return logits
        return place.constrain(logits[..., :words], "batch", "context", "vocab")

    def _padded_logits(self, x_BSD: Array, place: Placement) -> Array:
        """Logits of all rows of the padded head; those of padding are -inf."""
        hidden = self._normalized(x_BSD, place)
        with jax.named_scope("logits"):
            head = padded_table(place.cast(self._head, "vocab", "table"), place)
            scores = jnp.einsum(
                "bsd,vd->bsv", hidden, head, preferred_element_type=jnp.float32
            )
            scores = soft_capped(scores, self.config.logit_soft_cap)
            scores = place.constrain(scores, "batch", "context", "words")
            words = self.config.vocab_size
            if scores.shape[-1] == words:
                return scores
            index = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 2)
            return jnp.where(index < words, scores, -jnp.inf)

    def loss(
        self,
        x_BSD: Float[Array, "batch seq d_model"],
        targets: Int[Array, "batch seq"],
        *,
        chunk: int | str = "auto",
        place: Placement = NO_MESH,
        reduction: Reduction = "sum",
        temperature: float = 1.0,
    ) -> Float[Array, "*batch_seq"]:
        """Cross-entropy of the logits in nats.

        Args:
          x_BSD: The residual after the last block.
          targets: The token after each one, or ``IGNORE_INDEX``.
          chunk: Number of tokens whose logits a device computes at a time; ``auto`` as
            in ``op.fused_linear_cross_entropy``, ``none`` computes all at once.
          place: The mesh and layout of the model.
          reduction: ``sum`` over the targets, or ``none``: ``[B, S]``.
          temperature: Divides the logits.
        """
        if chunk == "none":
            logits = self._padded_logits(x_BSD, place)
            if temperature != 1.0:
                logits /= temperature
            return cross_entropy(logits, targets, reduction=reduction)
        hidden = self._normalized(x_BSD, place)
        if temperature != 1.0:
            hidden /= temperature
        split, head = None, padded_table(self._head, place)
        if place.mesh is not None:
            tokens = place.resolve(GATHERED[:2], targets.shape, "targets")
            stored = place.resolve(("words", "columns"), head.shape, "head")
            # A narrow head has been cast before, to be reduced in that dtype.
            sums = head.dtype.name
            split = LossLayout(place.mesh, tokens, place.axes("words"), stored, sums)
        words, cap = self.config.vocab_size, self.config.logit_soft_cap
        if cap is not None:  # c tanh(x / c) / t is c/t tanh((x / t) / (c / t))
            cap /= temperature
        with jax.named_scope("logits"):
            return fused_loss(
                Terms(soft_cap=cap, words=words),
                head,
                hidden,
                targets,
                split,
                reduction,
                None if chunk == "auto" else int(chunk),
            )

    def _normalized(self, x_BSD: Array, place: Placement) -> Array:
        return place.constrain(self.final_norm(x_BSD), *GATHERED)

    @property
    def _head(self) -> Float[Array, "vocab d_model"]:
        """The weights of the logits: the embedding table, if they are tied."""
        return (self.embedding if self.config.tied_head else self.head)[...]


def _rows_of(
    place: Placement, table: Array, tokens: Array, *, narrow: bool = False
) -> Array:
    """The rows of the embedding table, as they are stored or in a narrower dtype."""
    if narrow:
        table = place.cast(table, "vocab", "table")
    split, words = place.resolve(GATHERED[:2], tokens.shape, "tokens"), len(table)
    rows, columns, mesh = place.axes("words"), place.axes("columns"), place.mesh
    if place.vmapped_axes - set(manual_axes()):
        # JAX has no regions inside of a vmap over axes of their mesh (JAX 0.10.2).
        table, columns, mesh = place.constrain(table, "vocab", None), (), None
    elif len(padded := padded_table(table, place)) > words:
        # A row of padding is none of the table.
        table, tokens = padded, jnp.where(tokens < words, tokens, len(padded))
    return look_up(table, tokens, mesh=mesh, rows=rows, columns=columns, split=split)


def padded_table(table: Array, place: Placement) -> Array:
    """A table ``[V, D]`` with rows of zeros, as many as the devices of ``tp`` share.

    It is stored without them: they have no optimizer state, no gradient reaches them,
    and checkpoints and exports know nothing of the mesh. Devices exchange their columns
    for rows. Megatron and MaxText store the padding.
    """
    padding = -len(table) % place.size("words")
    if not padding:
        return table
    with jax.named_scope("pad_vocabulary"):
        # The layout on both sides says which exchange follows, and its transpose.
        table = place.constrain(table, "vocab", "table")
        table = jnp.pad(table, ((0, padding), (0, 0)))
        table = place.constrain(table, "vocab", "table")
        return place.constrain(table, "words", "columns")


def default_positions(
    length: int, segment_ids: Int[Array, "batch seq"] | None
) -> Int[Array, "#batch seq"]:
    """0, 1, 2, ... from the start of each segment."""
    index = jnp.arange(length, dtype=jnp.int32)[None]
    if segment_ids is None:
        return index
    begins = segment_ids[:, 1:] != segment_ids[:, :-1]
    begins = jnp.pad(begins, ((0, 0), (1, 0)), constant_values=True)
    return index - jax.lax.cummax(jnp.where(begins, index, 0), axis=1)
