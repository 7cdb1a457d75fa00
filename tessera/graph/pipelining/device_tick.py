# SPDX-License-Identifier: Apache-2.0
"""Runs one tick of a pipeline on one device: a forward, a backward, a weight gradient.

A device stores what it received in the last tick, does the work that its row of the
schedule's table names, each kind behind a ``lax.cond``, and sends the results to its
neighbors. All of it is in an SPMD region that is manual over the pipeline's axis.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from tessera.foundations.tree import Tree, zeros
from tessera.graph.pipelining.ring_buffers import (
    add,
    add_to_row,
    read,
    ring_buffer,
    row_of,
    store,
)
from tessera.graph.pipelining.schedule_table import Schedule
from tessera.graph.pipelining.stage_packing import Packing
from tessera.graph.pipelining.weight_gradients import SplitBackward, split_backward
from tessera.ops.wide_gradients import ParameterCopy

Row: TypeAlias = dict[str, Array]


@dataclass(frozen=True)
class Stages:
    """The functions of all virtual stages.

    Attributes:
      runs: One function for all virtual stages, or one for each of them:
        ``(weights, shared, wire, micro, index) -> (wire, loss, more)``. ``weights`` are
        one virtual stage's own, ``shared`` those that several stages read; ``micro``
        is one microbatch, ``index`` the virtual stage, an int32 scalar. The
        first stage takes its input from ``micro`` and ignores the wire. ``loss`` is the
        stage's part of the microbatch's f32 loss, mostly 0 but at the last. ``more``
        are the last stage's outputs, zeros at the others, and statistics: a tree of
        f32 arrays, which are summed over microbatches and stages.
      wire: Shapes and dtypes of what a stage sends to the next, all floating-point.
      constrain_wire: Lays out a wire over the mesh's other axes.
      constrain_weights: The same for a tree like one virtual stage's weights.
      has_copies: Whether narrow weights are copies of f32 parameters, so that their
        gradients are f32; the functions take a ``ParameterCopy`` for each then.
    """

    runs: Sequence[Callable[..., tuple[Tree, Array, tuple[Tree, Tree]]]]
    wire: Tree
    constrain_wire: Callable[[Tree], Tree] = lambda wire: wire
    constrain_weights: Callable[[Tree], Tree] = lambda weights: weights
    has_copies: bool = False

    def each(self, index: Array, work: Callable[..., Tree], *operands: Tree) -> Tree:
        """``work(number, *operands)`` by the number of the function of a stage.

        There is a branch for each function. The branches are outside of what is
        differentiated and split, so each has the residuals of its own stage.
        """
        if len(self.runs) == 1:
            return work(0, *operands)

        def branch(number: int, *operands: Tree) -> Tree:
            # XLA wants the results of all branches laid out alike; the barrier keeps a
            # layout that one branch asks for inside it.
            return jax.lax.optimization_barrier(work(number, *operands))

        branches = [partial(branch, number) for number in range(len(self.runs))]
        return jax.lax.switch(index, branches, *operands)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gradients:
    """The results of a pipelined step, each a sum over microbatches.

    Attributes:
      loss: f32 scalar.
      statistics: As the stages return them.
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
      activation: The wire received from the stage before.
      cotangent: The cotangent received from the stage after.
      inputs: Ring buffer of stage inputs, until their backward.
      cotangents: Ring buffer of cotangents, until their backward.
      residuals: Ring buffer of what a backward saves for its weight gradient.
      sums: The gradients so far.
    """

    activation: Tree
    cotangent: Tree
    inputs: Tree
    cotangents: Tree
    residuals: Tree
    sums: Gradients


@dataclass(frozen=True)
class Device:
    """One device in the SPMD region; arrays are its own shards.

    Attributes:
      schedule: The table.
      stages: The stages.
      axis: The pipeline's mesh axis.
      weights: Those of its own virtual stages, ``[chunks, ...]``.
      shared: Weights that all stages read.
      micros: All microbatches, ``[M, ...]``.
      seed: f32 scalar, the cotangent of each microbatch's loss.
      micro_gradients: Leaves of the microbatches whose gradients are wanted, by number.
      keep_outputs: Whether the last stage's outputs are wanted.
    """

    schedule: Schedule
    stages: Stages
    axis: str
    weights: Tree
    shared: Tree
    micros: Tree
    seed: Array
    micro_gradients: frozenset[int] = frozenset()
    keep_outputs: bool = False

    @cached_property
    def index(self) -> Array:
        """Its index along the axis, int32."""
        return jax.lax.axis_index(self.axis)

    def initial_carry(self) -> Carry:
        """Empty ring buffers and sums of zero."""
        slots, wire = self.schedule.slots, self.empty_wire()
        micros = self.schedule.microbatches
        outputs, statistics = self.result_shapes[2]
        sums = Gradients(
            loss=jnp.float32(0.0),
            statistics=zeros(statistics),
            weights=zeros(self._own_parameters(self.weights)),
            shared=zeros(self.shared),
            micros=zeros(self._differentiated(self.micros)),
            outputs=ring_buffer(outputs, micros) if self.keep_outputs else None,
        )
        residuals: Tree = ()
        if self.schedule.splits_backward:
            packed = list(self._residual_slots.slots)
            residuals = ring_buffer(packed, slots.weight_slots)
        return Carry(
            activation=wire,
            cotangent=wire,
            inputs=ring_buffer(wire, slots.stash_slots),
            cotangents=ring_buffer(wire, slots.cotangent_slots),
            residuals=residuals,
            sums=sums,
        )

    def store_received(self, carry: Carry, row: Row) -> Carry:
        """Store what the neighbors sent in the last tick, if the table has a slot."""
        inputs = store(carry.inputs, carry.activation, row["receive_forward"])
        cotangents = store(carry.cotangents, carry.cotangent, row["receive_backward"])
        return replace(carry, inputs=inputs, cotangents=cotangents)

    def forward(self, carry: Carry, row: Row, taken: str) -> Tree:
        """The wire for the next stage; the last stage runs in its backward alone.

        Args:
          carry: The state after the last tick.
          row: The device's row of the table.
          taken: The name scope of the work; see ``scope.TAKEN``.
        """
        stage = self.stage_of(row["forward_chunk"])

        @jax.named_scope(taken)
        def work() -> Tree:
            wire = read(carry.inputs, row["forward_slot"])
            micro = self.micro(row["forward_micro"])
            weights = self.chunk(row["forward_chunk"])

            def work_of(run: int, weights: Tree, wire: Tree) -> Tree:
                operands = (weights, self.shared, wire, micro, stage)
                return self.stages.runs[run](*operands)[0]

            wire = self.stages.each(stage, work_of, weights, wire)
            return self.stages.constrain_wire(wire)

        is_active = (row["forward_micro"] >= 0) & (stage < self.last_stage)
        return jax.lax.cond(is_active, work, self.empty_wire)

    def backward(self, carry: Carry, row: Row, taken: str) -> tuple[Carry, Tree]:
        """The sums with this tick's backward, and the cotangent to send back."""
        chunk, number = row["backward_chunk"], row["backward_micro"]
        stage = self.stage_of(chunk)

        @jax.named_scope(taken)
        def work(sums: Gradients, residuals: Tree) -> tuple[Gradients, Tree, Tree]:
            received = read(carry.cotangents, row["cotangent_slot"])
            is_last = stage == self.last_stage
            cotangent = jax.tree.map(partial(jnp.where, is_last, 0), received)
            wire, micro = read(carry.inputs, row["backward_slot"]), self.micro(number)
            weights = self._parameters_of(chunk)
            inputs = (wire, self._differentiated(micro))
            gradients = partial(self._gradients, micro, stage)
            (back, of_micro), results, rest = self.stages.each(
                stage, gradients, weights, inputs, cotangent
            )
            sums = self._with_results(sums, number, results, is_last=is_last)
            add_micro = partial(add_to_row, index=number)
            micros = jax.tree.map(add_micro, sums.micros, of_micro)
            sums = replace(sums, micros=micros)
            if self.schedule.splits_backward:
                residuals = store(residuals, rest, row["keep_slot"])
            else:
                sums = self._with_weights(sums, chunk, *rest)
            return sums, residuals, self.stages.constrain_wire(back)

        def idle(sums: Gradients, residuals: Tree) -> tuple[Gradients, Tree, Tree]:
            return sums, residuals, self.empty_wire()

        sums, residuals, back = jax.lax.cond(
            number >= 0, work, idle, carry.sums, carry.residuals
        )
        return replace(carry, sums=sums, residuals=residuals), back

    def _gradients(
        self,
        micro: Tree,
        stage: Array,
        run: int,
        weights: tuple[Tree, Tree],
        inputs: tuple[Tree, Tree],
        cotangent: Tree,
    ) -> tuple[Tree, Any, Tree]:
        """Gradients of a stage's inputs, its loss and outputs, and what is left.

        That is the gradients of its weights, or the residuals to compute them from.
        """
        cotangents = (cotangent, self.seed)
        if self.schedule.splits_backward:
            back, residuals, results = self._split_backwards[run].input_gradients(
                weights, inputs, cotangents, micro, stage
            )
            empty = zeros(list(self._residual_slots.slots))
            packed = self._residual_slots.pack(run, residuals, empty)
            return back, results, packed

        def forward(weights: Tree, inputs: Tree) -> Any:
            return self._run(run, weights, inputs, micro, stage)

        _, pull_back, results = jax.vjp(forward, weights, inputs, has_aux=True)
        of_weights, back = pull_back(cotangents)
        return back, results, of_weights

    def weight_backward(self, carry: Carry, row: Row, taken: str) -> Carry:
        """The sums with this tick's weight gradient, where the backward is split."""
        chunk, number = row["weight_chunk"], row["weight_micro"]

        @jax.named_scope(taken)
        def work(sums: Gradients) -> Gradients:
            packed = read(carry.residuals, row["weight_slot"])
            stage, micro = self.stage_of(chunk), self.micro(number)

            def gradients(run: int, packed: Tree, weights: Tree) -> Tree:
                residuals = self._residual_slots.unpack(run, packed)
                split = self._split_backwards[run]
                return split.weight_gradients(residuals, weights, micro, stage)

            weights = self._parameters_of(chunk)
            of_weights = self.stages.each(stage, gradients, packed, weights)
            return self._with_weights(sums, chunk, *of_weights)

        sums = jax.lax.cond(number >= 0, work, _unchanged, carry.sums)
        return replace(carry, sums=sums)

    def send_recv(self, carry: Carry, activation: Tree, cotangent: Tree) -> Carry:
        """The carry with what the neighbors sent; every device takes part.

        None is what no device sends in this tick.
        """
        if activation is not None:
            carry = replace(carry, activation=self.send_forward(activation))
        if cotangent is not None:
            back = [(after, before) for before, after in self._next]
            received = jax.lax.ppermute(cotangent, self.axis, back)
            carry = replace(carry, cotangent=received)
        return carry

    def send_forward(self, wire: Tree) -> Tree:
        """What the stage before sent, when every device sends to its next stage."""
        return jax.lax.ppermute(wire, self.axis, self._next)

    @property
    def _next(self) -> list[tuple[int, int]]:
        """Each device, and the one that has the next virtual stage."""
        size = self.schedule.stages
        return [(index, (index + 1) % size) for index in range(size)]

    # --- stages as functions to differentiate

    @cached_property
    def result_shapes(self) -> Any:
        """Shapes of a stage's wire, loss, and outputs with statistics."""
        wire, micro, first = self.empty_wire(), self.micro(0), jnp.int32(0)
        operands = (self.chunk(0), self.shared, wire, micro, first)
        return jax.eval_shape(self.stages.runs[0], *operands)

    def _run(
        self,
        run: int,
        weights: tuple[Tree, Tree],
        inputs: tuple[Tree, Tree],
        micro: Tree,
        stage: Array,
    ) -> tuple[tuple[Tree, Array], Any]:
        """A stage as a function of what it is differentiated by."""
        (own, shared), (wire, of_micro) = weights, inputs
        if self.stages.has_copies:
            copies = self.chunk(stage // self.schedule.stages)
            own = jax.tree.map(ParameterCopy.of, own, copies)
        leaves, tree = jax.tree.flatten(micro)
        micro = tree.unflatten([of_micro.get(i, leaf) for i, leaf in enumerate(leaves)])
        wire, loss, more = self.stages.runs[run](own, shared, wire, micro, stage)
        return (wire, loss), (loss, more)

    def _parameters_of(self, chunk: Array | int) -> tuple[Tree, Tree]:
        """What a virtual stage is differentiated by: its own and shared parameters."""
        return self._own_parameters(self.chunk(chunk)), self.shared

    def _own_parameters(self, weights: Tree) -> Tree:
        """Weights, and zeros in place of copies, whose values nothing reads there."""

        def parameter(weight: Array) -> Array:
            is_copy = weight.dtype.itemsize < jnp.dtype(jnp.float32).itemsize
            return jnp.zeros(weight.shape, jnp.float32) if is_copy else weight

        return jax.tree.map(parameter, weights) if self.stages.has_copies else weights

    @cached_property
    def _split_backwards(self) -> list[SplitBackward]:
        """The split backward of each of the stages' functions."""
        wire, micro = self.empty_wire(), self.micro(0)
        weights = self._parameters_of(0)
        inputs = (wire, self._differentiated(micro))
        arguments = (weights, inputs, (wire, self.seed), micro, jnp.int32(0))
        return [
            split_backward(partial(self._run, run), *arguments)
            for run in range(len(self.stages.runs))
        ]

    @cached_property
    def _residual_slots(self) -> Packing[jax.ShapeDtypeStruct]:
        """The slots of the functions' residuals; several functions share a slot."""
        return Packing.of([split.residuals for split in self._split_backwards])

    # --- sums

    def _with_results(
        self, sums: Gradients, number: Array, results: Any, *, is_last: Array
    ) -> Gradients:
        loss, (out, statistics) = results
        outputs = sums.outputs
        if self.keep_outputs:
            outputs = store(outputs, out, jnp.where(is_last, number, -1))
        return replace(
            sums,
            loss=sums.loss + loss,
            statistics=add(sums.statistics, statistics),
            outputs=outputs,
        )

    def _with_weights(
        self, sums: Gradients, chunk: Array, weights: Tree, shared: Tree
    ) -> Gradients:
        weights = self.stages.constrain_weights(weights)
        add_chunk = partial(add_to_row, index=chunk)
        return replace(
            sums,
            weights=jax.tree.map(add_chunk, sums.weights, weights),
            shared=add(sums.shared, shared),
        )

    # --- parts of the device's arrays

    @property
    def last_stage(self) -> int:
        """The number of the last virtual stage."""
        return self.schedule.virtual_stages - 1

    def stage_of(self, chunk: Array) -> Array:
        """The virtual stage of one of the device's chunks."""
        return chunk * self.schedule.stages + self.index

    def chunk(self, chunk: Array | int) -> Tree:
        """The weights of one of the device's virtual stages."""
        return jax.tree.map(partial(row_of, index=chunk), self.weights)

    def micro(self, number: Array | int) -> Tree:
        """One microbatch."""
        return jax.tree.map(partial(row_of, index=number), self.micros)

    def empty_wire(self) -> Tree:
        """A wire of zeros."""
        return self.stages.constrain_wire(zeros(self.stages.wire))

    def _differentiated(self, micro: Tree) -> dict[int, Array]:
        """The arrays of one or all microbatches whose gradients are wanted."""
        leaves = jax.tree.leaves(micro)
        return {i: leaves[i] for i in sorted(self.micro_gradients)}


def _unchanged(sums: Gradients) -> Gradients:
    return sums
