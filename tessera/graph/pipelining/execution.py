# SPDX-License-Identifier: Apache-2.0
"""A pipelined call, and the way from its output to a loss, as stages of the loop.

Stages of users differ from each other, and one program runs on all devices: a switch on
the virtual stage picks the branch, and weights and activations lie in slots that the
stages share by form.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from tessera import _jax, scope
from tessera.graph.pipelining.device import Stages
from tessera.graph.pipelining.loop import Pipeline
from tessera.graph.pipelining.mark import PipelineCall
from tessera.graph.pipelining.packing import Packing, zeros
from tessera.graph.pipelining.separating import Separated
from tessera.graph.pipelining.stage_weights import StageWeights, WeightForm
from tessera.graph.rewriting import Environment
from tessera.graph.tracing.declarations import DATA_AXES

Tree: TypeAlias = Any
Tail: TypeAlias = Callable[[Sequence[Any], Sequence[Any], Tree], Array]


@dataclass(frozen=True)
class Operands:
    """What a pipelined call runs on.

    Attributes:
      inputs: Whole batches, and what has no rows.
      weights: Of all stages.
      rows: Whole arrays that the way to the loss reads row by row, with their dims.
      wholes: What it reads as it is.
      coefficients: Of the sums over rows in the loss.
      differentiated: For each of the inputs and then of the rows, whether the loss is
        differentiated by something that it depends on.
    """

    inputs: Sequence[Any]
    weights: Sequence[Any]
    rows: Sequence[tuple[Any, int]] = ()
    wholes: Sequence[Any] = ()
    coefficients: Sequence[Any] = ()
    differentiated: Sequence[bool] = ()


@dataclass(frozen=True)
class Execution:
    """One pipelined call.

    Attributes:
      call: What is to be run.
      tail: The way from its output to the loss; None where there is no loss.
    """

    call: PipelineCall
    tail: Separated | None = None

    def outputs(self, operands: Operands) -> list[Array]:
        """The whole batch's outputs, forward only; JAX can differentiate it."""
        slots, shared, micros, constants = self._taken_apart(operands)
        outputs, _, _ = self._pipeline(constants).outputs(slots, shared, micros)
        return [self.joined(array, 0) for array in outputs]

    def loss(self, operands: Operands, *, keep_outputs: bool) -> tuple[Array, Any]:
        """The sums in the loss, times their coefficients; and the outputs, if wanted.

        JAX can differentiate the first by everything of floating point; its gradients
        come out of the loop that computes it.
        """
        slots, shared, micros, constants = self._taken_apart(operands)
        by_row = [*self.call.by_row, *(True for _ in operands.rows)]
        pairs = zip(operands.differentiated, by_row, strict=True)
        asked = [wanted for wanted, row in pairs if row]
        leaves = enumerate(jax.tree.leaves(micros))
        wanted = frozenset(i for i, x in leaves if asked[i] and _is_float(x))
        run = _with_gradients(self._pipeline(constants), wanted, keep_outputs)
        total, outputs = run(slots, shared, micros)
        if not keep_outputs:
            return total, None
        return total, [self.joined(array, 0) for array in outputs]

    def _taken_apart(self, operands: Operands) -> tuple[Any, Any, Any, Any]:
        """Slots of weights, what all stages read, microbatches, and constants."""
        own = [
            [operands.weights[number] for number in numbers]
            for numbers in self._own_weights
        ]
        floats, others = _by_dtype(
            [operands.weights[number] for number in self._shared_weights]
        )
        wholes, whole_others = _by_dtype(operands.wholes)
        shared = {
            "weights": floats,
            "wholes": wholes,
            "coefficients": list(operands.coefficients),
        }
        by_row = zip(operands.inputs, self.call.by_row, strict=True)
        micros = {
            "inputs": {i: self.split(x, 0) for i, (x, row) in enumerate(by_row) if row},
            "rows": [self.split(array, dim) for array, dim in operands.rows],
        }
        by_row = zip(operands.inputs, self.call.by_row, strict=True)
        constants = {
            "inputs": {i: x for i, (x, row) in enumerate(by_row) if not row},
            "weights": others,
            "wholes": whole_others,
        }
        return self._stage_weights.gather(own), shared, micros, constants

    def split(self, array: Array, dim: int) -> Array:
        """``[M, ...]`` of an array whose dim counts rows.

        Each device's rows are cut by themselves, so none changes its device.
        """
        parts, shape = self._data_parts(array.shape[dim]), array.shape
        array = array.reshape(*shape[:dim], parts, self._count, -1, *shape[dim + 1 :])
        array = jnp.moveaxis(array, dim + 1, 0)
        array = array.reshape(self._count, *shape[:dim], -1, *shape[dim + 1 :])
        return self._held(array, dim + 1)

    def joined(self, array: Array, dim: int) -> Array:
        """The other way round."""
        rows = array.shape[dim + 1] * self._count
        parts, shape = self._data_parts(rows), array.shape[1:]
        array = array.reshape(self._count, *shape[:dim], parts, -1, *shape[dim + 1 :])
        array = jnp.moveaxis(array, 0, dim + 1)
        return self._held(array.reshape(*shape[:dim], rows, *shape[dim + 1 :]), dim)

    def _data_parts(self, rows: int) -> int:
        axes = [axis for axis in DATA_AXES if axis in self.call.mesh.axes]
        parts = self.call.mesh.axis_size(axes)
        return parts if rows % (parts * self._count) == 0 else 1

    def _held(self, array: Array, dim: int) -> Array:
        """Rows over the mesh's data axes, where these divide them."""
        mesh = self.call.mesh
        axes = tuple(axis for axis in DATA_AXES if axis in mesh.axes)
        if not axes or array.shape[dim] % mesh.axis_size(axes):
            return array
        return scope.constrain(array, mesh, PartitionSpec(*[None] * dim, axes))

    @property
    def _count(self) -> int:
        return self.call.schedule.microbatches

    # --- which weights and values are whose

    @cached_property
    def _readers(self) -> Counter[int]:
        cuts = self.call.staged.cuts
        return Counter(number for cut in cuts for number in cut.weights)

    def _is_own(self, number: int) -> bool:
        atom = _jax.inputs(self.call.staged.program)[self._first_weight + number]
        return self._readers[number] == 1 and _is_float(atom.aval)

    @property
    def _first_weight(self) -> int:
        return self.call.staged.num_inputs

    @cached_property
    def _own_weights(self) -> list[list[int]]:
        """For each stage, the weights that it alone reads."""
        cuts = self.call.staged.cuts
        return [[n for n in cut.weights if self._is_own(n)] for cut in cuts]

    @cached_property
    def _shared_weights(self) -> list[int]:
        return sorted(n for n in self._readers if not self._is_own(n))

    @cached_property
    def _stage_weights(self) -> StageWeights:
        atoms = _jax.inputs(self.call.staged.program)[self._first_weight :]
        forms = [
            [
                WeightForm(
                    atoms[n].aval.shape, atoms[n].aval.dtype.name, self.call.layouts[n]
                )
                for n in numbers
            ]
            for numbers in self._own_weights
        ]
        return StageWeights(Packing.of(forms), self.call.mesh, self.call.axis)

    @cached_property
    def _wires(self) -> Packing[Any]:
        """What passes between stages; nothing comes from the last."""
        cuts = self.call.staged.cuts
        return Packing.of(
            [[_jax.struct(v.aval) for v in cut.leaves] for cut in cuts[:-1]] + [[]]
        )

    # --- one stage on one microbatch

    def _pipeline(self, constants: Tree) -> Pipeline:
        call = self.call

        def run(
            weights: Any, shared: Any, wire: Any, micro: Any, index: Array
        ) -> tuple[Any, Array, Any]:
            branches = [
                self._branch(stage, shared, micro, constants)
                for stage in range(len(call.staged.cuts))
            ]
            return jax.lax.switch(index, branches, weights, wire)

        stages = Stages(
            run=run,
            wire=list(self._wires.slots),
            constrain_wire=lambda wires: [self._held(wire, 0) for wire in wires],
            constrain_weights=self._stage_weights.constrain,
        )
        return Pipeline(call.schedule, stages, call.mesh, call.axis)

    def _branch(
        self, stage: int, shared: Any, micro: Any, constants: Any
    ) -> Callable[..., Any]:
        staged = self.call.staged
        is_last = stage == len(staged.cuts) - 1
        shapes = [_jax.struct(v.aval) for v in _jax.outputs(staged.program)]

        def branch(slots: list[Array], wire: list[Array]) -> tuple[Any, Array, Any]:
            inputs = {**micro["inputs"], **constants["inputs"]}
            found = staged.run(
                stage,
                [inputs[i] for i in range(staged.num_inputs)],
                self._weights_of(stage, slots, shared["weights"], constants["weights"]),
                self._wires.unpack(stage - 1, wire) if stage else [],
            )
            loss, empty = jnp.float32(0.0), zeros(self._wires.slots)
            if not is_last:
                sent = self._wires.pack(stage, found, empty)
                return sent, loss, (zeros(shapes), {})
            if self.tail is not None:
                loss = self._loss(found, shared, micro["rows"], constants["wholes"])
            return empty, loss, (found, {})

        return branch

    def _weights_of(
        self, stage: int, slots: list[Array], floats: list[Any], others: list[Any]
    ) -> list[Any]:
        """All weights that a stage reads, in the order of its program."""
        own = self._stage_weights.packing.unpack(stage, slots)
        known = dict(zip(self._own_weights[stage], own, strict=True))
        atoms = _jax.inputs(self.call.staged.program)[self._first_weight :]
        rest = {True: iter(floats), False: iter(others)}
        for number in self._shared_weights:
            known[number] = next(rest[_is_float(atoms[number].aval)])
        return [known[number] for number in self.call.staged.cuts[stage].weights]

    def _loss(
        self, outputs: list[Array], shared: Any, rows: list[Array], others: list[Any]
    ) -> Array:
        """One microbatch's part of the loss."""
        tail = self.tail
        assert tail is not None
        values: dict[Any, Any] = dict(zip(tail.outputs, outputs, strict=True))
        values.update((v, x) for (_, v, _), x in zip(tail.rows, rows, strict=True))
        rest = {True: iter(shared["wholes"]), False: iter(others)}
        values.update((v, next(rest[_is_float(v.aval)])) for _, v in tail.wholes)
        env = Environment.of(values)
        env.run(tail.equations)
        sums = [env.read(v) for _, v in tail.sums]
        products = zip(shared["coefficients"], sums, strict=True)
        return sum((jnp.sum(a * s) for a, s in products), jnp.float32(0.0))


def _with_gradients(
    pipeline: Pipeline, wanted: frozenset[int], keep_outputs: bool
) -> Callable[..., Any]:
    """The pipeline's loss as a function whose gradients the same loop computes."""

    def gradients(slots: Any, shared: Any, micros: Any) -> Any:
        return pipeline.gradients(
            slots,
            shared,
            micros,
            jnp.float32(1.0),
            micro_gradients=wanted,
            keep_outputs=keep_outputs,
        )

    @jax.custom_vjp
    def run(slots: Any, shared: Any, micros: Any) -> tuple[Array, Any]:
        found = gradients(slots, shared, micros)
        return found.loss, found.outputs

    def forward(slots: Any, shared: Any, micros: Any) -> tuple[Any, Any]:
        found = gradients(slots, shared, micros)
        kept = (found.weights, found.shared, found.micros)
        return (found.loss, found.outputs), (kept, micros)

    def backward(kept: Any, cotangents: Any) -> tuple[Any, Any, Any]:
        (weights, shared, found), micros = kept
        seed = cotangents[0]
        scaled = jax.tree.map(seed.__mul__, (weights, shared))
        leaves, tree = jax.tree.flatten(micros)
        back = [
            found[i] * seed if i in found else _no_gradient(leaf)
            for i, leaf in enumerate(leaves)
        ]
        return *scaled, tree.unflatten(back)

    run.defvjp(forward, backward)
    return run


def _no_gradient(leaf: Any) -> Any:
    if _is_float(leaf):
        return jnp.zeros_like(leaf)
    return np.zeros(leaf.shape, jax.dtypes.float0)


def _is_float(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.floating)


def _by_dtype(arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Those of floating point, and the others."""
    return (
        [array for array in arrays if _is_float(array)],
        [array for array in arrays if not _is_float(array)],
    )
