# SPDX-License-Identifier: Apache-2.0
"""One loop that runs any legal schedule, forward and backward, as one SPMD program.

A ``jax.shard_map`` that is manual over the pipeline's mesh axis and leaves the others
to the compiler; in it one ``lax.scan`` over the ticks of the table. In a tick a device
does what its cell says, each behind a ``lax.cond``, then passes an activation on and a
cotangent back: two ``ppermute`` s, outside of the conditionals, where every device
takes part. Where the table has all forwards before all backwards, as in ``gpipe``,
there is a scan for each, and one ``ppermute`` in its ticks. The program is as long for
64 microbatches as for 8.

A stage's input is kept from its arrival to its backward, in a ring of as many slots as
the table needs; the backward runs the stage anew. So memory follows from the schedule:
``1f1b`` holds as many inputs as there are stages, ``gpipe`` one for each microbatch.

Sources: GPipe, arXiv 1811.06965; 1F1B, arXiv 1806.03377; interleaved stages, arXiv
2104.04473; zero bubble, arXiv 2401.10241.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from tessera.compiler.pipelining.device_tick import (
    Carry,
    Device,
    Gradients,
    Row,
    Stages,
)
from tessera.compiler.pipelining.pipeline_primitive import SCOPE
from tessera.compiler.pipelining.schedule_table import Kind, Schedule
from tessera.mesh import Mesh
from tessera.ops.operand_layouts import region_mesh
from tessera.tree import Tree


@dataclass(frozen=True)
class Pipeline:
    """Stages on a mesh, in the order of a schedule.

    Attributes:
      schedule: For as many stages as the axis has devices.
      stages: What runs.
      mesh: The mesh; axes other than the pipeline's are left to the compiler.
      axis: The pipeline's axis.
      data_axes: Axes along which there is a pipeline for each part of the rows, which
        are dim 1 of every microbatch array. Weights are whole along them, and their
        gradients are summed once, after the last tick; left to the compiler, such an
        axis would sum them in every tick.
    """

    schedule: Schedule
    stages: Stages
    mesh: Mesh
    axis: str
    data_axes: tuple[str, ...] = ()

    def gradients(
        self,
        weights: Tree,
        shared: Tree,
        micros: Tree,
        seed: Array,
        *,
        micro_gradients: frozenset[int] = frozenset(),
        keep_outputs: bool = False,
    ) -> Gradients:
        """Loss and gradients, summed over all microbatches.

        Args:
          weights: Each array global ``[chunks, S, ...]``, per device ``[chunks, 1,
            ...]``: virtual stage ``k`` is at ``[k // S, k % S]``.
          shared: Weights that every device of the axis has whole.
          micros: Each array ``[M, ...]``, whole over the axis.
          seed: f32 scalar, the cotangent of every microbatch's loss.
          micro_gradients: Leaves of ``micros``, by number, whose gradients are wanted.
          keep_outputs: Whether the last stage's outputs are.
        """

        def run(weights: Tree, shared: Tree, micros: Tree, seed: Array) -> Gradients:
            device = Device(
                self.schedule,
                self.stages,
                self.axis,
                jax.tree.map(_own_stage, weights),
                shared,
                micros,
                seed,
                micro_gradients=micro_gradients,
                keep_outputs=keep_outputs,
            )
            return _summed(_ticked(device), self.axis, self.data_axes)

        layouts: Any = Gradients(*[PartitionSpec()] * 6)
        own = PartitionSpec(None, self.axis)
        layouts = replace(layouts, weights=own, micros=self._rows, outputs=self._rows)
        return self._in_region(run, layouts)(weights, shared, micros, seed)

    def outputs(
        self, weights: Tree, shared: Tree, micros: Tree
    ) -> tuple[Tree, Array, Tree]:
        """What the stages give, forward only, by ticks as in ``gpipe``.

        Arguments are those of ``gradients``. JAX can differentiate it, and then keeps
        every stage's input and runs the stages anew.

        Returns:
          The last stage's outputs, ``[M, ...]``, and the loss and statistics, summed
          over microbatches.
        """

        def run(weights: Tree, shared: Tree, micros: Tree, seed: Array) -> Any:
            weights = jax.tree.map(_own_stage, weights)
            device = Device(
                self.schedule, self.stages, self.axis, weights, shared, micros, seed
            )
            outputs, *sums = device.forward_only()
            sums = jax.lax.psum(sums, self.data_axes) if self.data_axes else sums
            return outputs, *sums

        layouts = (self._rows, PartitionSpec(), PartitionSpec())
        call = self._in_region(run, layouts)
        return call(weights, shared, micros, jnp.float32(0.0))

    @property
    def _rows(self) -> PartitionSpec:
        """Where microbatches lie, over the axes that are manual."""
        return (
            PartitionSpec(None, self.data_axes) if self.data_axes else PartitionSpec()
        )

    def _in_region(self, run: Callable[..., Any], results: Any) -> Callable[..., Any]:
        assert self.schedule.stages == self.mesh.shape[self.axis], "a device for each"
        whole, rows = PartitionSpec(), self._rows
        return jax.shard_map(
            jax.named_scope(SCOPE)(run),
            mesh=region_mesh(self.mesh),
            in_specs=(PartitionSpec(None, self.axis), whole, rows, whole),
            out_specs=results,
            axis_names={self.axis, *self.data_axes},
            # What a device holds follows from its branches, and JAX follows none.
            check_vma=False,
        )


def _own_stage(array: Array) -> Array:
    return array[:, 0]


def _ticked(device: Device) -> Gradients:
    """The sums of one device after all ticks."""

    def tick(kinds: Sequence[Kind], carry: Carry, row: Row) -> tuple[Carry, None]:
        carry, activation, cotangent = device.file_arrivals(carry, row), None, None
        if "F" in kinds:
            activation = device.forward(carry, row)
        if "B" in kinds:
            carry, cotangent = device.backward(carry, row)
        if "W" in kinds:
            carry = device.weigh(carry, row)
        return device.passed_on(carry, activation, cotangent), None

    carry, rows = device.begin(), _rows(device)
    for kinds, ticks in device.schedule.phases:
        part = {name: column[ticks] for name, column in rows.items()}
        carry, _ = jax.lax.scan(partial(tick, kinds), carry, part)
    return carry.sums


def _rows(device: Device) -> Row:
    """The table's columns of one device, int32 ``[ticks]`` each."""
    schedule, slots = device.schedule, device.schedule.slots
    columns = {
        "receive_forward": slots.receive_forward,
        "receive_backward": slots.receive_backward,
        "forward_slot": slots.forward_slot,
        "backward_slot": slots.backward_slot,
        "cotangent_slot": slots.cotangent_slot,
        "keep_slot": slots.keep_slot,
        "weight_slot": slots.weight_slot,
    }
    for name, kind in (("forward", "F"), ("backward", "B"), ("weight", "W")):
        table = schedule.table(kind)
        columns[f"{name}_micro"], columns[f"{name}_chunk"] = (
            table[..., 0],
            table[..., 1],
        )
    return {
        name: jax.lax.dynamic_index_in_dim(
            jnp.asarray(column), device.place, 1, keepdims=False
        )
        for name, column in columns.items()
    }


def _summed(sums: Gradients, axis: str, data_axes: tuple[str, ...]) -> Gradients:
    """Over stages, what every stage adds to, and over data all but rows of it."""
    weights = jax.tree.map(partial(jnp.expand_dims, axis=1), sums.weights)
    of_rows = jax.lax.psum((sums.micros, sums.outputs), axis)
    others = (sums.loss, sums.statistics, sums.shared)
    loss, statistics, shared = jax.lax.psum(others, (axis, *data_axes))
    if data_axes:
        weights = jax.lax.psum(weights, data_axes)
    return Gradients(loss, statistics, weights, shared, *of_rows)
