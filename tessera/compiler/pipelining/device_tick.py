# SPDX-License-Identifier: Apache-2.0
"""What one device of a pipeline does in one tick of the loop.

It files what arrived, then does the forward, the backward and the weight gradient that
its row of the table names, each behind a ``lax.cond``, and passes results on. All of it
is inside a region that is manual over the pipeline's axis.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from tessera.compiler.pipelining.ring_buffers import (
    added,
    kept_in,
    plus_row,
    read,
    ring,
    row_of,
    zeros,
)
from tessera.compiler.pipelining.schedule_table import Schedule
from tessera.compiler.pipelining.stage_packing import Packing
from tessera.compiler.pipelining.weight_gradients import SplitBackward, split_backward
from tessera.tree import Tree

Row: TypeAlias = dict[str, Array]


@dataclass(frozen=True)
class Stages:
    """All the stages of a pipeline as one function of which of them to run.

    Attributes:
      run: ``(weights, shared, wire, micro, index) -> (wire, loss, more)``. ``weights``
        are one virtual stage's own, ``shared`` those that several stages read;
        ``micro`` is one microbatch, ``index`` the virtual stage, an int32 scalar. The
        first stage takes its input from ``micro`` and ignores the wire. ``loss`` is the
        stage's part of the microbatch's f32 loss, mostly 0 but at the last. ``more``
        are the last stage's outputs, zeros at the others, and statistics: a tree of
        f32 arrays, which are summed over microbatches and stages. Where stages differ,
        ``index`` is a Python number.
      wire: Shapes and dtypes of what a stage hands to the next, all floating-point.
      constrain_wire: Lays out a wire over the mesh's other axes.
      constrain_weights: The same for a tree like one virtual stage's weights.
      kinds: 1 where all virtual stages are one program, or as many as they are.
    """

    run: Callable[..., tuple[Tree, Array, tuple[Tree, Tree]]]
    wire: Tree
    constrain_wire: Callable[[Tree], Tree] = lambda wire: wire
    constrain_weights: Callable[[Tree], Tree] = lambda weights: weights
    kinds: int = 1

    def each(self, index: Array, work: Callable[..., Tree], *operands: Tree) -> Tree:
        """``work(index, *operands)``, in a branch for each kind of stage.

        The branches are outside of what is differentiated and split, so each keeps what
        its own stage needs, and puts off its own weight gradients.
        """
        if self.kinds == 1:
            return work(index, *operands)

        def branch(kind: int, *operands: Tree) -> Tree:
            # XLA wants the results of all branches laid out alike: none of them is a
            # layout that only one branch asks for.
            return jax.lax.optimization_barrier(work(kind, *operands))

        branches = [partial(branch, kind) for kind in range(self.kinds)]
        return jax.lax.switch(index, branches, *operands)


def _dataclass_tree(*fields: str) -> Callable[[type], type]:
    return partial(
        jax.tree_util.register_dataclass, data_fields=list(fields), meta_fields=[]
    )


@_dataclass_tree("loss", "statistics", "weights", "shared", "micros", "outputs")
@dataclass(frozen=True)
class Gradients:
    """What a pipelined step gives, each a sum over microbatches.

    Attributes:
      loss: f32 scalar.
      statistics: As the stages return them.
      weights: Like the weights, and split over the pipeline's axis as they are.
      shared: Like the shared weights.
      micros: Of the microbatches' arrays that were asked for, by leaf number.
      outputs: Of the last stage, ``[M, ...]``; None where not asked for.
    """

    loss: Any
    statistics: Tree
    weights: Tree
    shared: Tree
    micros: Tree
    outputs: Tree


@_dataclass_tree("activation", "cotangent", "inputs", "cotangents", "residuals", "sums")
@dataclass(frozen=True)
class Carry:
    """What a device holds between two ticks.

    Attributes:
      activation: The wire that arrived from the stage before.
      cotangent: The cotangent that arrived from the stage after.
      inputs: Ring of stage inputs that wait for their forward or their backward.
      cotangents: Ring of cotangents that wait for their backward.
      residuals: Ring of what weight gradients need from their backward.
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
    """One device in its region; arrays are what it holds of them.

    Attributes:
      schedule: The table.
      stages: What runs.
      axis: The pipeline's mesh axis.
      weights: Its own virtual stages', ``[chunks, ...]``.
      shared: What all stages read.
      micros: All microbatches, ``[M, ...]``.
      seed: f32 scalar, the cotangent of each microbatch's loss.
      micro_gradients: Leaves of the microbatches whose gradients are wanted, by number.
      keep_outputs: Whether the last stage's outputs are.
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
    def place(self) -> Array:
        """Its index along the axis, int32."""
        return jax.lax.axis_index(self.axis)

    def begin(self) -> Carry:
        """Empty rings and sums of zero."""
        slots, wire = self.schedule.slots, self._empty_wire()
        micros = self.schedule.microbatches
        outputs, statistics = self._shapes[2]
        sums = Gradients(
            loss=jnp.float32(0.0),
            statistics=zeros(statistics),
            weights=zeros(self.weights),
            shared=zeros(self.shared),
            micros=zeros(self._asked_for(self.micros)),
            outputs=ring(outputs, micros) if self.keep_outputs else None,
        )
        residuals: Tree = ()
        if self.schedule.splits_backward:
            residuals = ring(list(self._residuals.slots), slots.weight_slots)
        return Carry(
            activation=wire,
            cotangent=wire,
            inputs=ring(wire, slots.stash_slots),
            cotangents=ring(wire, slots.cotangent_slots),
            residuals=residuals,
            sums=sums,
        )

    def file_arrivals(self, carry: Carry, row: Row) -> Carry:
        """Keep what the last tick sent here, where the table has a slot for it."""
        inputs = kept_in(carry.inputs, carry.activation, row["receive_forward"])
        cotangents = kept_in(carry.cotangents, carry.cotangent, row["receive_backward"])
        return replace(carry, inputs=inputs, cotangents=cotangents)

    def forward(self, carry: Carry, row: Row) -> Tree:
        """What this tick's forward hands on; the last stage's runs in its backward."""
        stage = self._index(row["forward_chunk"])

        def work() -> Tree:
            wire = read(carry.inputs, row["forward_slot"])
            micro = self._micro(row["forward_micro"])
            weights = self._chunk(row["forward_chunk"])

            def run(kind: Any, weights: Tree, wire: Tree) -> Tree:
                return self.stages.run(weights, self.shared, wire, micro, kind)[0]

            wire = self.stages.each(stage, run, weights, wire)
            return self.stages.constrain_wire(wire)

        wanted = (row["forward_micro"] >= 0) & (stage < self._last)
        return jax.lax.cond(wanted, work, self._empty_wire)

    def backward(self, carry: Carry, row: Row) -> tuple[Carry, Tree]:
        """The sums with this tick's backward, and the cotangent that it hands on."""
        stage = self._index(row["backward_chunk"])

        def work(sums: Gradients, residuals: Tree) -> tuple[Gradients, Tree, Tree]:
            arrived = read(carry.cotangents, row["cotangent_slot"])
            nothing_after = partial(jnp.where, stage == self._last, 0)
            cotangent = jax.tree.map(nothing_after, arrived)
            wire = read(carry.inputs, row["backward_slot"])
            task = (row["backward_chunk"], row["backward_micro"], wire, cotangent)
            if self.schedule.splits_backward:
                sums, kept, back = self._first_half(task, sums)
                residuals = kept_in(residuals, kept, row["keep_slot"])
            else:
                sums, back = self._whole(task, sums)
            return sums, residuals, self.stages.constrain_wire(back)

        def rest(sums: Gradients, residuals: Tree) -> tuple[Gradients, Tree, Tree]:
            return sums, residuals, self._empty_wire()

        wanted = row["backward_micro"] >= 0
        sums, residuals, back = jax.lax.cond(
            wanted, work, rest, carry.sums, carry.residuals
        )
        return replace(carry, sums=sums, residuals=residuals), back

    def weigh(self, carry: Carry, row: Row) -> Carry:
        """The sums with this tick's weight gradient, where backwards are split."""
        chunk, number = row["weight_chunk"], row["weight_micro"]

        def work(sums: Gradients) -> Gradients:
            kept, index = read(carry.residuals, row["weight_slot"]), self._index(chunk)
            micro = self._micro(number)

            def gradients(kind: Any, kept: Tree, weights: Tree) -> Tree:
                place = self._place_of(kind)
                kept = self._residuals.unpack(place, kept)
                split = self._halves[place]
                return split.weight_gradients(kept, weights, micro, index)

            weights = (self._chunk(chunk), self.shared)
            found = self.stages.each(index, gradients, kept, weights)
            return self._with_weights(sums, chunk, *found)

        wanted = number >= 0
        return replace(carry, sums=jax.lax.cond(wanted, work, _same, carry.sums))

    def passed_on(self, carry: Carry, activation: Tree, cotangent: Tree) -> Carry:
        """The carry with what the neighbors sent; every device takes part.

        None is what no device sends in this tick.
        """
        if activation is not None:
            arrived = jax.lax.ppermute(activation, self.axis, self._ring)
            carry = replace(carry, activation=arrived)
        if cotangent is not None:
            back = [(after, before) for before, after in self._ring]
            arrived = jax.lax.ppermute(cotangent, self.axis, back)
            carry = replace(carry, cotangent=arrived)
        return carry

    def forward_only(self) -> tuple[Tree, Array, Tree]:
        """Outputs of the last stage, loss and statistics, over all microbatches.

        What arrives is used at once, so nothing is kept: step ``i`` of device ``s`` is
        in tick ``i + s``, through groups of as many microbatches as there are stages.
        """
        size, chunks = self.schedule.stages, self.schedule.chunks
        count = jax.tree.leaves(self.micros)[0].shape[0]
        groups, empty = -(-count // size) if chunks > 1 else 1, self._empty_wire()
        steps = groups * size * chunks if chunks > 1 else count

        def tick(carry: Tree, number: Array) -> tuple[Tree, None]:
            arrived, outputs, sums = carry
            step = number - self.place
            group, chunk = step // (size * chunks), (step // size) % chunks
            micro, stage = group * size + step % size, self._index(chunk)
            if chunks == 1:
                micro = step

            @jax.checkpoint
            def work(arrived: Tree) -> tuple[Tree, Array, tuple[Tree, Tree]]:
                weights, micros = self._chunk(chunk), self._micro(micro)

                def run(kind: Any, weights: Tree, arrived: Tree) -> Tree:
                    return self.stages.run(weights, self.shared, arrived, micros, kind)

                return self.stages.each(stage, run, weights, arrived)

            def rest(arrived: Tree) -> Any:
                return empty, *zeros(self._shapes[1:])

            wanted = (step >= 0) & (step < steps) & (micro < count)
            wire, loss, (out, more) = jax.lax.cond(wanted, work, rest, arrived)
            is_last = wanted & (stage == self._last)
            outputs = kept_in(outputs, out, jnp.where(is_last, micro, -1))
            arrived = jax.lax.ppermute(wire, self.axis, self._ring)
            return (arrived, outputs, added(sums, (loss, more))), None

        loss, (outputs, statistics) = self._shapes[1:]
        begin = (empty, ring(outputs, count), zeros((loss, statistics)))
        ticks = jnp.arange(steps + size - 1)
        _, outputs, sums = jax.lax.scan(tick, begin, ticks)[0]
        return jax.lax.psum((outputs, *sums), self.axis)

    @cached_property
    def _shapes(self) -> Any:
        """What a stage gives."""

        def first(*operands: Tree) -> Tree:
            return self.stages.run(*operands, 0)

        wire, micro = self._empty_wire(), self._micro(0)
        return jax.eval_shape(first, self._chunk(0), self.shared, wire, micro)

    @property
    def _ring(self) -> list[tuple[int, int]]:
        """Each device, and the one that has the next virtual stage."""
        size = self.schedule.stages
        return [(place, (place + 1) % size) for place in range(size)]

    def _run(
        self,
        weights: tuple[Tree, Tree],
        given: tuple[Tree, Tree],
        micro: Tree,
        k: Any,
    ) -> tuple[tuple[Tree, Array], Any]:
        """A stage as a function of what it is differentiated by."""
        (own, shared), (wire, asked) = weights, given
        micro = _merged(micro, asked)
        wire, loss, more = self.stages.run(own, shared, wire, micro, k)
        return (wire, loss), (loss, more)

    def _whole(self, task: Any, sums: Gradients) -> tuple[Gradients, Tree]:
        """All gradients of one stage, which runs anew."""
        chunk, number, wire, cotangent = task
        micro, index = self._micro(number), self._index(chunk)

        def gradients(kind: Any, weights: Tree, given: Tree, cotangent: Tree) -> Tree:
            def run(weights: Tree, given: Tree) -> Any:
                return self._run(weights, given, micro, kind)

            _, pull_back, more = jax.vjp(run, weights, given, has_aux=True)
            return *pull_back((cotangent, self.seed)), more

        weights = (self._chunk(chunk), self.shared)
        given = (wire, self._asked_for(micro))
        found = self.stages.each(index, gradients, weights, given, cotangent)
        weights, (back, asked), more = found
        sums = self._with_outputs(sums, chunk, number, more)
        sums = self._with_weights(sums, chunk, *weights)
        return self._with_micros(sums, number, asked), back

    @cached_property
    def _halves(self) -> list[SplitBackward]:
        """The backward of each kind of stage in two, for the forms of its arguments."""
        wire, micro = self._empty_wire(), self._micro(0)
        weights, given = (self._chunk(0), self.shared), (wire, self._asked_for(micro))
        arguments = (weights, given, (wire, self.seed), micro, jnp.int32(0))
        if self.stages.kinds == 1:
            return [split_backward(self._run, *arguments)]

        def of(kind: int) -> SplitBackward:
            def run(weights: Any, given: Any, micro: Tree, _: Array) -> Any:
                return self._run(weights, given, micro, kind)

            return split_backward(run, *arguments)

        return [of(kind) for kind in range(self.stages.kinds)]

    @cached_property
    def _residuals(self) -> Packing[jax.ShapeDtypeStruct]:
        """Where the residuals of each kind of stage lie; one slot serves several."""
        return Packing.of([half.residuals for half in self._halves])

    def _place_of(self, kind: Any) -> int:
        return kind if self.stages.kinds > 1 else 0

    def _first_half(self, task: Any, sums: Gradients) -> tuple[Gradients, Any, Tree]:
        """The gradient of a stage's input, and what that of its weights will need."""
        chunk, number, wire, cotangent = task
        micro, index = self._micro(number), self._index(chunk)

        def gradients(kind: Any, weights: Tree, given: Tree, cotangent: Tree) -> Tree:
            place = self._place_of(kind)
            back, kept, more = self._halves[place].input_gradients(
                weights, given, (cotangent, self.seed), micro, index
            )
            empty = zeros(list(self._residuals.slots))
            return back, self._residuals.pack(place, kept, empty), more

        weights = (self._chunk(chunk), self.shared)
        given = (wire, self._asked_for(micro))
        found = self.stages.each(index, gradients, weights, given, cotangent)
        (back, asked), kept, more = found
        sums = self._with_outputs(sums, chunk, number, more)
        return self._with_micros(sums, number, asked), kept, back

    def _with_outputs(
        self, sums: Gradients, chunk: Array, number: Array, found: Any
    ) -> Gradients:
        loss, (out, statistics) = found
        outputs = sums.outputs
        if self.keep_outputs:
            last = self._index(chunk) == self._last
            outputs = kept_in(outputs, out, jnp.where(last, number, -1))
        return replace(
            sums,
            loss=sums.loss + loss,
            statistics=added(sums.statistics, statistics),
            outputs=outputs,
        )

    def _with_weights(
        self, sums: Gradients, chunk: Array, weights: Tree, shared: Tree
    ) -> Gradients:
        weights = self.stages.constrain_weights(weights)
        return replace(
            sums,
            weights=jax.tree.map(partial(plus_row, index=chunk), sums.weights, weights),
            shared=added(sums.shared, shared),
        )

    def _with_micros(self, sums: Gradients, number: Array, floats: Tree) -> Gradients:
        add = partial(plus_row, index=number)
        return replace(sums, micros=jax.tree.map(add, sums.micros, floats))

    @property
    def _last(self) -> int:
        return self.schedule.virtual_stages - 1

    def _index(self, chunk: Array) -> Array:
        return chunk * self.schedule.stages + self.place

    def _chunk(self, chunk: Array | int) -> Tree:
        return jax.tree.map(partial(row_of, index=chunk), self.weights)

    def _micro(self, number: Array | int) -> Tree:
        return jax.tree.map(partial(row_of, index=number), self.micros)

    def _asked_for(self, micro: Tree) -> dict[int, Array]:
        """The arrays of one or all microbatches whose gradients are wanted."""
        leaves = jax.tree.leaves(micro)
        return {i: leaves[i] for i in sorted(self.micro_gradients)}

    def _empty_wire(self) -> Tree:
        return self.stages.constrain_wire(zeros(self.stages.wire))


def _same(sums: Gradients) -> Gradients:
    return sums


def _merged(micro: Tree, asked: dict[int, Array]) -> Tree:
    leaves, tree = jax.tree.flatten(micro)
    return tree.unflatten([asked.get(i, leaf) for i, leaf in enumerate(leaves)])
