# SPDX-License-Identifier: Apache-2.0
"""Splits a stage's backward: the gradient of its input, then those of its weights.

The stage before waits for the gradient of this stage's input; no stage waits for those
of its weights. Zero-bubble schedules (Qi et al. 2023, arXiv 2401.10241) compute the
first at once and the second when a device would stand idle. To JAX both are one
program:

    backward      for each layer:           h, a = layer(w, h)        the forward, again
                  for each layer, back:     g = g · wᵀ,   dw = aᵀ · g

It is split by its outputs (``partial_evaluation.py``):

    known         for each layer:           h, a = layer(w, h)
                  for each layer, back:     g = g · wᵀ
                                                        residuals: every a, every g
    unknown       for each layer, back:     dw = aᵀ · g

The split needs no help from the stage: what it consists of, and what it rematerializes,
does not matter. Calls (``jit``, custom derivatives, remat) are inlined first, in the
bodies of loops too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tessera.foundations.primitive_properties import CALLS
from tessera.foundations.tree import Tree
from tessera.graph.pipelining.partial_evaluation import (
    RESIDUAL,
    SplitProgram,
    split_outputs,
)
from tessera.graph.rewriting import (
    at_line_of,
    bind_with_nested,
    interpret,
    variables,
)
from tessera.jax_compat import jaxprs, primitives


@dataclass(frozen=True)
class SplitBackward:
    """A stage's backward in two parts.

    Attributes:
      residuals: Shape and dtype of each array that ``weight_gradients`` takes from
        ``input_gradients``.
    """

    residuals: tuple[jax.ShapeDtypeStruct, ...]
    _programs: SplitProgram
    _constants: tuple[Any, ...]
    _weights: jax.tree_util.PyTreeDef
    _results: jax.tree_util.PyTreeDef

    def input_gradients(
        self, weights: Tree, h: Tree, cotangent: Tree, *more: Tree
    ) -> tuple[Tree, list[jax.Array], Tree]:
        """The gradient of the stage's input, and the residuals.

        Returns:
          The gradient, a tree like ``h``; arrays like ``residuals``; and what the
          function returns beside ``out``.
        """
        arguments = (weights, more, h, cotangent, self._constants)
        outputs = _evaluate(self._programs.known, jax.tree.leaves(arguments))
        count = self._results.num_leaves
        gradients, aux = jax.tree.unflatten(self._results, outputs[:count])
        return gradients, outputs[count:], aux

    def weight_gradients(
        self, residuals: Sequence[jax.Array], weights: Tree, *more: Tree
    ) -> Tree:
        """The gradients of the stage's weights.

        Args:
          residuals: What ``input_gradients`` returned.
          weights: As there.
          *more: As there.

        Returns:
          A tree like ``weights``.
        """
        shared = jax.tree.leaves((weights, more, self._constants))
        gradients = _evaluate(
            self._programs.unknown, [*residuals, *shared], repeats_effects=True
        )
        return jax.tree.unflatten(self._weights, gradients)


def split_backward(
    function: Callable[..., Tree],
    weights: Tree,
    h: Tree,
    cotangent: Tree,
    *more: Tree,
) -> SplitBackward:
    """Split the backward of a stage.

    Nothing is computed: the arguments are arrays, tracers or ``jax.ShapeDtypeStruct``.
    In an SPMD region, call it while the region's body is being traced, since a program
    that was traced elsewhere is one for another mesh.

    Args:
      function: ``(weights, h, *more) -> (out, aux)``; ``aux`` has no gradient. Both
        parts take the tracers that it closes over from the trace that they are called
        in, as any closure does.
      weights: A tree of floating-point arrays, the gradients of which may wait.
      h: The stage's input, a tree of floating-point arrays.
      cotangent: A tree like ``out``.
      *more: Side inputs, which get no gradients.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> def stage(w, h):
      ...     return jnp.tanh(h @ w), None
      >>> w, h, g = jnp.ones((4, 4)), jnp.ones((2, 4)), jnp.ones((2, 4))
      >>> split = split_backward(stage, w, h, g)
      >>> [r.shape for r in split.residuals]
      [(2, 4), (2, 4)]
      >>> dh, residuals, _ = split.input_gradients(w, h, g)
      >>> split.weight_gradients(residuals, w).shape
      (4, 4)
    """

    def backward(weights: Tree, more: Tree, h: Tree, cotangent: Tree) -> Any:
        def of_inputs(weights: Tree, h: Tree) -> Tree:
            return function(weights, h, *more)

        _, pull, aux = jax.vjp(of_inputs, weights, h, has_aux=True)
        of_weights, of_h = pull(cotangent)
        return of_weights, (of_h, aux)

    arguments = jax.tree.map(_struct, (weights, more, h, cotangent))
    traced, (_, results) = jax.make_jaxpr(backward, return_shape=True)(*arguments)
    program, constants = jaxprs.lift_constants(traced)
    program = jaxprs.without_dead_code(_inlined(program), keep_inputs=True)

    of_weights, of_results = map(jax.tree.structure, (weights, results))
    is_known = [i >= of_weights.num_leaves for i in range(len(jaxprs.outputs(program)))]
    is_shared = [True] * len(jax.tree.leaves((weights, more)))
    is_shared += [False] * len(jax.tree.leaves((h, cotangent)))
    is_shared += [True] * len(constants)
    split = split_outputs(program, is_known, is_shared)
    residuals = tuple(
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)
        for v in jaxprs.inputs(split.unknown)[: split.num_residuals]
    )
    return SplitBackward(residuals, split, tuple(constants), of_weights, of_results)


def _struct(value: Any) -> Any:
    if isinstance(value, jax.ShapeDtypeStruct):
        return value
    return jaxprs.struct(jax.typeof(value))


# --- calls


def _inlined(program: jaxprs.Program) -> jaxprs.Program:
    """A program with its calls replaced by what they call, in bodies of scans too."""

    def run(*values: Any) -> list[Any]:
        return _interpret(program, values)

    return jaxprs.retrace(run, program)


def _evaluate(
    program: jaxprs.Program, values: Sequence[Any], *, repeats_effects: bool = False
) -> list[jax.Array]:
    """A program's outputs; what it does for its effects alone may be a repetition."""
    outputs = _interpret(program, values, repeats_effects=repeats_effects)
    pairs = zip(outputs, jaxprs.outputs(program), strict=True)
    return [jnp.asarray(value, atom.aval.dtype) for value, atom in pairs]


def _interpret(
    program: jaxprs.Program,
    values: Sequence[Any],
    call: jaxprs.Equation = None,
    *,
    repeats_effects: bool = False,
) -> list[Any]:
    nested = partial(_interpret, repeats_effects=repeats_effects)
    read = _read_by_some(program) if repeats_effects else frozenset[Any]()

    def apply(equation: jaxprs.Equation, operands: Sequence[Any]) -> Sequence[Any]:
        is_for_effects = equation.effects and read.isdisjoint(equation.outvars)
        if repeats_effects and is_for_effects:
            return [None] * len(equation.outvars)
        equation = at_line_of(call, equation)
        if _is_call(equation):
            (inner,) = jaxprs.inner_programs(equation)
            with jaxprs.source_context(equation):
                if primitives.is_rematerialization(equation):
                    # Or XLA would find that the forward has these values.
                    operands = lax.optimization_barrier(operands)
                return nested(inner, operands, equation)
        if equation.primitive.name == "scan":
            return bind_with_nested(equation, operands, nested)
        if primitives.checkpoint_name(equation) == RESIDUAL:
            return operands
        return jaxprs.bind(equation, operands)

    return interpret(program, values, apply)


def _read_by_some(program: jaxprs.Program) -> frozenset[Any]:
    """The variables that a program's equations read, and its outputs."""
    atoms = [atom for e in jaxprs.equations(program) for atom in e.invars]
    atoms += jaxprs.outputs(program)
    return frozenset(variables(atoms))


def _is_call(equation: jaxprs.Equation) -> bool:
    """Whether an equation only names a program; a jit with layouts says more."""
    is_one = equation.primitive.name in CALLS
    return is_one and not primitives.declares_layouts(equation)
