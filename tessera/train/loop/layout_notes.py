# SPDX-License-Identifier: Apache-2.0
"""What a run's settings do that their reader would not expect."""

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

import jax

from tessera.graph.pipelining import fewer_microbatches_warning
from tessera.train.config.post_training_config import POLICY
from tessera.train.config.run_config import data_parallel_groups
from tessera.train.loop import optimizer_offload
from tessera.train.models.balance_stages import describe

if TYPE_CHECKING:
    from tessera.train.loop.build_run import Run


def layout_notes(run: "Run") -> Iterator[str]:
    """Notes on the layout and on settings that change nothing, one sentence each."""
    return chain(
        run.model.layout_notes(run.mesh),
        run.step_config.zero.notes(),
        _optimizer_notes(run),
        _pipeline_notes(run),
        _numerics_notes(run),
        _unused_notes(run),
    )


def _optimizer_notes(run: "Run") -> Iterator[str]:
    """Where the optimizer's state makes a setting change nothing."""
    config = run.step_config
    leaves = jax.tree.leaves(run.abstract_state.optimizer)
    if any(leaf.shape for leaf in leaves):
        if config.offload_optimizer:
            yield from optimizer_offload.notes(run.mesh)
        return
    reason = "changes nothing: this optimizer keeps no arrays"
    if config.zero_stage == 1:
        yield f"zero_stage 1 {reason}"
    if config.offload_optimizer:
        yield f"offload_optimizer {reason}"


def _pipeline_notes(run: "Run") -> list[str]:
    """The split of the layers and the schedule; what they waste, as a warning."""
    schedule, model, split = run.schedule, run.model, run.model.split
    if schedule is None or split is None:
        return []
    fewer_microbatches_warning(schedule)
    costs, head = model.layer_costs
    notes = [describe(split.runs, costs, last=head), schedule.summary()]
    if run.step_config.gathers_once and run.mesh.shape.get("fsdp", 1) == 1:
        notes.append("pipeline_gather step changes nothing: 'fsdp' has one device")
    return notes


def _numerics_notes(run: "Run") -> Iterator[str]:
    """What the axes do that split no batch, where the order of sums is fixed."""
    groups = run.step_config.data_axes
    others = [
        f"{axis} {size}"
        for axis, size in run.mesh.shape.items()
        if axis not in groups and size > 1
    ]
    if run.step_config.fixed_order is not None and others:
        yield (
            f"{', '.join(others)}: with deterministic numerics they split what is "
            "stored between steps; in a step their devices share the rows of the "
            "batch, with whole parameters"
        )


def _unused_notes(run: "Run") -> Iterator[str]:
    """Settings that have nothing to do in a model or on a mesh of these sizes."""
    every = run.step_config.sync_every
    rule = run.config.optimizer.scale_learning_rate
    if data_parallel_groups(run.mesh.shape) == 1:
        reason = "changes nothing: there is one data-parallel group"
        if every > 1:
            yield f"sync_gradients_every {every} {reason}"
        if rule != "none":
            yield f"scale_learning_rate {rule} {reason}"
    grpo, is_policy = run.config.grpo, run.config.training.objective == POLICY
    if is_policy and grpo.steps_of_a_rollout == 1:
        for name in ("clip_low", "clip_high"):
            if getattr(grpo, name) is not None:
                yield f"{name} changes nothing: each rollout is one step, of ratio 1"
