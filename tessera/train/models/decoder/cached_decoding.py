# SPDX-License-Identifier: Apache-2.0
"""A decoder with keys and values in a paged cache.

Layers are unrolled, and a program copies the weights of each before its first token:
in the dtype of computation, and gathered along ``fsdp``. A scan would copy each layer's
slice of the stacked weights, or gather it, at every token.

Shape suffixes as in ``paged_cache.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from tessera.foundations.tree import Tree
from tessera.mesh import Mesh
from tessera.tracing import scope
from tessera.train.models.decoder.decoder_model import DecoderModel
from tessera.train.models.decoder.layers import Attend
from tessera.train.models.decoder.rotary import rotation
from tessera.train.models.decoding import Cache, Decoding, Logits, NewTokens
from tessera.train.models.paged_cache import (
    ITEMS,
    Chunks,
    Pages,
    chunks_of,
    copied,
    paged_attention,
)
from tessera.train.models.parameter_tree import DimNames

# Dims that the copies of weights have whole: those that fsdp shards.
_GATHERED = frozenset({"embed", "table", "columns", "wide_table"})
# Parameters that layers cast to the dtype of activations; they read the others in f32.
_CAST = frozenset(
    {"kernel", "embedding", "head", "bias", "lora_a", "lora_b", "gate", "up", "down"}
)


@dataclass(frozen=True)
class CachedDecoding(Decoding):
    """The functions of a decoder that are compiled to generate text.

    Attributes:
      model: As it is stored.
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
        plain = DecoderModel(model.config, dtype=model.dtype, split=model.split)
        place = plain.place(mesh)
        place = replace(place, whole=place.whole | {"context"} | _GATHERED)
        return cls(plain, dtype, place=place)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """See ``Decoding``."""
        kinds = {self._window(i): None for i in range(self.model.config.num_layers)}
        return tuple(kinds)

    @property
    def kinds(self) -> tuple[int, ...]:
        """See ``Decoding``."""
        layers = range(self.model.config.num_layers)
        return tuple(self.windows.index(self._window(layer)) for layer in layers)

    def check_length(self, length: int) -> None:
        """See ``Decoding``."""
        self.model.config.check_length(length)

    def weights(self, params: Tree) -> tuple[list[Tree], Tree]:
        """The parameters of each layer, and those outside of the layers."""
        model = self.model
        stacked, shared = model.divide(model.plain(params))
        layer_names, shared_names = model.divide(model.plain_dim_names())

        def of_layer(
            layer: int | None, path: Any, array: Array, names: DimNames
        ) -> Array:
            if layer is not None:
                array, names = array[layer], names[1:]
            if self.place.dtype is not None and path[-1].key in _CAST:
                array = array.astype(self.place.dtype)
            return self.place.constrain(array, *names)

        copy = jax.tree_util.tree_map_with_path
        layers = [
            copy(partial(of_layer, number), stacked, layer_names)
            for number in range(model.config.num_layers)
        ]
        return layers, copy(partial(of_layer, None), shared, shared_names)

    def new_cache(
        self, params: Tree, parts: int, blocks: Sequence[int], block: int
    ) -> Cache:
        """See ``Decoding``."""
        config = self.model.config
        dtype = self.dtype or self.place.dtype or params["embedding"].dtype
        heads = max(config.num_kv_heads, self.place.size("heads"))

        def pool(kind: int) -> Array:
            shape = parts, blocks[kind], heads, block, config.head_dim
            return self._constrained(jnp.zeros(shape, dtype))

        return [(pool(kind), pool(kind)) for kind in self.kinds]

    def new_tokens(self, cache: Cache, slots: int, count: int) -> NewTokens:
        """See ``Decoding``. Keys are transposed: on CPUs that takes a third."""
        return _keys_transposed(super().new_tokens(cache, slots, count))

    def stored(self, cache: Cache, new: NewTokens, pages: Pages) -> Cache:
        """See ``Decoding``."""
        return super().stored(cache, _keys_transposed(new), pages)

    def reads(self, cache: Cache, pages: Pages, *, once: bool) -> list[Chunks]:
        """The chunks that each layer reads.

        On CPUs, reading those of many rows from the pool takes as long as all else of a
        token. On accelerators the memory of copies is scarce.
        """
        chunks = [chunks_of(pages, k, w) for k, w in enumerate(self.windows)]
        mesh = self.place.mesh
        device = scope.device() if mesh is None else mesh.compile_mesh.devices.flat[0]
        own = [chunks[kind] for kind in self.kinds]
        is_quick = once or pages.starts.shape[1] < ITEMS
        if is_quick or device.platform != "cpu":
            return own
        return [copied(each, pool) for each, pool in zip(own, cache, strict=True)]

    def extend(
        self,
        weights: tuple[list[Tree], Tree],
        cache: Cache,
        new: NewTokens,
        tokens: Int[Array, "parts slots more"],
        index: Int[Array, ""],
        pages: Pages,
        reads: Any,
    ) -> tuple[Logits, NewTokens]:
        """See ``Decoding``."""
        config, (layers, shared) = self.model.config, weights
        parts, slots, count = tokens.shape
        positions = pages.starts[..., None] + index + jnp.arange(count)
        positions = positions.reshape(-1, count)
        modules = [self.model.merge(self.model.join(each, shared)) for each in layers]
        x_BSD = modules[0].embed(tokens.reshape(-1, count), place=self.place)
        added = NewTokens()

        def attention(layer: int) -> Attend:
            def attend(q: Array, k: Array, v: Array, *sinks_H: Array) -> Array:
                k_XGKF, v_XGFK = new[layer]
                k_XGKS, v_XGSK = jnp.moveaxis(k, 1, -1), jnp.swapaxes(v, 1, 2)
                buffers = (
                    self._put(k_XGKF, k_XGKS, (0, 0, 0, index)),
                    self._put(v_XGFK, v_XGSK, (0, 0, index, 0)),
                )
                added.append(buffers)
                out = paged_attention(
                    q.reshape(parts, slots, *q.shape[1:]),
                    cache[layer],
                    buffers,
                    reads[layer],
                    index,
                    window=self._window(layer),
                    soft_cap=config.attention_soft_cap,
                    sinks_H=sinks_H[0] if sinks_H else None,
                )
                return out.reshape(q.shape)

            return attend

        for number, module in enumerate(modules):
            turn = rotation(config, positions, jnp.asarray(config.is_global(number)))
            x_BSD, _ = module.decoder(x_BSD, turn, attention(number), self.place)
        logits = modules[0].logits(x_BSD[:, -1:], place=self.place)
        return logits.reshape(parts, slots, -1), added

    def _put(self, buffer: Array, x: Array, start: tuple[Any, ...]) -> Array:
        """A buffer of new tokens with some more."""
        x = x.astype(buffer.dtype)
        return self._constrained(jax.lax.dynamic_update_slice(buffer, x, start))

    def _window(self, layer: int) -> int | None:
        config = self.model.config
        return None if config.is_global(layer) else config.window

    def _constrained(self, x: Array) -> Array:
        # With fewer key/value heads than tp, attention repeats them for its devices.
        is_repeated = self.place.size("heads") > self.model.config.num_kv_heads
        name = "heads" if is_repeated else "kv_heads"
        others = (None,) * (x.ndim - 4)
        return self.place.constrain(x, "batch", *others, name, None, None)


def _keys_transposed(new: NewTokens) -> NewTokens:
    """New tokens with the last two dims of keys exchanged."""
    return [(jnp.swapaxes(keys, -1, -2), values) for keys, values in new]
