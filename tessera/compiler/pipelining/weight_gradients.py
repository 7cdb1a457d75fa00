# SPDX-License-Identifier: Apache-2.0
"""Takes a stage's backward apart: the gradient of its input, then of its weights.

The stage before waits for the gradient of this stage's input; nobody waits for those of
its weights. Zero-bubble schedules (Qi et al. 2023, arXiv 2401.10241) compute the first
at once and the second when a device would stand idle. To JAX both are one program:

    backward      for each layer:           h, a = layer(w, h)        the forward, again
                  for each layer, back:     g = g · wᵀ,   dw = aᵀ · g

which becomes two, and what the second needs of the first crosses as residuals:

    first half    for each layer:           h, a = layer(w, h)
                  for each layer, back:     g = g · wᵀ
                                                        residuals: every a, every g
    second half   for each layer, back:     dw = aᵀ · g

The split is one of the jaxpr (``partial_evaluation.py``), so it needs no help from the
stage: what the stage is made of, and what it rematerializes, is its own affair. Calls
(``jit``, custom derivatives, remat) are inlined first, in the bodies of loops too.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tessera import _jax
from tessera.compiler.pipelining.partial_evaluation import Halves, Key
from tessera.compiler.rewriting import Environment, bind_with_nested
from tessera.primitive_properties import CALLS
from tessera.tree import Tree


@dataclass(frozen=True)
class SplitBackward:
    """The two halves of a stage's backward.

    Attributes:
      residuals: Shape and dtype of each array that the second half takes of the first.
    """

    residuals: tuple[jax.ShapeDtypeStruct, ...]
    _halves: Halves
    _crossing: tuple[Key, ...]
    _constants: tuple[Any, ...]
    _weights: Tree
    _h: Tree
    _aux: Any

    def input_gradients(
        self, weights: Tree, h: Tree, cotangent: Tree, *more: Tree
    ) -> tuple[Tree, list[jax.Array], Tree]:
        """The gradient of the stage's input, and what the second half needs.

        Returns:
          The gradient, a tree like ``h``; arrays like ``residuals``; and what the
          function gives beside ``out``.
        """
        given = jax.tree.leaves((weights, more, h, _traceable(cotangent)))
        inputs = _jax.inputs(self._halves.program)
        values = dict(zip(inputs, (*given, *self._constants), strict=True))
        env = self._halves.environment(values)
        self._halves.run(env, "first")
        first = self._num_weight_gradients
        rest = iter(_read(env, _jax.outputs(self._halves.program)[first:]))
        gradients = _fill(self._h, rest)
        residuals = [env.read(key) for key in self._crossing]
        return gradients, residuals, jax.tree.unflatten(self._aux, rest)

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
        given = jax.tree.leaves((weights, more))
        inputs = _jax.inputs(self._halves.program)
        values = dict(zip(inputs, given, strict=False))
        held = len(self._constants)
        values.update(zip(inputs[len(inputs) - held :], self._constants, strict=True))
        values.update(zip(self._crossing, residuals, strict=True))
        env = self._halves.environment(values)
        self._halves.run(env, "second")
        first = self._num_weight_gradients
        gradients = _read(env, _jax.outputs(self._halves.program)[:first])
        return _fill(self._weights, gradients)

    @property
    def _num_weight_gradients(self) -> int:
        return sum(map(_is_differentiable, jax.tree.leaves(self._weights)))


def split_backward(
    function: Callable[..., Tree],
    weights: Tree,
    h: Tree,
    cotangent: Tree,
    *more: Tree,
) -> SplitBackward:
    """Take the backward of a stage apart.

    Nothing is computed: the arguments are arrays, tracers or ``jax.ShapeDtypeStruct``.
    In a manual region, call it while the region's body is being traced, since a program
    that was traced elsewhere is one for another mesh.

    Args:
      function: ``(weights, h, *more) -> (out, aux)``; ``aux`` has no gradient. Both
        halves take the tracers that it closes over from the trace that they are called
        in, as any closure does.
      weights: A tree of arrays, the gradients of which may wait.
      h: The stage's input, a tree of arrays. Leaves that are no floats get gradients of
        dtype ``float0``, as in ``jax.vjp``.
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
    aux_tree: list[Any] = []

    def backward(weights: Tree, more: Tree, h: Tree, cotangent: Tree) -> list[Any]:
        def of_inputs(weights: Tree, h: Tree) -> Tree:
            return function(weights, h, *more)

        out, pull, aux = jax.vjp(of_inputs, weights, h, has_aux=True)
        gradients = pull(jax.tree.map(_cotangent_of, out, cotangent))
        leaves = jax.tree.leaves(gradients)
        beside, tree = jax.tree.flatten(aux)
        aux_tree.append(tree)
        return [leaf for leaf in leaves if leaf.dtype != jax.dtypes.float0] + beside

    arguments = (weights, more, h, _traceable(cotangent))
    weights, more, h, cotangent = jax.tree.map(_struct, arguments)
    traced = jax.make_jaxpr(backward)(weights, more, h, cotangent)
    program, constants = _jax.lift_constants(traced)
    program = _jax.without_dead_code(_inlined(program), keep_inputs=True)

    inputs = _jax.inputs(program)
    first = len(jax.tree.leaves((weights, more)))
    own = inputs[first : first + len(jax.tree.leaves((h, cotangent)))]
    late = sum(map(_is_differentiable, jax.tree.leaves(weights)))
    outputs = _jax.outputs(program)
    halves = Halves(program, set(inputs) - set(own))
    halves.plan([place >= late for place in range(len(outputs))])
    wanted = halves.parts["second"].reads
    crossing = (*halves.crossing, *(v for v in own if v in wanted))
    residuals = tuple(
        jax.ShapeDtypeStruct(k.aval.shape, k.aval.dtype) for k in crossing
    )
    held = tuple(constants)
    return SplitBackward(residuals, halves, crossing, held, weights, h, aux_tree[-1])


# --- trees of arrays


def _is_differentiable(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _traceable(cotangent: Tree) -> Tree:
    """A cotangent that can be traced: without ``float0``, which is no array to JAX."""

    def one(leaf: Any) -> Any:
        is_void = leaf.dtype == jax.dtypes.float0
        return np.zeros(leaf.shape, bool) if is_void else leaf

    return jax.tree.map(one, cotangent)


def _cotangent_of(result: Any, given: Any) -> Any:
    if _is_differentiable(result):
        return given
    return np.zeros(result.shape, jax.dtypes.float0)


def _struct(value: Any) -> Any:
    if isinstance(value, jax.ShapeDtypeStruct):
        return value
    return _jax.struct(jax.typeof(value))


def _read(env: Environment, atoms: Iterable[_jax.Atom]) -> list[jax.Array]:
    return [jnp.asarray(env.read(atom), atom.aval.dtype) for atom in atoms]


def _fill(like: Tree, gradients: Iterable[jax.Array]) -> Tree:
    """A tree of gradients, ``float0`` for what has none."""
    rest = iter(gradients)

    def one(leaf: Any) -> Any:
        if _is_differentiable(leaf):
            return next(rest)
        return np.zeros(leaf.shape, jax.dtypes.float0)

    return jax.tree.map(one, like)


# --- calls


def _inlined(program: _jax.Program) -> _jax.Program:
    """A program with what its calls call in their place, in bodies of scans too."""

    def interpret(program: _jax.Program, values: Sequence[Any]) -> list[Any]:
        env = Environment(program, values)
        for equation in _jax.equations(program):
            operands = [env.read(atom) for atom in equation.invars]
            if _is_call(equation):
                (inner,) = _jax.inner_programs(equation)
                with _jax.source_context(equation):
                    if _is_recomputation(equation):
                        # Or XLA would find that the forward has these values.
                        operands = lax.optimization_barrier(operands)
                    results = interpret(inner, operands)
            elif equation.primitive.name == "scan":
                results = bind_with_nested(equation, operands, interpret)
            else:
                results = _jax.bind(equation, operands)
            env.write(equation.outvars, results)
        return [env.read(atom) for atom in _jax.outputs(program)]

    def run(*values: Any) -> list[Any]:
        return interpret(program, values)

    return _jax.retrace(run, program)


def _is_recomputation(equation: _jax.Equation) -> bool:
    params = equation.params
    return bool(params.get("differentiated") and params.get("prevent_cse"))


def _is_call(equation: _jax.Equation) -> bool:
    """Whether an equation only names a program; a jit with layouts says more."""
    params = equation.params
    layouts = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    declared = any(isinstance(layout, jax.sharding.Sharding) for layout in layouts)
    return equation.primitive.name in CALLS and not declared
