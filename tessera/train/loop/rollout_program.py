# SPDX-License-Identifier: Apache-2.0
"""The program that samples tokens for a policy, compiled without arrays."""

from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from tessera.foundations.tree import Tree
from tessera.graph.compile_stages import Compiled
from tessera.graph.jit import function
from tessera.train.config.post_training_config import POLICY
from tessera.train.loop.build_run import Run
from tessera.train.rollouts.dispatch_inputs import inputs_of_rows
from tessera.train.rollouts.draws import Draws
from tessera.train.rollouts.programs import decode
from tessera.train.rollouts.sampler import Sampler


def compiled_rollout(run: Run) -> Compiled | None:
    """A dispatch of some tokens of each row; None where the run's sampler has none."""
    grpo, length = run.config.grpo, run.config.training.sequence_length
    if run.config.training.objective != POLICY or grpo.server is not None:
        return None
    more = 0 if grpo.environment is None else grpo.max_completion
    most, slots = grpo.max_completion, grpo.slots
    sizes: dict[str, Any] = {"num_tokens": most, "max_length": length + 1 + more}
    sampler = Sampler(run.model, run.mesh, slots=slots, **sizes)
    decoding, steps = sampler._decoding, sampler.dispatch_tokens
    place, parts, key = decoding.place, sampler._new_parts([]), jax.random.key(0)
    keys = np.asarray(jax.random.key_data(key))[None]
    width = -(-sampler.max_length // sampler.block)
    kinds, block = len(decoding.windows), sampler.block
    inputs = inputs_of_rows(parts, keys, kinds, width, block, steps)
    draws = Draws(grpo.temperature, None, None, str(jax.random.key_impl(key)))

    def new_cache(params: Tree) -> Any:
        return decoding.new_cache(params, len(parts), sampler._pools, block)

    def rollout(params: Tree, cache: Any, pages: Any, slots: Any, stops: Any) -> Any:
        return decode(decoding, steps, params, cache, pages, slots, draws, stops)

    params = run.abstract_state.params
    cache = jax.eval_shape(new_cache, params)
    # As the cache constrains itself: whole where tp does not divide its heads.
    batch, heads = place.axes("batch") or None, place.axes("heads") or None
    is_split = cache[0][0].shape[2] % place.size("heads") == 0
    layout = PartitionSpec(batch, None, heads if is_split else None)
    program = function(
        rollout,
        mesh=run.mesh,
        in_specs={"params": run.step_config.zero.params, "cache": layout},
        out_specs=(layout, PartitionSpec(), PartitionSpec()),
        donate=("cache",),
    )
    return program.compile(params, cache, *inputs, np.zeros(1, np.int32))
