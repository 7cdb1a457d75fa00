# SPDX-License-Identifier: Apache-2.0
"""A pipeline's stages as functions of the arrays of one device.

Each is a forward that leaves residuals, a backward that reads them, and, where the
schedule splits the backward, the gradients of weights; see ``stage_gradient.py``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from tessera.foundations.tree import Tree, zeros
from tessera.graph.pipelining.ring_buffers import row_of
from tessera.graph.pipelining.schedule_table import Schedule
from tessera.graph.pipelining.stage_gradient import StageGradient, stage_gradient
from tessera.graph.pipelining.stage_packing import Packing
from tessera.ops.wide_gradients import ParameterCopy


@dataclass(frozen=True)
class Stages:
    """The functions of all virtual stages.

    Attributes:
      runs: One function for all virtual stages, or one for each of them:
        ``(weights, shared, wire, micro, index) -> (wire, loss, more)``. ``weights`` are
        one virtual stage's own, ``shared`` those that several stages read; ``micro``
        is one microbatch, ``index`` the virtual stage, an int32 scalar. The
        first stage takes its input from ``micro`` and ignores the wire. ``loss`` is
        what the stage adds to the microbatch's f32 loss. ``more`` are the last stage's
        outputs, zeros at the others, and statistics: a tree of f32 arrays, which are
        summed over microbatches and stages.
      wire: Shapes and dtypes of what a stage sends to the next, all floating-point.
      head: What follows on the last stage: ``(weights, shared, (wire, outputs), micro)
        -> (loss, statistics)``; None adds nothing. Its ``weights`` get no gradients.
      recomputes: Whether a backward runs its stage again, from the stored input. If
        not, the forward stores the residuals: those that JAX would save, except that
        nothing is stored that depends on weights alone, or is quick to compute.
      constrain_wire: Lays out a wire over the mesh's other axes.
      constrain_weights: The same for a tree like one virtual stage's weights.
      has_copies: Whether narrow weights are copies of f32 parameters, so that their
        gradients are f32; the functions take a ``ParameterCopy`` for each then.
    """

    runs: Sequence[Callable[..., tuple[Tree, Array, tuple[Tree, Tree]]]]
    wire: Tree
    head: Callable[..., tuple[Array, Tree]] | None = None
    recomputes: bool = False
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

    def end(
        self, weights: Tree, shared: Tree, out: tuple[Tree, Tree], micro: Tree
    ) -> tuple[Array, Tree]:
        """Loss and statistics of the head."""
        if self.head is None:
            return jnp.zeros(()), {}
        return self.head(weights, shared, out, micro)


@dataclass(frozen=True)
class DeviceStages:
    """The stages of one device in the SPMD region; arrays are its own shards.

    Attributes:
      schedule: The table.
      stages: The stages.
      weights: Those of its own virtual stages, ``[chunks, ...]``.
      shared: Weights that all stages read.
      micros: All microbatches, ``[M, ...]``.
      seed: f32 scalar, the cotangent of each microbatch's loss.
      micro_gradients: Leaves of the microbatches whose gradients are wanted, by number.
    """

    schedule: Schedule
    stages: Stages
    weights: Tree
    shared: Tree
    micros: Tree
    seed: Array
    micro_gradients: frozenset[int] = frozenset()

    def forward(
        self, stage: Array | int, number: Array, wire: Tree
    ) -> tuple[tuple[Tree, Tree], tuple[Array, Tree], list[Array]]:
        """One stage on one microbatch.

        Args:
          stage: Which virtual stage; an ``int`` where it is known in the trace.
          number: Which microbatch.
          wire: What the stage before has sent.

        Returns:
          The wire and outputs; loss and statistics; and the residuals, packed.
        """
        micro, weights = self.micro(number), self.parameters_of(self._chunk_of(stage))
        index = jnp.int32(stage) if isinstance(stage, int) else stage

        def run(number: int, weights: Tree, wire: Tree) -> Any:
            inputs = wire, self.differentiated(micro)
            out, results, residuals = self._gradients[number].forward(
                weights, inputs, micro, index
            )
            empty = zeros(list(self.residuals.slots))
            return out[:2], results, self.residuals.pack(number, residuals, empty)

        if isinstance(stage, int):
            return run(min(stage, len(self.stages.runs) - 1), weights, wire)
        return self.stages.each(stage, run, weights, wire)

    def head(
        self, chunk: Array, number: Array, out: tuple[Tree, Tree]
    ) -> tuple[Any, Any]:
        """The head on one microbatch, and the gradient of its loss.

        Returns:
          Loss and statistics; the gradients of ``out``, of the shared weights, and of
          the arrays of the microbatch.
        """
        micro, weights = self.micro(number), self.chunk(chunk)

        def loss(out: Any, shared: Tree, of_micro: dict[int, Array]) -> Any:
            loss, more = self.stages.end(
                weights, shared, out, _with_leaves(micro, of_micro)
            )
            return loss, (loss, more)

        operands = out, self.shared, self.differentiated(micro)
        _, pull_back, results = jax.vjp(loss, *operands, has_aux=True)
        return results, pull_back(self.seed)

    def backward(
        self, stage: Array, number: Array, residuals: list[Any], cotangent: Tree
    ) -> tuple[tuple[Tree, Tree], Tree]:
        """The backward of one stage.

        Args:
          stage: Which virtual stage.
          number: Which microbatch.
          residuals: From ``forward``.
          cotangent: Of its wire and outputs.

        Returns:
          The gradients of the wire and of the microbatch; and those of the stage's own
          and of shared weights, or, where the backward is split, packed residuals.
        """
        micro, weights = self.micro(number), self.parameters_of(self._chunk_of(stage))

        def run(number: int, weights: Tree, residuals: list[Any], sent: Any) -> Any:
            own = self.residuals.unpack(number, residuals)
            back, rest = self._gradients[number].backward(
                own, weights, (*sent, self.seed), micro, stage
            )
            if self.schedule.splits_backward:
                empty = zeros(list(self.weight_residuals.slots))
                rest = self.weight_residuals.pack(number, rest, empty)
            return back, rest

        return self.stages.each(stage, run, weights, residuals, cotangent)

    def weight_gradients(
        self, stage: Array, number: Array, residuals: list[Any]
    ) -> tuple[Tree, Tree]:
        """Gradients of a stage's own and of shared weights, by a split backward's."""
        micro, weights = self.micro(number), self.parameters_of(self._chunk_of(stage))

        def run(number: int, weights: Tree, residuals: list[Any]) -> Any:
            own = self.weight_residuals.unpack(number, residuals)
            gradient = self._gradients[number]
            return gradient.weight_gradients(own, weights, micro, stage)

        return self.stages.each(stage, run, weights, residuals)

    # --- what the functions are made of

    @cached_property
    def _gradients(self) -> list[StageGradient]:
        """Each of the stages' functions, and its gradient."""
        micro, first = self.micro(0), jnp.int32(0)
        inputs = self.empty_wire(), self.differentiated(micro)
        return [
            stage_gradient(
                partial(self._run, run),
                self.parameters_of(0),
                inputs,
                *(micro, first),
                splits_backward=self.schedule.splits_backward,
            )
            for run in range(len(self.stages.runs))
        ]

    @cached_property
    def residuals(self) -> Packing[jax.ShapeDtypeStruct]:
        """The slots of what a forward leaves; several functions share a slot."""
        return Packing.of([gradient.residuals for gradient in self._gradients])

    @cached_property
    def weight_residuals(self) -> Packing[jax.ShapeDtypeStruct]:
        """The slots of what a split backward leaves."""
        return Packing.of([gradient.weight_residuals for gradient in self._gradients])

    @cached_property
    def result_shapes(self) -> Any:
        """Shapes of a stage's wire, loss, and outputs with statistics."""
        wire, micro, first = self.empty_wire(), self.micro(0), jnp.int32(0)
        operands = (self.chunk(0), self.shared, wire, micro, first)
        return jax.eval_shape(self.stages.runs[0], *operands)

    @cached_property
    def statistics(self) -> Tree:
        """Shapes of the statistics: of all stages, and of the head."""
        wire, _, (outputs, statistics) = self.result_shapes
        operands = self.chunk(0), self.shared, (wire, outputs), self.micro(0)
        return statistics, jax.eval_shape(self.stages.end, *operands)[1]

    def _run(
        self,
        run: int,
        weights: tuple[Tree, Tree],
        inputs: tuple[Tree, Tree],
        micro: Tree,
        stage: Array,
    ) -> tuple[tuple[Tree, Tree, Array], Any]:
        """A stage as a function of what it is differentiated by."""
        (own, shared), (wire, of_micro) = weights, inputs
        if self.stages.has_copies:
            copies = self.chunk(self._chunk_of(stage))
            own = jax.tree.map(ParameterCopy.of, own, copies)
        micro = _with_leaves(micro, of_micro)
        wire, loss, more = self.stages.runs[run](own, shared, wire, micro, stage)
        outputs, statistics = more
        return (wire, outputs, loss), (loss, statistics)

    def parameters_of(self, chunk: Array | int) -> tuple[Tree, Tree]:
        """What a virtual stage is differentiated by: its own and shared parameters."""
        return self.own_parameters(self.chunk(chunk)), self.shared

    def own_parameters(self, weights: Tree) -> Tree:
        """Weights, and zeros in place of copies, whose values nothing reads there."""

        def parameter(weight: Array) -> Array:
            is_copy = weight.dtype.itemsize < jnp.dtype(jnp.float32).itemsize
            return jnp.zeros(weight.shape, jnp.float32) if is_copy else weight

        return jax.tree.map(parameter, weights) if self.stages.has_copies else weights

    # --- parts of the device's arrays

    @property
    def last(self) -> int:
        """The number of the last virtual stage."""
        return self.schedule.virtual_stages - 1

    def _chunk_of(self, stage: Array | int) -> Array | int:
        return stage // self.schedule.stages

    def chunk(self, chunk: Array | int) -> Tree:
        """The weights of one of the device's virtual stages."""
        return jax.tree.map(partial(row_of, index=chunk), self.weights)

    def micro(self, number: Array | int) -> Tree:
        """One microbatch."""
        return jax.tree.map(partial(row_of, index=number), self.micros)

    def empty_wire(self) -> Tree:
        """A wire of zeros."""
        return self.stages.constrain_wire(zeros(self.stages.wire))

    def differentiated(self, micro: Tree) -> dict[int, Array]:
        """The arrays of one or all microbatches whose gradients are wanted."""
        leaves = jax.tree.leaves(micro)
        return {i: leaves[i] for i in sorted(self.micro_gradients)}


def _with_leaves(micro: Tree, some: dict[int, Array]) -> Tree:
    """A microbatch with some of its leaves, by number, in place of its own."""
    leaves, tree = jax.tree.flatten(micro)
    return tree.unflatten([some.get(i, leaf) for i, leaf in enumerate(leaves)])
