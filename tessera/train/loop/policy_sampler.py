# SPDX-License-Identifier: Apache-2.0
"""What samples for a policy, and its program compiled without arrays."""

from collections.abc import Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import PartitionSpec

from tessera.foundations.tree import Tree
from tessera.graph.compile_stages import Compiled
from tessera.graph.jit import function
from tessera.mesh import Mesh
from tessera.train.config.post_training_config import POLICY
from tessera.train.loop.build_run import Run
from tessera.train.rollouts.dispatch_inputs import inputs_of_rows
from tessera.train.rollouts.draws import Draws
from tessera.train.rollouts.programs import FixedParts
from tessera.train.rollouts.sampler import Sampler

# Tokens of rows whose cache has small blocks.
_SHORT: Final = 256


def policy_sampler(run: Run, stop_tokens: Sequence[int] = ()) -> Sampler:
    """What samples the completions of a run.

    Args:
      run: The run of a policy.
      stop_tokens: Each of them ends a completion.
    """
    grpo, training = run.config.grpo, run.config.training
    # Of several turns, the later ones follow the earlier.
    more = 0 if grpo.environment is None else grpo.max_completion
    length = training.sequence_length + 1 + more
    is_fixed = training.numerics == "deterministic"
    return Sampler(
        run.model,
        sampling_mesh(run),
        num_tokens=grpo.max_completion,
        max_length=length,
        slots=min(grpo.slots, run.rows_per_step * grpo.steps_per_rollout),
        block=32 if length > _SHORT else 8,
        dispatch_tokens=min(32, grpo.max_completion),
        temperature=grpo.temperature,
        stop_tokens=stop_tokens,
        parts=training.reduction_parts if is_fixed else None,
    )


def sampling_mesh(run: Run) -> Mesh:
    """The mesh of the run, or another over its devices."""
    shape, mesh = run.config.grpo.mesh_shape, run.mesh
    if shape is None:
        return mesh
    sizes, axes = shape
    if mesh.target is not None:
        return Mesh(axes, shape=tuple(sizes), target=mesh.target)
    devices = mesh.jax.devices.reshape(sizes)
    return Mesh.of(jax.sharding.Mesh(devices, tuple(axes)))


def compiled_rollout(run: Run) -> Compiled | None:
    """A dispatch of some tokens of each row; None where the run's sampler has none."""
    grpo = run.config.grpo
    if run.config.training.objective != POLICY or grpo.server is not None:
        return None
    sampler = policy_sampler(run)
    decoding, steps = sampler._decoding, sampler.dispatch_tokens
    _, draw = sampler._programs
    place, parts, key = decoding.place, sampler._new_parts([]), jax.random.key(0)
    keys = np.asarray(jax.random.key_data(key))[None]
    width = -(-sampler.max_length // sampler.block)
    kinds, block = len(decoding.windows), sampler.block
    inputs = inputs_of_rows(parts, keys, kinds, width, block, steps)
    draws = Draws(grpo.temperature, None, None, str(jax.random.key_impl(key)))

    def new_cache(params: Tree) -> Any:
        return decoding.new_cache(params, len(parts), sampler._pools, block)

    def rollout(params: Tree, cache: Any, pages: Any, slots: Any, stops: Any) -> Any:
        return draw(params, cache, pages, slots, draws, stops)

    mesh, params, stored = (
        run.mesh,
        run.abstract_state.params,
        run.step_config.zero.params,
    )
    if sampling_mesh(run) is not mesh:
        mesh, params = sampling_mesh(run), run.model.abstract()
        stored = run.model.layouts(mesh)
    cache = jax.eval_shape(new_cache, params)
    # As the cache constrains itself: whole where tp does not divide its heads.
    batch, heads = place.axes("batch") or None, place.axes("heads") or None
    is_split = cache[0][0].shape[2] % place.size("heads") == 0
    layout = PartitionSpec(batch, None, heads if is_split else None)
    if sampler.parts is not None:
        layout = FixedParts(run.model, mesh, sampler.parts).layout
    program = function(
        rollout,
        mesh=mesh,
        in_specs={"params": stored, "cache": layout},
        out_specs=(layout, PartitionSpec(), PartitionSpec()),
        donate=("cache",),
    )
    return program.compile(params, cache, *inputs, np.zeros(1, np.int32))
