# SPDX-License-Identifier: Apache-2.0
"""Splits a stage into a forward, the gradient of its input, and those of its weights.

The three run in different ticks of a pipeline: other microbatches come between a
forward and its backward, and a zero-bubble schedule (Qi et al. 2023, arXiv 2401.10241)
delays the gradients of weights, for which no stage waits. To JAX all is one program:

    gradient      for each layer:           h, a = layer(w, h)
                  for each layer, back:     g = g · wᵀ,   dw = aᵀ · g

It is split by its outputs (``partial_evaluation.py``), once or twice:

    forward       for each layer:           h, a = layer(w, h)
                                                        residuals: every a
    backward      for each layer, back:     g = g · wᵀ
                                                        residuals: every a, every g
    weights       for each layer, back:     dw = aᵀ · g

The split needs no help from the stage: what it consists of, and what it rematerializes,
does not matter. Calls (``jit``, custom derivatives, remat) are inlined first, in the
bodies of loops too. What a stage rematerializes is no result of the forward, so its
policies decide which residuals there are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from tessera.foundations.primitive_properties import CALLS
from tessera.foundations.tree import Tree
from tessera.graph.pipelining.partial_evaluation import RESIDUAL, split_outputs
from tessera.graph.pipelining.ring_buffers import Stored
from tessera.graph.rewriting import (
    at_line_of,
    bind_with_nested,
    interpret,
    variables,
)
from tessera.jax_compat import jaxprs, primitives

Structs: TypeAlias = tuple[jax.ShapeDtypeStruct, ...]


@dataclass(frozen=True)
class StageGradient:
    """A stage and its gradient, in parts.

    Attributes:
      residuals: Shape and dtype of each array that ``backward`` takes from ``forward``.
      weight_residuals: Of those that ``weight_gradients`` takes from ``backward``; none
        where ``backward`` gives the gradients of weights, too.
    """

    residuals: Structs
    weight_residuals: Structs
    _programs: tuple[jaxprs.Program, ...]
    _constants: tuple[Any, ...]
    _results: jax.tree_util.PyTreeDef
    _gradients: tuple[jax.tree_util.PyTreeDef, jax.tree_util.PyTreeDef]

    def forward(
        self, weights: Tree, h: Tree, *more: Tree
    ) -> tuple[Tree, Tree, list[jax.Array]]:
        """What the stage returns, ``out`` and ``aux``, and the residuals."""
        arguments = jax.tree.leaves((weights, more, h, self._constants))
        outputs = _evaluate(self._programs[0], arguments)
        count = self._results.num_leaves
        out, aux = jax.tree.unflatten(self._results, outputs[:count])
        return out, aux, outputs[count:]

    def backward(
        self,
        residuals: Sequence[jax.Array | Stored],
        weights: Tree,
        cotangent: Tree,
        *more: Tree,
    ) -> tuple[Tree, Tree]:
        """The gradient of the stage's input, and that of its weights.

        Args:
          residuals: From ``forward``; a ``Stored`` one is not copied for a loop.
          weights: As there.
          cotangent: A tree like ``out``.
          *more: As there.

        Returns:
          A tree like ``h``; and a tree like ``weights``, or, where the backward is
          split, a list of arrays like ``weight_residuals``.
        """
        shared = jax.tree.leaves((weights, more, cotangent, self._constants))
        outputs = _evaluate(self._programs[1], [*residuals, *shared])
        of_weights, of_h = self._gradients
        if len(self._programs) > 2:
            count = of_h.num_leaves
            return jax.tree.unflatten(of_h, outputs[:count]), outputs[count:]
        count = of_weights.num_leaves
        gradients = jax.tree.unflatten(of_weights, outputs[:count])
        return jax.tree.unflatten(of_h, outputs[count:]), gradients

    def weight_gradients(
        self, residuals: Sequence[jax.Array | Stored], weights: Tree, *more: Tree
    ) -> Tree:
        """The gradients of the stage's weights, where the backward is split.

        Args:
          residuals: From ``backward``; as there.
          weights: As in ``forward``.
          *more: As there.

        Returns:
          A tree like ``weights``.
        """
        shared = jax.tree.leaves((weights, more, self._constants))
        gradients = _evaluate(
            self._programs[2], [*residuals, *shared], repeats_effects=True
        )
        return jax.tree.unflatten(self._gradients[0], gradients)


def stage_gradient(
    function: Callable[..., Tree],
    weights: Tree,
    h: Tree,
    *more: Tree,
    splits_backward: bool,
) -> StageGradient:
    """Split a stage and its gradient into parts.

    Nothing is computed: the arguments are arrays, tracers or ``jax.ShapeDtypeStruct``.
    In an SPMD region, call it while the region's body is being traced, since a program
    that was traced elsewhere is one for another mesh.

    Args:
      function: ``(weights, h, *more) -> (out, aux)``; ``aux`` has no gradient. All
        parts take the tracers that it closes over from the trace that they are called
        in, as any closure does.
      weights: A tree of floating-point arrays, the gradients of which may wait.
      h: The stage's input, a tree of floating-point arrays.
      *more: Side inputs, which get no gradients.
      splits_backward: Whether the gradients of weights have a part of their own.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> def stage(w, h):
      ...     return jnp.tanh(h @ w), None
      >>> w, h, g = jnp.ones((4, 4)), jnp.ones((2, 4)), jnp.ones((2, 4))
      >>> gradient = stage_gradient(stage, w, h, splits_backward=True)
      >>> out, _, residuals = gradient.forward(w, h)
      >>> dh, residuals = gradient.backward(residuals, w, g)
      >>> [r.shape for r in residuals]
      [(2, 4), (2, 4)]
      >>> gradient.weight_gradients(residuals, w).shape
      (4, 4)
    """

    def whole(weights: Tree, more: Tree, h: Tree, cotangent: Tree) -> Any:
        def of_inputs(weights: Tree, h: Tree) -> Tree:
            return function(weights, h, *more)

        out, pull, aux = jax.vjp(of_inputs, weights, h, has_aux=True)
        of_weights, of_h = pull(cotangent)
        return (of_weights, of_h), (out, aux)

    inputs = jax.tree.map(_struct, (weights, more, h))
    cotangent, _ = jax.eval_shape(function, inputs[0], inputs[2], *inputs[1])
    traced, shapes = jax.make_jaxpr(whole, return_shape=True)(*inputs, cotangent)
    program, constants = jaxprs.lift_constants(traced)
    program = jaxprs.without_dead_code(_inlined(program), keep_inputs=True)

    trees = jax.tree.structure(shapes[0][0]), jax.tree.structure(shapes[0][1])
    results = jax.tree.structure(shapes[1])
    counts = [len(jax.tree.leaves(each)) for each in (*inputs, cotangent, constants)]
    of_weights, of_h = (tree.num_leaves for tree in trees)
    is_shared = _flags(counts, [True, True, False, True, True])
    forward, backward, count = split_outputs(
        program,
        _flags((of_weights + of_h, results.num_leaves), [False, True]),
        is_shared,
        is_late=_flags(counts, [False, False, False, True, False]),
    )
    residuals = _structs(backward, count)
    if not splits_backward:
        programs: tuple[jaxprs.Program, ...] = (forward, backward)
        return StageGradient(residuals, (), programs, tuple(constants), results, trees)
    counts = [count, *counts[:2], *counts[3:]]
    early, late, count = split_outputs(
        _inlined(backward),
        _flags((of_weights, of_h), [False, True]),
        _flags(counts, [False, True, True, False, True]),
    )
    programs, kept = (forward, early, late), _structs(late, count)
    return StageGradient(residuals, kept, programs, tuple(constants), results, trees)


def _flags(counts: Sequence[int], values: Sequence[bool]) -> list[bool]:
    """Each value as often as its count says."""
    pairs = zip(counts, values, strict=True)
    return [value for count, value in pairs for _ in range(count)]


def _structs(program: jaxprs.Program, count: int) -> Structs:
    """The first inputs of a program."""
    inputs = jaxprs.inputs(program)[:count]
    return tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in inputs)


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
    return [jnp.asarray(_read(value), atom.aval.dtype) for value, atom in pairs]


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
                    operands = lax.optimization_barrier([*map(_read, operands)])
                return nested(inner, operands, equation)
        if equation.primitive.name == "scan":
            return _scan(equation, operands, nested)
        operands = [*map(_read, operands)]
        if primitives.checkpoint_name(equation) == RESIDUAL:
            return operands
        return jaxprs.bind(equation, operands)

    return interpret(program, values, apply)


def _read(value: Any) -> Any:
    """A value that an equation takes as a whole."""
    return value.read() if isinstance(value, Stored) else value


def _scan(
    equation: jaxprs.Equation, operands: Sequence[Any], nested: Callable[..., Any]
) -> list[Any]:
    """A loop that reads the rows of stored arrays where they are."""
    constants, carries = jaxprs.scan_sizes(equation)
    first = constants + carries
    operands = [*map(_read, operands[:first]), *operands[first:]]
    rows = operands[first:]
    if not any(isinstance(each, Stored) for each in rows):
        return bind_with_nested(equation, operands, nested)
    options = primitives.scan_options(equation)

    def body(carry: list[Any], item: tuple[Any, list[Any]]) -> tuple[Any, Any]:
        index, sliced = item
        pairs = zip(rows, sliced, strict=True)
        own = [x.row(index) if isinstance(x, Stored) else row for x, row in pairs]
        arguments = [*operands[:constants], *carry, *own]
        results = nested(primitives.body(equation), arguments)
        return results[:carries], results[carries:]

    arrays = [None if isinstance(each, Stored) else each for each in rows]
    items = jnp.arange(options["length"]), arrays
    with jaxprs.source_context(equation):
        end, ys = lax.scan(body, operands[constants:first], items, **options)
    return [*end, *ys]


def _read_by_some(program: jaxprs.Program) -> frozenset[Any]:
    """The variables that a program's equations read, and its outputs."""
    atoms = [atom for e in jaxprs.equations(program) for atom in e.invars]
    atoms += jaxprs.outputs(program)
    return frozenset(variables(atoms))


def _is_call(equation: jaxprs.Equation) -> bool:
    """Whether an equation only names a program; a jit with layouts says more."""
    is_one = equation.primitive.name in CALLS
    return is_one and not primitives.declares_layouts(equation)
