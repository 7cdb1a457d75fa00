# SPDX-License-Identifier: Apache-2.0
"""Builds the loop's stages from a pipelined call and the computation of its loss.

A user's stages differ from each other, and one program runs on all devices: a switch on
the virtual stage selects the branch, and stages share slots for weights and activations
of one shape, dtype and layout.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from tessera.foundations.device_grid import DATA_AXES
from tessera.foundations.tree import Tree, zeros
from tessera.graph.pipelining import manual_axis
from tessera.graph.pipelining.device_stages import Stages
from tessera.graph.pipelining.loss_decomposition import LossDecomposition
from tessera.graph.pipelining.pipeline_primitive import PipelineCall
from tessera.graph.pipelining.schedule_loop import Pipeline
from tessera.graph.pipelining.stage_packing import Packing
from tessera.graph.pipelining.stage_weights import StageWeights, WeightForm
from tessera.graph.rewriting import Environment
from tessera.jax_compat import jaxprs
from tessera.ops.rematerialization import (
    FULL,
    NAMED,
    names_value,
    rule_of,
    save_unless_quick,
)
from tessera.tracing import scope


@dataclass(frozen=True)
class Operands:
    """The operands of a pipelined call.

    Attributes:
      inputs: Arrays of the whole batch.
      weights: What the stages read that has no batch dim.
      rows: Arrays that the loss reads row by row, with their batch dims.
      replicated: What the loss reads as it is.
      coefficients: Of the sums over rows in the loss.
      differentiated: For each of the inputs and then of the rows, whether the loss is
        differentiated by something that it depends on.
    """

    inputs: Sequence[Any]
    weights: Sequence[Any]
    rows: Sequence[tuple[Any, int]] = ()
    replicated: Sequence[Any] = ()
    coefficients: Sequence[Any] = ()
    differentiated: Sequence[bool] = ()


@dataclass(frozen=True)
class Execution:
    """One pipelined call.

    Attributes:
      call: The call.
      decomposition: Of its loss; None where there is no loss.
      scopes: The name scopes around the call.
    """

    call: PipelineCall
    decomposition: LossDecomposition | None = None
    scopes: Callable[[], AbstractContextManager[Any]] = nullcontext

    def outputs(self, operands: Operands) -> list[Array]:
        """The whole batch's outputs, forward only; JAX can differentiate it."""
        slots, shared, micros, constants = self._loop_operands(operands)
        outputs, _, _ = self._pipeline(constants).outputs(slots, shared, micros)
        return [self.merge(array) for array in outputs]

    def loss(self, operands: Operands, *, keep_outputs: bool) -> tuple[Array, Any]:
        """The sums in the loss, times their coefficients; and the outputs, if wanted.

        JAX can differentiate the first by every floating-point operand; the loop that
        computes it computes its gradients, too.
        """
        loop_operands = self._loop_operands(operands)
        leaves = enumerate(jax.tree.leaves(loop_operands[2]))
        is_wanted = operands.differentiated
        wanted = frozenset(i for i, x in leaves if is_wanted[i] and _is_float(x))
        run = _with_gradients(self._pipeline, wanted, keep_outputs)
        total, outputs = run(*loop_operands)
        if not keep_outputs:
            return total, None
        return total, [self.merge(array) for array in outputs]

    def _loop_operands(self, operands: Operands) -> tuple[Any, Any, Any, Any]:
        """Slots of weights, weights that stages share, microbatches, and constants."""
        own = [
            [operands.weights[number] for number in numbers]
            for numbers in self._own_weights
        ]
        micros = {
            "inputs": [self.split(array, 0) for array in operands.inputs],
            "rows": [self.split(array, dim) for array, dim in operands.rows],
        }
        same = {
            "weights": {n: operands.weights[n] for n in self._shared_weights},
            "replicated": dict(enumerate(operands.replicated)),
            "coefficients": dict(enumerate(operands.coefficients)),
        }
        shared, constants = (
            {name: _of_floats(arrays, wanted) for name, arrays in same.items()}
            for wanted in (True, False)
        )
        return self._stage_weights.gather(own), shared, micros, constants

    def split(self, array: Array, dim: int) -> Array:
        """``[M, rows, ...]`` of an array with a batch dim.

        Each device splits its own rows, so no row moves to another device.
        """
        array = jnp.moveaxis(array, dim, 0)
        parts, shape = self._data_parts(len(array)), array.shape[1:]
        array = array.reshape(parts, self._count, -1, *shape).swapaxes(0, 1)
        return self._constrain(array.reshape(self._count, -1, *shape), 1)

    def merge(self, array: Array) -> Array:
        """The inverse of ``split``; the batch dim comes first."""
        rows, shape = self._count * array.shape[1], array.shape[2:]
        parts = self._data_parts(rows)
        array = array.reshape(self._count, parts, -1, *shape).swapaxes(0, 1)
        return self._constrain(array.reshape(rows, *shape), 0)

    def _data_parts(self, rows: int) -> int:
        axes = [axis for axis in DATA_AXES if axis in self.call.mesh.axes]
        parts = self.call.mesh.axis_size(axes)
        return parts if rows % (parts * self._count) == 0 else 1

    def _constrain(self, array: Array, dim: int, *, inside: bool = False) -> Array:
        """An array with a dim sharded over the mesh's data axes, if they divide it."""
        mesh, manual = self.call.mesh, self.call.data_axes if inside else ()
        axes = tuple(a for a in DATA_AXES if a in mesh.axes and a not in manual)
        if not axes or array.ndim <= dim or array.shape[dim] % mesh.axis_size(axes):
            return array
        return scope.constrain(array, mesh, PartitionSpec(*[None] * dim, axes))

    @property
    def _count(self) -> int:
        return self.call.schedule.microbatches

    # --- weights and wires of each stage

    @cached_property
    def _readers(self) -> Counter[int]:
        stages = self.call.stages.jaxprs
        return Counter(number for jaxpr in stages for number in jaxpr.weights)

    def _is_own(self, number: int) -> bool:
        atom = jaxprs.inputs(self.call.stages.program)[self._first_weight + number]
        return self._readers[number] == 1 and _is_float(atom.aval)

    @property
    def _first_weight(self) -> int:
        return self.call.stages.num_inputs

    @cached_property
    def _own_weights(self) -> list[list[int]]:
        """For each stage, the weights that it alone reads."""
        stages = self.call.stages.jaxprs
        return [[n for n in jaxpr.weights if self._is_own(n)] for jaxpr in stages]

    @cached_property
    def _shared_weights(self) -> list[int]:
        return sorted(n for n in self._readers if not self._is_own(n))

    @cached_property
    def _stage_weights(self) -> StageWeights:
        atoms = jaxprs.inputs(self.call.stages.program)[self._first_weight :]
        forms = [
            [
                WeightForm(
                    atoms[n].aval.shape, atoms[n].aval.dtype.name, self.call.layouts[n]
                )
                for n in numbers
            ]
            for numbers in self._own_weights
        ]
        packing, call = Packing.of(forms), self.call
        numbers = call.schedule.stage_numbers
        return StageWeights(packing, call.mesh, call.axis, numbers)

    @cached_property
    def _wires(self) -> Packing[Any]:
        """What stages send; the last sends nothing."""
        stages = self.call.stages.jaxprs[:-1]
        sent = [[jaxprs.struct(v.aval) for v in jaxpr.sent] for jaxpr in stages]
        return Packing.of([*sent, []])

    # --- one stage on one microbatch

    def _pipeline(self, constants: Tree) -> Pipeline:
        call, count = self.call, len(self.call.stages.jaxprs)
        stages = Stages(
            runs=[partial(self._run, stage, constants) for stage in range(count)],
            wire=list(self._wires.slots),
            head=None if self.decomposition is None else partial(self._head, constants),
            recomputes=set(call.remat) == {FULL},
            constrain_wire=lambda wires: [
                self._constrain(wire, 0, inside=True) for wire in wires
            ],
            constrain_weights=self._stage_weights.constrain,
        )
        return Pipeline(call.schedule, stages, call.mesh, call.axis, call.data_axes)

    def _run(
        self,
        stage: int,
        constants: Tree,
        slots: Any,
        shared: Any,
        wire: Any,
        micro: Any,
        _: Array,
    ) -> tuple[Any, Array, Any]:
        staged = self.call.stages
        same = {name: {**shared[name], **constants[name]} for name in shared}
        received = self._wires.unpack(stage - 1, wire) if stage else []
        own = self._stage_weights.packing.unpack(stage, slots)
        weights = dict(zip(self._own_weights[stage], own, strict=True))
        weights |= same["weights"]
        own = [weights[number] for number in staged.jaxprs[stage].weights]
        with self.scopes():
            sent = self._rematerialized(stage)(micro["inputs"], own, received)
        empty = zeros(list(self._wires.slots))
        if stage == len(staged.jaxprs) - 1:
            return empty, jnp.zeros(()), (sent, {})
        outputs = [jaxprs.struct(v.aval) for v in jaxprs.outputs(staged.program)]
        wire = self._wires.pack(stage, sent, empty)
        return wire, jnp.zeros(()), (zeros(outputs), {})

    def _rematerialized(self, stage: int) -> Callable[..., Any]:
        """What a stage sends; its backward computes again what its policy drops."""
        run, policy = partial(self.call.stages.run, stage), self.call.remat[stage]
        if set(self.call.remat) == {FULL}:  # all of the stage, in the loop
            return run
        equations = self.call.stages.jaxprs[stage].equations
        if policy == NAMED and not any(map(names_value, equations)):
            policy = "dots"
        return jax.checkpoint(run, policy=rule_of(policy) or save_unless_quick)

    def _head(
        self, constants: Tree, _: Any, shared: Any, out: Any, micro: Any
    ) -> tuple[Array, Tree]:
        """One microbatch's part of the loss, from the last stage's outputs."""
        assert self.decomposition is not None
        same = {name: {**shared[name], **constants[name]} for name in shared}
        return _loss(self.decomposition, out[1], micro["rows"], same), {}


def _loss(
    decomposition: LossDecomposition, outputs: Any, rows: Sequence[Array], same: Any
) -> Array:
    """One microbatch's part of the loss."""
    outputs = [_repeat(array, decomposition.copies) for array in outputs]
    values: dict[Any, Any] = dict(zip(decomposition.outputs, outputs, strict=True))
    for (_, variable, dim), array in zip(decomposition.rows, rows, strict=True):
        values[variable] = jnp.moveaxis(_repeat(array, decomposition.copies), 0, dim)
    values.update(
        (v, same["replicated"][i]) for i, (_, v) in enumerate(decomposition.replicated)
    )
    env = Environment.of(values)
    for equation, atoms in decomposition.equations:
        operands = [env.read(atom) for atom in atoms]
        env.write(equation.outvars, manual_axis.apply(equation, operands))
    loss = jnp.zeros(())
    for number, (_, variable) in enumerate(decomposition.sums):
        part = jnp.sum(same["coefficients"][number] * env.read(variable))
        loss += part.astype(loss.dtype)
    return loss / decomposition.copies if decomposition.copies > 1 else loss


def _repeat(rows: Array, copies: int) -> Array:
    """Rows repeated as a whole."""
    return jnp.concatenate([rows] * copies) if copies > 1 else rows


def _with_gradients(
    pipeline: Callable[[Tree], Pipeline], wanted: frozenset[int], keep_outputs: bool
) -> Callable[..., Any]:
    """The pipeline's loss as a function whose gradients the same loop computes.

    JAX takes its gradient in a later trace, so it closes over no tracer of this one.
    """

    def gradients(slots: Any, shared: Any, micros: Any, constants: Any) -> Any:
        return pipeline(constants).gradients(
            slots,
            shared,
            micros,
            jnp.ones(()),
            micro_gradients=wanted,
            keep_outputs=keep_outputs,
        )

    @jax.custom_vjp
    def run(*operands: Any) -> tuple[Array, Any]:
        result = gradients(*operands)
        return result.loss, result.outputs

    def forward(*operands: Any) -> tuple[Any, Any]:
        result = gradients(*operands)
        residuals = (result.weights, result.shared, result.micros)
        return (result.loss, result.outputs), (residuals, *operands[2:])

    def backward(residuals: Any, cotangents: Any) -> tuple[Any, ...]:
        (weights, shared, of_micros), micros, constants = residuals
        seed = cotangents[0]
        leaves, tree = jax.tree.flatten(micros)
        back = [
            _times(of_micros[i], seed) if i in of_micros else _no_gradient(leaf)
            for i, leaf in enumerate(leaves)
        ]
        scaled = jax.tree.map(partial(_times, factor=seed), (weights, shared))
        return *scaled, tree.unflatten(back), jax.tree.map(_no_gradient, constants)

    run.defvjp(forward, backward)
    return run


def _times(gradient: Array, factor: Array) -> Array:
    return gradient * factor.astype(gradient.dtype)


def _no_gradient(leaf: Any) -> Any:
    if _is_float(leaf):
        return jnp.zeros_like(leaf)
    return np.zeros(leaf.shape, jax.dtypes.float0)


def _is_float(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.floating)


def _of_floats(arrays: dict[int, Any], wanted: bool) -> dict[int, Any]:
    """The arrays that have gradients, or those that have none."""
    return {i: array for i, array in arrays.items() if _is_float(array) == wanted}
