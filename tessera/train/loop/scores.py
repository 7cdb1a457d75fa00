# SPDX-License-Identifier: Apache-2.0
"""Numbers of the tokens of a batch, by a policy, a reference or a reward model."""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tessera.foundations.tree import Tree, named_leaves, nest
from tessera.graph.function import Function
from tessera.graph.jit import function
from tessera.mesh import Mesh
from tessera.train.config.step_config import StepConfig, batch_spec
from tessera.train.models.model import Batch, Model
from tessera.train.models.partition_rules import Placement
from tessera.train.objectives.objective import log_probs_of_targets

# From a hidden state after the blocks to a number of each token, f32 [B, S].
Head: TypeAlias = Callable[
    [Model, Tree, Array, Batch, Placement], Float[Array, "batch seq"]
]


def make_score_step(
    config: StepConfig,
    *,
    temperature: float = 1.0,
    drops_adapters: bool = False,
    head: Head | None = None,
) -> Function:
    """Compile-ready function ``(params, batch) -> log-probabilities``.

    ``batch`` is that of a step, int32 ``[accumulation, B, S]``. The result is f32 of
    the same shape and layout, in nats; 0 where there is no target.

    Args:
      config: The step.
      temperature: Divides the logits.
      drops_adapters: Whether the parameters count without their adapters.
      head: Other numbers than log-probabilities.
    """
    model = config.model

    def log_probs(
        model: Model, params: Tree, hidden: Array, batch: Batch, place: Placement
    ) -> Float[Array, "batch seq"]:
        given = model, params, hidden, batch, place, config.loss_chunk
        return log_probs_of_targets(*given, temperature)

    head = head or log_probs

    def score(params: Tree, batch: Batch) -> Float[Array, "micro batch seq"]:
        if drops_adapters:
            params = without_adapters(model, params)
        if config.fixed_order is not None:
            return _in_fixed_order(config, params, batch, head)
        mesh = config.mesh
        place = model.place(mesh)

        def of_micro(micro: Batch) -> Float[Array, "batch seq"]:
            micro = {name: place.arranged(array) for name, array in micro.items()}
            values = _values(model, params, micro, mesh, head)
            return place.restored(values, dim=1)

        return jax.lax.map(of_micro, dict(batch))

    layout = batch_spec(config)
    return function(
        score,
        mesh=config.mesh,
        in_specs={"params": config.zero.params, "batch": layout},
        out_specs=layout,
    )


def _in_fixed_order(
    config: StepConfig, params: Tree, batch: Batch, head: Head
) -> Float[Array, "micro batch seq"]:
    """The same numbers on every mesh: each part of the rows on one device."""
    assert config.fixed_order is not None
    shape, model = batch["tokens"].shape, config.model.without_stages()
    count = shape[0] * shape[1]
    numbers = jnp.arange(count, dtype=jnp.int32).reshape(*shape[:2], 1)

    def of_rows(params: Tree, rows: Batch) -> Float[Array, "rows seq"]:
        values = _values(model, params, rows, None, head)
        # Every row is in one part alone: adding zeros changes no number.
        return jnp.zeros((count, shape[2])).at[rows["number"][:, 0]].set(values)

    order = config.fixed_order.of_rows(count)
    rows = order.summed(of_rows, params, {**batch, "number": numbers})
    return rows.reshape(shape)


def _values(
    model: Model, params: Tree, batch: Batch, mesh: Mesh | None, head: Head
) -> Float[Array, "batch seq"]:
    """Those of one microbatch, whose sequences are as devices hold them."""
    params, place = model.plain(params), model.place(mesh)
    hidden = model.embed(params, batch, place)
    hidden, _ = model.run_blocks(params, hidden, batch, place)
    return head(model, params, hidden, batch, place)


def without_adapters(model: Model, params: Tree) -> Tree:
    """The parameters of the model below its adapters, which then add nothing."""
    return nest(
        {
            name: jnp.zeros_like(leaf) if name in model.adapters else leaf
            for name, leaf in named_leaves(params).items()
        }
    )
