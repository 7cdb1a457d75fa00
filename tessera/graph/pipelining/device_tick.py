# SPDX-License-Identifier: Apache-2.0
"""Runs one tick of a pipeline on one device: a forward, a backward, a weight gradient.

A device stores what it received in the last tick, does the work that its row of the
schedule's table names, each kind behind a ``lax.cond``, and sends the results to its
neighbors. All of it is in an SPMD region that is manual over the pipeline's axis.
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from tessera.foundations.tree import Tree, zeros
from tessera.graph.pipelining.buffer_slots import Slots, allocate
from tessera.graph.pipelining.device_stages import DeviceStages
from tessera.graph.pipelining.ring_buffers import (
    add,
    add_to_row,
    read,
    ring_buffer,
    store,
    stored,
    write,
)
from tessera.graph.pipelining.schedule_table import Schedule

Row: TypeAlias = dict[str, Array]

# The columns of slots for what arrives, that of a "v" behind its turn last.
_FORWARD = ("receive_forward", "turned_forward")
_BACKWARD = ("receive_backward", "turned_backward")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gradients:
    """The results of a pipelined step, each a sum over microbatches.

    Attributes:
      loss: Scalar, f32, or f64 where JAX has it enabled.
      statistics: Those of the stages, and those of the head.
      weights: Like the weights, and split over the pipeline's axis as they are.
      shared: Like the shared weights.
      micros: Like the microbatches' arrays that were asked for, by leaf number.
      outputs: The last stage's, ``[M, ...]``; None where not asked for.
    """

    loss: Any
    statistics: Tree
    weights: Tree
    shared: Tree
    micros: Tree
    outputs: Tree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Carry:
    """The state of a device between two ticks.

    Attributes:
      activation: The wires received from stages before, for each of ``_FORWARD``.
      cotangent: The cotangent for the stage before, which the next tick sends.
      inputs: Ring buffer of stage inputs, until the last tick that reads them.
      cotangents: Ring buffer of cotangents, until their backward.
      residuals: Ring buffer of what a forward leaves for its backward.
      weight_residuals: Ring buffer of what a backward leaves for its weight gradient.
      ends: Ring buffer of the last stage's wire and outputs, until its backward.
      sums: The gradients so far.
    """

    activation: tuple[Tree, ...]
    cotangent: Tree
    inputs: Tree
    cotangents: Tree
    residuals: Tree
    weight_residuals: Tree
    ends: Tree
    sums: Gradients


@dataclass(frozen=True)
class Device:
    """One device in the SPMD region.

    Attributes:
      own: Its stages.
      axis: The pipeline's mesh axis.
      keep_outputs: Whether the last stage's outputs are wanted.
    """

    own: DeviceStages
    axis: str
    keep_outputs: bool = False

    @property
    def schedule(self) -> Schedule:
        """The table."""
        return self.own.schedule

    @cached_property
    def index(self) -> Array:
        """Its index along the axis, int32."""
        return jax.lax.axis_index(self.axis)

    @cached_property
    def slots(self) -> Slots:
        """The slots of its ring buffers."""
        return allocate(self.schedule, recomputes=self.own.stages.recomputes)

    def initial_carry(self) -> Carry:
        """Empty ring buffers and sums of zero."""
        own, slots, wire = self.own, self.slots, self.own.empty_wire()
        outputs, _ = own.result_shapes[2]
        ends = wire, outputs
        sums = Gradients(
            loss=jnp.zeros(()),
            statistics=zeros(own.statistics),
            weights=zeros(own.own_parameters(own.weights)),
            shared=zeros(own.shared),
            micros=zeros(own.differentiated(own.micros)),
            outputs=ring_buffer(outputs, self.schedule.microbatches)
            if self.keep_outputs
            else None,
        )
        return Carry(
            activation=(wire,) * self.ways,
            cotangent=wire,
            inputs=ring_buffer(wire, slots.input_slots),
            cotangents=ring_buffer(wire, slots.cotangent_slots),
            residuals=ring_buffer(self._left, slots.residual_slots),
            weight_residuals=ring_buffer(self._kept, slots.weight_slots),
            ends=() if self._recomputes else ring_buffer(ends, slots.end_slots),
            sums=sums,
        )

    @cached_property
    def _left(self) -> Tree:
        """Shapes of what a forward leaves."""
        return () if self._recomputes else list(self.own.residuals.slots)

    @cached_property
    def _kept(self) -> Tree:
        """Shapes of what a backward leaves for a weight gradient."""
        is_split = self.schedule.splits_backward
        return list(self.own.weight_residuals.slots) if is_split else ()

    def receive(self, carry: Carry, row: Row, *, sends_back: bool) -> Carry:
        """Store what the neighbors computed in the last tick, if the table has a slot.

        Args:
          carry: The state after the last tick.
          row: The device's row of the table.
          sends_back: Whether there are cotangents, which are sent here: until the
            backward reads them, the forward runs beside.
        """
        inputs, cotangents = carry.inputs, carry.cotangents
        for wire, name in zip(carry.activation, _FORWARD, strict=False):
            inputs = store(inputs, wire, row[name])
        if not sends_back:
            return replace(carry, inputs=inputs)
        received = self.send(carry.cotangent, back=True)
        for wire, name in zip(received, _BACKWARD, strict=False):
            cotangents = store(cotangents, wire, row[name])
        return replace(carry, inputs=inputs, cotangents=cotangents)

    def forward(self, carry: Carry, row: Row, taken: str) -> tuple[Carry, Tree]:
        """The carry with this tick's forward, and the wire for the next stage.

        The last stage does nothing where its backward runs it again.

        Args:
          carry: The state after the last tick.
          row: The device's row of the table.
          taken: The name scope of the work; see ``scope.TAKEN``.
        """
        stage, number = self.stage_of(row["forward_chunk"]), row["forward_micro"]

        @jax.named_scope(taken)
        def work(sums: Any) -> tuple[Tree, Any, Tree, Tree]:
            wire = read(carry.inputs, row["forward_slot"])
            (wire, outputs), results, left = self.own.forward(stage, number, wire)
            if self._recomputes:
                outputs = left = ()
            return left, add(sums, results), self._laid_out(wire), outputs

        def idle(sums: Any) -> tuple[Tree, Any, Tree, Tree]:
            outputs = () if self._recomputes else zeros(self.own.result_shapes[2][0])
            return zeros(self._left), sums, self.own.empty_wire(), outputs

        is_active = number >= 0
        if self._recomputes:
            is_active &= stage < self.own.last
        of_stages, of_head = carry.sums.statistics
        left, (loss, of_stages), *out = jax.lax.cond(
            is_active, work, idle, (carry.sums.loss, of_stages)
        )
        sums = replace(carry.sums, loss=loss, statistics=(of_stages, of_head))
        # Not in the branch: XLA would copy the buffer into it and out again.
        residuals = write(carry.residuals, left, row["leave_slot"])
        if not self._recomputes:
            carry = replace(carry, ends=store(carry.ends, tuple(out), row["leave_end"]))
        return replace(carry, residuals=residuals, sums=sums), out[0]

    def backward(self, carry: Carry, row: Row, taken: str) -> tuple[Carry, Tree]:
        """The sums with this tick's backward, and the cotangent to send back.

        Args:
          carry: The state after this tick's forward.
          row: As for ``forward``.
          taken: As there.
        """
        chunk, number = row["backward_chunk"], row["backward_micro"]
        stage = self.stage_of(chunk)

        @jax.named_scope(taken)
        def work(sums: Gradients) -> tuple[Gradients, Tree, Tree]:
            residuals, cotangent, sums = self._before_backward(carry, row, sums)
            (back, of_micro), rest = self.own.backward(
                stage, number, residuals, cotangent
            )
            sums = _with_micro(sums, number, of_micro)
            if not self.schedule.splits_backward:
                sums, rest = self._with_weights(sums, chunk, *rest), ()
            return sums, rest, self._laid_out(back)

        def idle(sums: Gradients) -> tuple[Gradients, Tree, Tree]:
            return sums, zeros(self._kept), self.own.empty_wire()

        sums, rest, back = jax.lax.cond(number >= 0, work, idle, carry.sums)
        kept = write(carry.weight_residuals, rest, row["keep_slot"])
        return replace(carry, sums=sums, weight_residuals=kept), back

    def _before_backward(
        self, carry: Carry, row: Row, sums: Gradients
    ) -> tuple[list[Any], tuple[Tree, Tree], Gradients]:
        """What a backward takes: the residuals and cotangents of its stage.

        Where residuals are recomputed, the stage runs forward here; the results of all
        but the last were added up in their forward.
        """
        own, stage = self.own, self.stage_of(row["backward_chunk"])
        _, loss, (outputs, statistics) = own.result_shapes
        if self._recomputes:
            wire = read(carry.inputs, row["backward_slot"])
            ended, results, residuals = own.forward(stage, row["backward_micro"], wire)
        else:
            residuals = stored(carry.residuals, row["residual_slot"])
            ended = read(carry.ends, row["end_slot"])
            results = zeros((loss, statistics))

        def end(sums: Gradients) -> tuple[Any, Gradients]:
            return self._head(sums, row, ended, results)

        def received(sums: Gradients) -> tuple[Any, Gradients]:
            cotangent = read(carry.cotangents, row["cotangent_slot"])
            return (cotangent, zeros(outputs)), sums

        cotangent, sums = jax.lax.cond(stage == own.last, end, received, sums)
        return residuals, cotangent, sums

    def _head(
        self, sums: Gradients, row: Row, out: tuple[Tree, Tree], results: Any
    ) -> tuple[tuple[Tree, Tree], Gradients]:
        """The cotangents of the last stage, and the sums with its results."""
        (loss, statistics), number = results, row["backward_micro"]
        (of_head, more), gradients = self.own.head(row["backward_chunk"], number, out)
        cotangent, of_shared, of_micro = gradients
        outputs = store(sums.outputs, out[1], number) if self.keep_outputs else None
        sums = replace(
            sums,
            loss=sums.loss + loss + of_head,
            statistics=add(sums.statistics, (statistics, more)),
            shared=add(sums.shared, of_shared),
            outputs=outputs,
        )
        return cotangent, _with_micro(sums, number, of_micro)

    def weight_backward(self, carry: Carry, row: Row, taken: str) -> Carry:
        """The sums with this tick's weight gradient, where the backward is split."""
        chunk, number = row["weight_chunk"], row["weight_micro"]

        @jax.named_scope(taken)
        def work(sums: Gradients) -> Gradients:
            kept = stored(carry.weight_residuals, row["weight_slot"])
            gradients = self.own.weight_gradients(self.stage_of(chunk), number, kept)
            return self._with_weights(sums, chunk, *gradients)

        sums = jax.lax.cond(number >= 0, work, _unchanged, carry.sums)
        return replace(carry, sums=sums)

    @property
    def ways(self) -> int:
        """From how many devices activations arrive, and cotangents."""
        return 2 if self.schedule.placement == "v" else 1

    def send(self, wire: Tree, *, back: bool = False) -> tuple[Tree, ...]:
        """What arrives when every device sends to its next stage, or to the one before.

        For each way: first those of a loop, then those of second chunks in a "v".
        """
        from_devices = [self._from_before, self._from_after]
        if back:
            from_devices.reverse()
        return tuple(each(wire) for each in from_devices[: self.ways])

    def _from_before(self, wire: Tree) -> Tree:
        """What the device before sent."""
        return jax.lax.ppermute(wire, self.axis, self._next)

    def _from_after(self, wire: Tree) -> Tree:
        """What the device after sent; at the turn of a "v", the device itself."""
        back = [(after, before) for before, after in self._next]
        received = jax.lax.ppermute(wire, self.axis, back)
        if self.schedule.placement != "v":
            return received
        is_turn = self.index == self.schedule.stages - 1
        return jax.tree.map(partial(jnp.where, is_turn), wire, received)

    @property
    def _next(self) -> list[tuple[int, int]]:
        """Each device and the one after it, which in a loop is also the first."""
        size = self.schedule.stages
        last = size - 1 if self.schedule.placement == "v" else size
        return [(index, (index + 1) % size) for index in range(last)]

    @property
    def _recomputes(self) -> bool:
        """Whether a backward runs its stage again."""
        return self.own.stages.recomputes

    def stage_of(self, chunk: Array) -> Array:
        """The virtual stage of one of the device's chunks."""
        return self.schedule.stage_of(self.index, chunk)

    def _laid_out(self, wire: Tree) -> Tree:
        return self.own.stages.constrain_wire(wire)

    def _with_weights(
        self, sums: Gradients, chunk: Array, weights: Tree, shared: Tree
    ) -> Gradients:
        weights = self.own.stages.constrain_weights(weights)
        add_chunk = partial(add_to_row, index=chunk)
        return replace(
            sums,
            weights=jax.tree.map(add_chunk, sums.weights, weights),
            shared=add(sums.shared, shared),
        )


def _with_micro(sums: Gradients, number: Array, gradients: Tree) -> Gradients:
    """The sums with the gradients of one microbatch."""
    add_micro = partial(add_to_row, index=number)
    return replace(sums, micros=jax.tree.map(add_micro, sums.micros, gradients))


def _unchanged(sums: Gradients) -> Gradients:
    return sums
