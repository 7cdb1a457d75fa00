# SPDX-License-Identifier: Apache-2.0
"""A decoder with a cache of keys and values: a prefill, then one token at a time.

The prompts of a batch are padded on the left, so that all rows write to the same slot.
A layer's cache is a ring buffer: slot ``s`` is stored at ``s % T``. A local layer keeps
its window; a global layer keeps all slots, and its ring never wraps.

Layers are unrolled and each has weights of its own: a scan would copy each layer's
slice of the stacked weights at every token.

Shape suffixes as in ``layers.py``; a cache is ``[B, G, T, K]``, as its matmuls read it.
"""

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tessera.foundations.tree import Tree
from tessera.mesh import Mesh
from tessera.train.models.decoder.attention_inputs import layer_attention
from tessera.train.models.decoder.decoder import Decoder
from tessera.train.models.decoder.decoder_model import DecoderModel
from tessera.train.models.decoder.layers import Attend, soft_capped
from tessera.train.models.decoder.rotary import rotation
from tessera.train.models.decoding import Decoding, Logits, Pads

# The keys and values of each layer.
Cache: TypeAlias = list[tuple[Array, Array]]


@dataclass(frozen=True)
class CachedDecoding(Decoding):
    """The functions of a decoder that are compiled to generate text.

    Attributes:
      model: Without pipeline stages.
      dtype: Dtype of the cache; None is that of the keys.
    """

    model: DecoderModel
    dtype: Any = None

    @classmethod
    def of(cls, model: DecoderModel, mesh: Mesh | None, dtype: Any) -> "CachedDecoding":
        """Those of a model as it is trained, whatever its stages and sequence axes.

        Raises:
          HeadCountError: [T402] the heads cannot be divided over ``tp``.
        """
        plain = DecoderModel(model.config)
        place = plain.place(mesh)
        place = replace(place, whole=place.whole | {"context"})
        return cls(plain, dtype, place=place)

    def unstack(self, params: Tree) -> tuple[list[Tree], Tree]:
        """The parameters of each layer, and those outside of the layers.

        Args:
          params: As from ``init`` of the model without stages.
        """
        names, _ = self.model.divide(self.model.dim_names())
        stacked, shared = self.model.divide(params)

        def layer(number: int) -> Tree:
            def leaf(array: Array, names: tuple[str | None, ...]) -> Array:
                return self.place.constrain(array[number], *names[1:])

            return jax.tree.map(leaf, stacked, names)

        return [layer(i) for i in range(self.model.config.num_layers)], shared

    def prefill(
        self,
        weights: tuple[list[Tree], Tree],
        tokens: Int[Array, "batch seq"],
        pads: Pads,
        length: int,
    ) -> tuple[Logits, Cache]:
        """See ``Decoding``; ``length`` is the slots of the global layers' caches."""
        slots = jnp.arange(tokens.shape[1])
        segment_ids = None
        if pads is not None:  # padding attends to padding alone
            segment_ids = (slots >= pads[:, None]).astype(jnp.int32)
        config, cache = self.model.config, Cache()
        config.check_length(max(length, tokens.shape[1]))
        select = layer_attention(config, tokens.shape[1], segment_ids, self.place)

        def attention(number: int) -> Attend:
            attend = select(jnp.asarray(config.is_global(number)))

            def attend_and_store(q: Array, k: Array, v: Array, *sinks: Array) -> Array:
                size = self._size(number, length)
                cache.append((self._filled(k, size), self._filled(v, size)))
                return attend(q, k, v, *sinks)

            return attend_and_store

        positions = _positions(slots[None], pads)
        return self._run(weights, tokens, positions, attention), cache

    def step(
        self,
        weights: tuple[list[Tree], Tree],
        cache: Cache,
        tokens: Int[Array, " batch"],
        slot: Int[Array, ""],
        pads: Pads,
    ) -> tuple[Logits, Cache]:
        """See ``Decoding``."""
        new = Cache()

        def attention(number: int) -> Attend:
            def attend(
                q_BSHK: Array, k_BSGK: Array, v_BSGK: Array, *sinks: Array
            ) -> Array:
                stored = zip(cache[number], (k_BSGK, v_BSGK), strict=True)
                k_BGTK, v_BGTK = (self._stored(old, x, slot) for old, x in stored)
                new.append((k_BGTK, v_BGTK))
                cap = self.model.config.attention_soft_cap
                return _attend(q_BSHK, k_BGTK, v_BGTK, slot, pads, cap, *sinks)

            return attend

        positions = _positions(slot[None, None], pads)
        return self._run(weights, tokens[:, None], positions, attention), new

    def _run(
        self,
        weights: tuple[list[Tree], Tree],
        tokens: Int[Array, "batch seq"],
        positions: Int[Array, "#batch seq"],
        attention: Any,
    ) -> Logits:
        """The logits after the last token of each row."""
        layers, shared = weights
        modules = [self._module(shared, layer) for layer in layers]
        x_BSD = modules[0].embed(tokens, place=self.place)
        for number, module in enumerate(modules):
            is_global = jnp.asarray(self.model.config.is_global(number))
            turn = rotation(self.model.config, positions, is_global)
            x_BSD, _ = module.decoder(x_BSD, turn, attention(number), self.place)
        return modules[0].logits(x_BSD[:, -1:], place=self.place)[:, 0]

    def _module(self, shared: Tree, layer: Tree) -> Decoder:
        """The nnx module whose block has the parameters of one layer."""
        return self.model.merge(self.model.join(layer, shared))

    def _size(self, layer: int, length: int) -> int:
        """Slots that a layer keeps."""
        config = self.model.config
        window = None if config.is_global(layer) else config.window
        return length if window is None else min(window, length)

    def _filled(self, x_BSGK: Array, size: int) -> Array:
        """The cache of one layer after the prompts: their last ``size`` slots."""
        x_BGSK = jnp.swapaxes(x_BSGK, 1, 2)
        slots = x_BGSK.shape[2]
        if slots < size:
            x_BGTK = jnp.pad(x_BGSK, ((0, 0), (0, 0), (0, size - slots), (0, 0)))
        else:
            x_BGTK = jnp.roll(x_BGSK[:, :, slots - size :], slots % size, axis=2)
        return self._constrained(x_BGTK.astype(self.dtype or x_BGTK.dtype))

    def _stored(self, cache: Array, x_BSGK: Array, slot: Int[Array, ""]) -> Array:
        """The cache with one more slot, in place of the oldest if it is full."""
        x_BGSK = jnp.swapaxes(x_BSGK, 1, 2).astype(cache.dtype)
        index = (0, 0, slot % cache.shape[2], 0)
        return self._constrained(jax.lax.dynamic_update_slice(cache, x_BGSK, index))

    def _constrained(self, x_BGTK: Array) -> Array:
        # With fewer key/value heads than tp, attention repeats them for its devices.
        is_repeated = self.place.size("heads") > self.model.config.num_kv_heads
        heads = "heads" if is_repeated else "kv_heads"
        return self.place.constrain(x_BGTK, "batch", heads, None, None)


def _positions(slots: Int[Array, "1 seq"], pads: Pads) -> Int[Array, "#batch seq"]:
    """Positions from the first token of each prompt; 0 in padding."""
    return slots if pads is None else jnp.maximum(slots - pads[:, None], 0)


def _attend(
    q_BSHK: Float[Array, "batch 1 heads head_dim"],
    k_BGTK: Float[Array, "batch kv_heads slots head_dim"],
    v_BGTK: Float[Array, "batch kv_heads slots head_dim"],
    slot: Int[Array, ""],
    pads: Pads,
    soft_cap: float | None,
    sinks_H: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch 1 heads head_dim"]:
    """Attention of the query at ``slot`` to the slots of a ring buffer."""
    batch, _, heads, width = q_BSHK.shape
    kv_heads, size = k_BGTK.shape[1:3]
    # The newest slot, up to that of the query, at each index of the ring.
    slots = slot - (slot - jnp.arange(size)) % size
    first = 0 if pads is None else pads[:, None, None, None]
    q = q_BSHK.reshape(batch, kv_heads, heads // kv_heads, width)
    scores = jnp.einsum(
        "bghk,bgtk->bght", q, k_BGTK, preferred_element_type=jnp.float32
    )
    scores = soft_capped(scores, soft_cap)
    scores = jnp.where(slots >= first, scores, -jnp.inf)
    if sinks_H is not None:
        sinks = sinks_H.astype(scores.dtype).reshape(1, kv_heads, -1, 1)
        sinks = jnp.broadcast_to(sinks, (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, sinks], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :size]
    out = jnp.einsum("bght,bgtk->bghk", weights.astype(v_BGTK.dtype), v_BGTK)
    return out.reshape(q_BSHK.shape).astype(q_BSHK.dtype)
