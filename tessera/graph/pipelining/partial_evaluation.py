# SPDX-License-Identifier: Apache-2.0
"""Splits a program in two by its outputs, with few and small residuals between them.

The *known* program computes some outputs at once and returns residuals; the *unknown*
program computes the others later, from the residuals. JAX splits the equations, those
of loops included (``partial_eval_jaxpr_custom``, ``dce_jaxpr``). What JAX lacks is the
choice of residuals: a policy of JAX sees one primitive and its parameters, not where
its operands come from. So the choice is made here, for each value, and passed to JAX by
``checkpoint_name``: exactly the named values are saved, all others are recomputed.

Every value that the known program computes may be a residual, and is one if the unknown
program reads it, except that:

- What depends on the shared inputs alone, which both programs have, is recomputed.
- So is what an elementwise operation computes from operands of fewer bytes, or of as
  many unless it is transcendental: ``tanh`` and the like are slow, and their bits
  depend on what XLA fuses them with.

In return the known program computes what only the unknown one needs if that makes a
residual smaller: a sum, for the gradient of a bias or a scale; a product of two values.
Not where the unknown one has inputs of its own: those values are then of a backward,
which reads their operands, too.

No matmul is computed twice, or earlier than it has to be. Equations with programs
inside them other than ``scan`` (``cond``, ``while``, ``shard_map``, kernels) are in one
of the programs as a whole.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tessera.foundations.primitive_properties import (
    ARITHMETIC,
    BROADCASTS,
    EXPENSIVE,
    RESHAPES,
)
from tessera.graph.rewriting import (
    Environment,
    bind_with_nested,
    contains_inside,
    variables,
)
from tessera.jax_compat import jaxprs, primitives

Variables: TypeAlias = set[Any]

RESIDUAL = "tessera_residual"
_BARRIER = "optimization_barrier"
_ELEMENTWISE = (
    RESHAPES
    | BROADCASTS
    | ARITHMETIC
    | {"convert_element_type", "dynamic_slice", "slice"}
)


_TRANSCENDENTAL_NAMES = """
    acos acosh asin asinh atan atan2 atanh cbrt cos cosh erf erfc exp exp2 expm1 log
    log1p log2 logistic pow rsqrt sin sinh sqrt tan tanh
"""
_TRANSCENDENTAL = frozenset(_TRANSCENDENTAL_NAMES.split())

_save_residuals = jax.checkpoint_policies.save_only_these_names(RESIDUAL)


def _is_saved(primitive: Any, *avals: Any, **params: Any) -> bool:
    """The policy for JAX: an effect happens in the known program alone."""
    is_effect = primitive.name == "debug_callback"
    return is_effect or _save_residuals(primitive, *avals, **params)


def split_outputs(
    program: jaxprs.Program,
    is_known: Sequence[bool],
    is_shared: Sequence[bool],
    is_late: Sequence[bool] | None = None,
) -> tuple[jaxprs.Program, jaxprs.Program, int]:
    """Split a program by its outputs.

    Args:
      program: A program without calls, each scan of which has a body of its own.
      is_known: For each output, whether the known program computes it.
      is_shared: For each input, whether the unknown program takes it, too.
      is_late: For each input, whether the unknown program alone takes it; None has no
        such inputs.

    Returns:
      The known program, which takes the inputs that are not late, and returns the known
      outputs, then residuals; the unknown one, which takes the residuals, then its
      inputs, and returns the other outputs; and the number of residuals.
    """
    inputs = jaxprs.inputs(program)
    is_late = [False] * len(inputs) if is_late is None else is_late
    known = jaxprs.without_dead_code(program, outputs=is_known, keep_inputs=True)
    early = {v for v, late in zip(inputs, is_late, strict=True) if not late}
    shared = {v for v, taken in zip(inputs, is_shared, strict=True) if taken}
    naming = _Naming(
        _computed(known), shared & early, early, set(), computes_early=not any(is_late)
    )

    def run(*values: Any) -> list[Any]:
        return naming.interpret(program, values)

    named = jaxprs.retrace(run, program)
    is_unknown = [not known for known in is_known]
    return jaxprs.partial_evaluation(named, is_unknown, is_shared, is_late, _is_saved)


@dataclass
class _Naming:
    """Interprets a program, and names the values that may be residuals.

    Its sets have variables of the program and of the bodies of its loops.

    Attributes:
      known: What the known program computes.
      shared: What depends on shared inputs alone, and is quick to compute.
      available: What the known program has, or could have by elementwise operations.
      residuals: What is named.
      computes_early: Whether the known program computes what only the unknown one needs
        where that is smaller than the operands.
    """

    known: Variables
    shared: Variables
    available: Variables
    residuals: Variables
    computes_early: bool

    def interpret(self, program: jaxprs.Program, values: Sequence[Any]) -> list[Any]:
        """The results of a program, or of the body of a loop, with values named."""
        self.shared |= set(jaxprs.constant_inputs(program))
        env = Environment(
            program, list(map(self._named, jaxprs.inputs(program), values))
        )
        for equation in jaxprs.equations(program):
            operands = [env.read(atom) for atom in equation.invars]
            if equation.primitive.name == "scan":
                results = self._interpret_loop(_Loop(equation), operands)
            elif equation.primitive.name == _BARRIER:
                results = self._interpret_barrier(equation, operands)
            else:
                self._classify(equation)
                if equation.effects:  # JAX repeats those of values that are not saved
                    operands = [checkpoint_name(x, RESIDUAL) for x in operands]
                results = jaxprs.bind(equation, operands)
            env.write(equation.outvars, map(self._named, equation.outvars, results))
        return [env.read(atom) for atom in jaxprs.outputs(program)]

    def _named(self, variable: Any, value: Any) -> Any:
        is_residual = variable in self.residuals
        return checkpoint_name(value, RESIDUAL) if is_residual else value

    def _classify(self, equation: jaxprs.Equation) -> None:
        operands, results = set(variables(equation.invars)), set(equation.outvars)
        is_elementwise = equation.primitive.name in _ELEMENTWISE
        is_free = not equation.effects and not _is_expensive(equation)
        if is_free and operands <= self.shared:
            self.shared |= results
            return
        own = self._shared_inside(equation)
        self.shared |= own
        results -= own
        extra, saved = _nbytes(operands - self.shared), _nbytes(results)
        if not self.known.isdisjoint(results):
            self.available |= results
            is_slow = equation.primitive.name in _TRANSCENDENTAL
            is_cheap = is_elementwise and extra + is_slow <= saved
            self.residuals |= set() if is_cheap else results
        elif self.computes_early and (
            is_elementwise or equation.primitive.name == "reduce_sum"
        ):
            is_available = operands <= self.available | self.shared
            self.available |= results if is_available else set()
            self.residuals |= results if is_available and saved < extra else set()

    def _shared_inside(self, equation: jaxprs.Equation) -> Variables:
        """The results of branches, or of a region, that depend on shared values alone.

        Such are weights that were cast, or gathered, for a matmul inside.
        """
        operands = list(equation.invars)
        if equation.primitive.name == "cond":
            bodies = primitives.branches(equation)
            if not _is_among(operands.pop(0), self.shared):
                return set()
        elif jaxprs.is_shard_map(equation):
            bodies = (primitives.body(equation),)
        else:
            return set()
        is_shared = [_is_among(operand, self.shared) for operand in operands]
        found = [_of_shared_inputs(body, is_shared) for body in bodies]
        pairs = zip(equation.outvars, *found, strict=True)
        return {variable for variable, *each in pairs if all(each)}

    def _interpret_loop(self, loop: "_Loop", operands: Sequence[Any]) -> list[Any]:
        for same in (self.shared, self.available):
            same |= {v for v, x in loop.operands.items() if _is_among(x, same)}
        carries = [c for c in loop.carries if c.final in self.known]
        carried = {v for c in carries for v in (c.before, c.final)}
        self.available |= carried
        self.residuals |= carried
        results = bind_with_nested(loop.equation, operands, self.interpret)
        for number, (atom, y) in enumerate(loop.ys, len(loop.carries)):
            if not isinstance(atom, jaxprs.Literal) and atom in loop.slices:
                # A stack of slices that exists needs no loop.
                results[number] = operands[loop.slices[atom]]
            if _is_among(atom, self.shared):
                self.shared.add(y)
            elif y in self.known or atom in self.available:
                # Computed again, it would be in a loop of its own.
                self.available.add(y)
                self.residuals.add(y)
        return results

    def _interpret_barrier(
        self, equation: jaxprs.Equation, operands: Sequence[Any]
    ) -> list[Any]:
        """A barrier for shared values and one for others, each as a whole."""
        results: dict[int, Any] = {}
        for side in (False, True):
            own = [
                number
                for number, atom in enumerate(equation.invars)
                if _is_among(atom, self.shared) == side
            ]
            passing = {equation.outvars[number] for number in own}
            if side:
                self.shared |= passing
            self.available |= passing & self.known
            self.residuals |= passing & self.known - self.shared
            with jaxprs.source_context(equation):
                passed = lax.optimization_barrier([operands[number] for number in own])
            results.update(zip(own, passed, strict=True))
        return [results[number] for number in range(len(operands))]


@dataclass(frozen=True)
class _Carry:
    """One carry of a loop: its variables in the loop's body and outside."""

    before: jaxprs.Atom
    final: jaxprs.Atom


class _Loop:
    """The inputs and outputs of a ``scan`` and of its body, side by side."""

    def __init__(self, equation: jaxprs.Equation) -> None:
        self.equation = equation
        body, results = primitives.body(equation), equation.outvars
        inputs, outputs = jaxprs.inputs(body), jaxprs.outputs(body)
        consts, carries = jaxprs.scan_sizes(equation)
        xs = consts + carries
        self.carries = list(map(_Carry, inputs[consts:xs], results[:carries]))
        self.ys = list(zip(outputs[carries:], results[carries:], strict=True))
        self.slices = {v: number for number, v in enumerate(inputs) if number >= xs}
        self.operands = {
            v: equation.invars[number]
            for number, v in enumerate(inputs)
            if not consts <= number < xs
        }


# --- equations and variables


def _computed(program: jaxprs.Program) -> Variables:
    """Everything that a program computes, in the bodies of its loops too."""
    computed: Variables = set()
    for equation in jaxprs.equations(program):
        computed.update(equation.outvars)
        if equation.primitive.name == "scan":
            computed |= _computed(primitives.body(equation))
    return computed


def _of_shared_inputs(program: jaxprs.Program, is_shared: Sequence[bool]) -> list[bool]:
    """Whether each output is quickly computed from shared inputs alone."""
    inputs = zip(jaxprs.inputs(program), is_shared, strict=True)
    shared = {variable for variable, taken in inputs if taken}
    shared |= set(jaxprs.constant_inputs(program))
    for equation in jaxprs.equations(program):
        is_free = not equation.effects and not _is_expensive(equation)
        if is_free and all(_is_among(atom, shared) for atom in equation.invars):
            shared.update(equation.outvars)
    return [_is_among(atom, shared) for atom in jaxprs.outputs(program)]


def _is_expensive(equation: jaxprs.Equation) -> bool:
    """Whether an equation is a matmul or a kernel, or has one inside."""
    is_one = equation.primitive.name in EXPENSIVE
    return is_one or contains_inside(equation, _is_expensive)


def _is_among(atom: jaxprs.Atom, variables: Variables) -> bool:
    """Whether a value is a literal or one of some variables."""
    return isinstance(atom, jaxprs.Literal) or atom in variables


def _nbytes(variables: Iterable[Any]) -> int:
    avals = [variable.aval for variable in variables]
    return sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals)
