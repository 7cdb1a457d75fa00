# SPDX-License-Identifier: Apache-2.0
"""The compiled programs of a sampler: an empty cache, prompts, and some tokens.

Each takes the parameters as they are trained, and the cache, which it updates in place.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from tessera.foundations.tree import Tree
from tessera.jax_compat.workarounds import CorrectJit
from tessera.mesh import Mesh
from tessera.ops.operand_layouts import gathered, region_mesh
from tessera.tracing.scope import constrain
from tessera.train.loop.deterministic_sums import optimization_barrier
from tessera.train.models.decoding import Cache, Decoding
from tessera.train.models.model import Model
from tessera.train.models.paged_cache import Pages
from tessera.train.rollouts.draws import Draws

NO_TOKEN = -1


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("tokens", "counts", "limits", "keys"),
    meta_fields=(),
)
@dataclass(frozen=True)
class Slots:
    """What a dispatch knows of the row in each slot, beside its pages.

    Attributes:
      tokens: The last token of each row.
      counts: How many tokens it has drawn.
      limits: How many more may be drawn now; 0 in an empty slot.
      keys: The data of its key, uint32 ``[P, N, ...]``.
    """

    tokens: Int[Array, "parts slots"]
    counts: Int[Array, "parts slots"]
    limits: Int[Array, "parts slots"]
    keys: Array


@partial(CorrectJit, static_argnums=(0, 2, 3, 4))
def empty_cache(
    decoding: Decoding, params: Tree, parts: int, blocks: tuple[int, ...], block: int
) -> Cache:
    """See ``Decoding.new_cache``."""
    return decoding.new_cache(params, parts, blocks, block)


def _fill(
    decoding: Decoding,
    params: Tree,
    cache: Cache,
    pages: Pages,
    tokens: Int[Array, "parts slots chunk"],
) -> Cache:
    """The cache with one chunk of each row."""
    weights = decoding.weights(params)
    new = decoding.new_tokens(cache, *tokens.shape[1:])
    reads = decoding.reads(cache, pages, once=True)
    start = jnp.int32(0)
    _, new = decoding.extend(weights, cache, new, tokens, start, pages, reads)
    return decoding.stored(cache, new, pages)


def _decode(
    decoding: Decoding,
    steps: int,
    params: Tree,
    cache: Cache,
    pages: Pages,
    slots: Slots,
    draws: Draws,
    stop_tokens: Int[Array, " stops"],
) -> tuple[Cache, Int[Array, "parts steps slots"], Float[Array, "parts steps slots"]]:
    """Some tokens of each row, up to a stop token, and their log-probabilities.

    Returns:
      The cache with what was read of them, the tokens, ``NO_TOKEN`` where none was
      drawn, and the log-probabilities.
    """
    weights = decoding.weights(params)
    reads = decoding.reads(cache, pages, once=False)
    shape = slots.tokens.shape
    new = decoding.new_tokens(cache, shape[1], steps)

    def is_any_running(state: Any) -> Bool[Array, ""]:
        index, _, is_running, *_ = state
        return (index < steps) & is_running.any()

    def step(state: Any) -> Any:
        index, tokens, is_running, new, made, log_probs = state
        logits, new = decoding.extend(
            weights, cache, new, tokens[..., None], index, pages, reads
        )
        drawn = draws.draw(
            logits.reshape(-1, logits.shape[-1]),
            slots.keys.reshape(shape[0] * shape[1], -1),
            (slots.counts + index).reshape(-1),
        )
        # On every device and in every process, which read them.
        tokens, chosen = (
            decoding.place.constrain(x.reshape(shape), None, None) for x in drawn
        )
        made = made.at[:, index].set(jnp.where(is_running, tokens, NO_TOKEN))
        log_probs = log_probs.at[:, index].set(jnp.where(is_running, chosen, 0.0))
        is_stop = (tokens[..., None] == stop_tokens).any(axis=-1)
        is_running = is_running & ~is_stop & (index + 1 < slots.limits)
        return index + 1, tokens, is_running, new, made, log_probs

    # Parts first, as those of all arrays.
    made = jnp.full((shape[0], steps, shape[1]), NO_TOKEN, jnp.int32)
    log_probs = jnp.zeros(made.shape, jnp.float32)
    state = jnp.int32(0), slots.tokens, slots.limits > 0, new, made, log_probs
    *_, new, made, log_probs = jax.lax.while_loop(is_any_running, step, state)
    return decoding.stored(cache, new, pages), made, log_probs


fill = CorrectJit(_fill, static_argnums=0, donate_argnums=2)
decode = CorrectJit(_decode, static_argnums=(0, 1), donate_argnums=3)


@dataclass(frozen=True)
class FixedParts:
    """The same programs with bits that no mesh changes.

    The devices of all axes share the parts. Each computes its own one after the other,
    by itself and with gathered parameters, as a deterministic training step does:
    docs/contributing/decisions/0050-deterministic-steps-by-rows.md says why.

    Attributes:
      model: The model of the parameters.
      mesh: Where to run; None is one device.
      count: How many parts there are, on every mesh.
    """

    model: Model
    mesh: Mesh | None
    count: int

    @property
    def layout(self) -> PartitionSpec:
        """Of arrays ``[parts, ...]``: over the axes whose devices share the parts."""
        axes = list[str]()
        if self.mesh is None:
            return PartitionSpec()
        for axis in self.mesh.axes:
            if self.count % self.mesh.axis_size([*axes, axis]) == 0:
                axes.append(axis)
        return PartitionSpec(tuple(axes) or None)

    def run(
        self, function: Callable[..., Tree], params: Tree, of_parts: Tree, *rest: Tree
    ) -> Tree:
        """``function(params, *of_parts, *rest)`` for one part at a time.

        Args:
          function: Gives a tree of arrays ``[1, ...]``, as it takes ``of_parts``.
          params: As they are stored.
          of_parts: Trees of arrays ``[parts, ...]``.
          *rest: Trees that all parts read.
        """

        def of_device(params: Tree, of_parts: Tree, rest: Tree) -> Tree:
            if self.mesh is not None:
                params = jax.tree.map(gathered, params, self.model.layouts(self.mesh))

            def of_part(own: Tree) -> Tree:
                own = jax.tree.map(partial(jnp.expand_dims, axis=0), own)
                made = optimization_barrier(function, params, *own, *rest)
                return jax.tree.map(partial(jnp.squeeze, axis=0), made)

            return jax.lax.map(of_part, of_parts)

        if self.mesh is None:
            return of_device(params, of_parts, rest)
        parts = self.layout
        return jax.shard_map(
            of_device,
            mesh=region_mesh(self.mesh),
            in_specs=(self.model.layouts(self.mesh), parts, PartitionSpec()),
            out_specs=parts,
            # JAX cannot know that devices of the other axes compute the same.
            check_vma=False,
        )(params, of_parts, rest)


@partial(CorrectJit, rounds_alike=True, static_argnums=(0, 1), donate_argnums=3)
def fill_parts(
    fixed: FixedParts,
    decoding: Decoding,
    params: Tree,
    cache: Cache,
    pages: Pages,
    tokens: Int[Array, "parts slots chunk"],
) -> Cache:
    """``fill`` of fixed parts."""
    return fixed.run(partial(_fill, decoding), params, (cache, pages, tokens))


@partial(CorrectJit, rounds_alike=True, static_argnums=(0, 1, 2), donate_argnums=4)
def decode_parts(
    fixed: FixedParts,
    decoding: Decoding,
    steps: int,
    params: Tree,
    cache: Cache,
    pages: Pages,
    slots: Slots,
    *rest: Any,
) -> tuple[Cache, Int[Array, "parts steps slots"], Float[Array, "parts steps slots"]]:
    """``decode`` of fixed parts."""
    function = partial(_decode, decoding, steps)
    cache, *made = fixed.run(function, params, (cache, pages, slots), *rest)
    if fixed.mesh is not None:  # every process reads them
        made = [constrain(x, fixed.mesh, PartitionSpec()) for x in made]
    return cache, *made
