# SPDX-License-Identifier: Apache-2.0
"""Executes any legal schedule, forward and backward, as one loop in one SPMD program.

A ``jax.shard_map`` that is manual over the pipeline's mesh axis and leaves the others
to the compiler; in it one ``lax.scan`` over the ticks of the table. In a tick a device
does the work in its cell, each kind behind a ``lax.cond``. An activation goes to the
next stage after the forward, beside the backward; a cotangent to the stage before at
the beginning of the next tick, beside its forward: two ``ppermute`` s, outside of the
conditionals, where every device takes part; four where stages are placed in a "v",
whose next stage is on the device after or on the one before. Where the table has all
forwards before all backwards, as in ``gpipe``, there is a scan for each, and one
``ppermute`` in its ticks.
The program is as long for 64 microbatches as for 8.

What a forward leaves for its backward is in a ring buffer of as many slots as the table
needs: the residuals of the stage, or its input alone, from which the backward runs the
stage again. So memory follows from the schedule: ``1f1b`` stores those of twice as many
microbatches as there are stages, ``gpipe`` those of all.

Sources: GPipe, arXiv 1811.06965; 1F1B, arXiv 1806.03377; interleaved stages, arXiv
2104.04473; zero bubble, arXiv 2401.10241; "v", arXiv 2405.15362.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from tessera.foundations.tree import Tree, zeros
from tessera.graph.pipelining.device_stages import DeviceStages, Stages
from tessera.graph.pipelining.device_tick import Carry, Device, Gradients, Row
from tessera.graph.pipelining.pipeline_primitive import SCOPE
from tessera.graph.pipelining.ring_buffers import add, ring_buffer, store
from tessera.graph.pipelining.schedule_table import Kind, Schedule
from tessera.mesh import Mesh
from tessera.ops.operand_layouts import map_free_axes, region_mesh
from tessera.shard_spec import axes_of_dims, spec_over
from tessera.tracing.scope import TAKEN


@dataclass(frozen=True)
class Pipeline:
    """Stages on a mesh, in the order of a schedule.

    Attributes:
      schedule: For as many stages as the axis has devices.
      stages: The stages.
      mesh: The mesh; axes other than the pipeline's are left to the compiler.
      axis: The pipeline's axis.
      data_axes: Axes along which each device has a pipeline for its part of the rows,
        dim 1 of every microbatch array. Weights are replicated over them, and their
        gradients are summed once, after the last tick; left to the compiler, such an
        axis would sum them in every tick.
      gradient_layouts: Of ``weights`` and of ``shared``: over the data axes in them,
        gradients are reduce-scattered; None all-reduces them.
    """

    schedule: Schedule
    stages: Stages
    mesh: Mesh
    axis: str
    data_axes: tuple[str, ...] = ()
    gradient_layouts: tuple[Tree, Tree] | None = None

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
            ...]``: virtual stage ``k`` is where ``k`` is in the schedule's
            ``stage_numbers``.
          shared: Weights that are replicated over the axis.
          micros: Each array ``[M, ...]``, replicated over the axis.
          seed: f32 scalar, the cotangent of every microbatch's loss.
          micro_gradients: Leaves of ``micros``, by number, whose gradients are wanted.
          keep_outputs: Whether the last stage's outputs are wanted.
        """

        def run(weights: Tree, shared: Tree, micros: Tree, seed: Array) -> Gradients:
            own = DeviceStages(
                self.schedule,
                self.stages,
                jax.tree.map(_own_stage, weights),
                shared,
                micros,
                seed,
                micro_gradients,
            )
            device = Device(own, self.axis, keep_outputs=keep_outputs)
            return self._all_sums(_run_ticks(device))

        rows, whole = self._rows, PartitionSpec()
        own: Any = PartitionSpec(None, self.axis)
        of_shared: Any = whole
        if self.gradient_layouts is not None:
            manual = partial(spec_over, axes=(self.axis, *self.data_axes))
            own, of_shared = jax.tree.map(manual, self.gradient_layouts)
        layouts = Gradients(whole, whole, own, of_shared, rows, rows)
        return self._in_region(run, layouts)(weights, shared, micros, seed)

    def outputs(
        self, weights: Tree, shared: Tree, micros: Tree
    ) -> tuple[Tree, Array, Tree]:
        """The stages' results, forward only, by ticks as in ``gpipe``.

        Arguments are those of ``gradients``. JAX can differentiate it, and then saves
        every stage's input and runs the stages again.

        Returns:
          The last stage's outputs, ``[M, ...]``, and the loss and statistics, summed
          over microbatches.
        """

        def run(weights: Tree, shared: Tree, micros: Tree, seed: Array) -> Any:
            weights = jax.tree.map(_own_stage, weights)
            own = DeviceStages(
                self.schedule, self.stages, weights, shared, micros, seed
            )
            outputs, *sums = _forward_only(Device(own, self.axis))
            sums = jax.lax.psum(sums, self.data_axes) if self.data_axes else sums
            return outputs, *sums

        layouts = (self._rows, PartitionSpec(), PartitionSpec())
        call = self._in_region(run, layouts)
        return call(weights, shared, micros, jnp.zeros(()))

    def _all_sums(self, sums: Gradients) -> Gradients:
        """The sums over devices: over the data axes of everything but rows."""
        weights = jax.tree.map(partial(jnp.expand_dims, axis=1), sums.weights)
        micros, outputs = jax.lax.psum((sums.micros, sums.outputs), self.axis)
        axes, shared = (self.axis, *self.data_axes), sums.shared
        others = (sums.loss, sums.statistics)
        if self.gradient_layouts is not None:
            own, whole = self.gradient_layouts
            weights = _reduce_scattered(weights, own, self.data_axes)
            shared = _reduce_scattered(shared, whole, axes)
            loss, statistics = jax.lax.psum(others, axes)
        else:
            loss, statistics, shared = jax.lax.psum((*others, shared), axes)
            if self.data_axes:
                weights = jax.lax.psum(weights, self.data_axes)
        return Gradients(loss, statistics, weights, shared, micros, outputs)

    @property
    def _rows(self) -> PartitionSpec:
        """The layout of microbatches over the manual axes."""
        return (
            PartitionSpec(None, self.data_axes) if self.data_axes else PartitionSpec()
        )

    def _in_region(self, run: Callable[..., Any], results: Any) -> Callable[..., Any]:
        assert self.schedule.stages == self.mesh.shape[self.axis], "one device each"
        whole, rows = PartitionSpec(), self._rows
        return jax.shard_map(
            jax.named_scope(SCOPE)(run),
            mesh=region_mesh(self.mesh),
            in_specs=(PartitionSpec(None, self.axis), whole, rows, whole),
            out_specs=results,
            axis_names={self.axis, *self.data_axes},
            # Which devices hold what depends on branches, which JAX does not follow.
            check_vma=False,
        )


def _own_stage(array: Array) -> Array:
    return array[:, 0]


def _run_ticks(device: Device) -> Gradients:
    """The sums of one device after all ticks."""

    def tick(taken: Mapping[Kind, str], carry: Carry, row: Row) -> tuple[Carry, None]:
        carry = device.receive(carry, row, sends_back="B" in taken)
        if "F" in taken:
            carry, wire = device.forward(carry, row, taken["F"])
            carry = replace(carry, activation=device.send(wire))
        if "B" in taken:
            carry, back = device.backward(carry, row, taken["B"])
            carry = replace(carry, cotangent=back)
        if "W" in taken:
            carry = device.weight_backward(carry, row, taken["W"])
        return carry, None

    carry, rows = device.initial_carry(), _rows(device)
    busy_ticks = partial(
        device.schedule.busy_ticks, recomputes=device.own.stages.recomputes
    )
    for kinds, ticks in device.schedule.phases:
        part = {name: column[ticks] for name, column in rows.items()}
        count = ticks.stop - ticks.start
        taken = {kind: f"{TAKEN}{busy_ticks(kind, ticks)}_of_{count}" for kind in kinds}
        carry, _ = jax.lax.scan(partial(tick, taken), carry, part)
    return carry.sums


def _rows(device: Device) -> Row:
    """The table's columns of one device, int32 ``[ticks]`` each."""
    schedule, columns = device.schedule, dict(device.slots.tables)
    for name, kind in (("forward", "F"), ("backward", "B"), ("weight", "W")):
        micro, chunk = np.moveaxis(schedule.table(kind), -1, 0)
        columns |= {f"{name}_micro": micro, f"{name}_chunk": chunk}
    own = partial(jax.lax.dynamic_index_in_dim, index=device.index, axis=1)
    return {
        name: own(jnp.asarray(column), keepdims=False)
        for name, column in columns.items()
    }


def _reduce_scattered(gradients: Tree, layouts: Tree, axes: tuple[str, ...]) -> Tree:
    """Sums over axes, each scattered over those of them that are in its layout.

    In a region over all axes: XLA would gather what the others split.
    """

    def sums(gradients: Tree) -> Tree:
        return jax.tree.map(partial(_reduced, axes=axes), gradients, layouts)

    region = jax.sharding.get_abstract_mesh()
    free = set(region.axis_names) - set(region.manual_axes)
    specs = jax.tree.map(partial(spec_over, axes=free), layouts)
    return map_free_axes(sums, region, (specs,), specs)(gradients)


def _reduced(array: Array, layout: PartitionSpec, *, axes: tuple[str, ...]) -> Array:
    for dim, split in enumerate(axes_of_dims(layout, array.ndim)):
        if over := tuple(axis for axis in split if axis in axes):
            axes = tuple(axis for axis in axes if axis not in over)
            array = jax.lax.psum_scatter(array, over, scatter_dimension=dim, tiled=True)
    return jax.lax.psum(array, axes) if axes else array


def _forward_only(device: Device) -> tuple[Tree, Array, Tree]:
    """Outputs of the last stage, loss and statistics, over all microbatches.

    What a device receives it uses in the next tick, so it stores nothing.
    """
    own = device.own
    count = jax.tree.leaves(own.micros)[0].shape[0]
    num_ticks, step_of = _forward_steps(device, count)
    _, loss, (outputs, _) = own.result_shapes
    of_results, shapes = (loss, own.statistics), (loss, own.statistics[1])

    def tick(carry: Tree, tick: Array) -> tuple[Tree, None]:
        received, buffer, sums = carry
        is_active, number, chunk = step_of(tick)
        stage = device.stage_of(chunk)

        @jax.checkpoint
        def work(received: Tree) -> tuple[Tree, Tree, Any]:
            weights, micro = own.chunk(chunk), own.micro(number)

            def work_of(run: int, weights: Tree, received: Tree) -> Tree:
                return own.stages.runs[run](weights, own.shared, received, micro, stage)

            wire, loss, (out, more) = own.stages.each(stage, work_of, weights, received)
            end = partial(own.stages.end, weights, own.shared, (wire, out), micro)
            of_head = jax.lax.cond(stage == own.last, end, partial(zeros, shapes))
            return wire, out, (loss + of_head[0], (more, of_head[1]))

        def idle(received: Tree) -> Any:
            del received
            return own.empty_wire(), zeros(outputs), zeros(of_results)

        wire = received[0]
        if len(received) > 1:
            select = partial(jnp.where, chunk == 0)
            wire = jax.tree.map(select, *received)
        wire, out, more = jax.lax.cond(is_active, work, idle, wire)
        is_last = is_active & (stage == own.last)
        buffer = store(buffer, out, jnp.where(is_last, number, -1))
        return (device.send(wire), buffer, add(sums, more)), None

    wires = (own.empty_wire(),) * device.ways
    initial = wires, ring_buffer(outputs, count), zeros(of_results)
    _, outputs, sums = jax.lax.scan(tick, initial, jnp.arange(num_ticks))[0]
    return jax.lax.psum((outputs, *sums), device.axis)


def _forward_steps(
    device: Device, count: int
) -> tuple[int, Callable[[Array], tuple[Array, Array, Array]]]:
    """The ticks of a forward alone, and what a device does in each.

    In a loop step ``i`` of device ``s`` is in tick ``i + s``, through groups of as many
    microbatches as there are stages. In a "v" a microbatch begins every other tick: the
    device has its first chunk in even steps and its second in odd ones.

    Returns:
      The number of ticks; and a function from a tick to whether the device works, on
      which microbatch, and with which chunk.
    """
    size, chunks = device.schedule.stages, device.schedule.chunks
    # With one chunk all microbatches are one group.
    group_size = size if chunks > 1 else count
    steps = -(-count // group_size) * group_size * chunks

    def of_loop(tick: Array) -> tuple[Array, Array, Array]:
        step = tick - device.index
        group, chunk = step // (group_size * chunks), (step // group_size) % chunks
        number = group * group_size + step % group_size
        return (step >= 0) & (step < steps) & (number < count), number, chunk

    def of_v(tick: Array) -> tuple[Array, Array, Array]:
        chunk = (tick - device.index) % 2
        number = (tick - device.stage_of(chunk)) // 2
        return (number >= 0) & (number < count), number, chunk

    if device.schedule.placement == "v":
        return 2 * (count - 1 + size), of_v
    return steps + size - 1, of_loop
