# SPDX-License-Identifier: Apache-2.0
"""Splits a program in two by its outputs, with few and small residuals between them.

The *known* program computes some outputs at once and returns residuals; the *unknown*
program computes the others later, from the residuals. JAX splits the equations, those
of loops included (``partial_eval_jaxpr_custom``, ``dce_jaxpr``). What JAX lacks is the
choice of residuals: a policy of JAX sees one primitive and its parameters, not where
its operands come from. So the choice is made here, for each value, and passed to JAX by
``checkpoint_name``: exactly the named values are saved, all others are recomputed.

Every value that the known program computes may be a residual, and is one if the unknown
program reads it, except for what an elementwise operation computes from operands of
fewer bytes, or of as many unless it is transcendental: ``tanh`` and the like are slow,
and their bits depend on what XLA fuses them with.

In return the known program computes what only the unknown one needs if that makes a
residual smaller: a sum, for the gradient of a bias or a scale; a product of two values.

No matmul is computed twice, or earlier than it has to be. Equations with programs
inside them other than ``scan`` (``cond``, ``while``, ``shard_map``, kernels) are in one
of the programs as a whole.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
from jax.ad_checkpoint import checkpoint_name

from tessera.foundations.primitive_properties import (
    ARITHMETIC,
    BROADCASTS,
    RESHAPES,
)
from tessera.graph.rewriting import (
    bind_with_nested,
    interpret,
    variables,
)
from tessera.jax_compat import jaxprs, primitives

Variables: TypeAlias = set[Any]

RESIDUAL = "tessera_residual"
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


@dataclass(frozen=True)
class SplitProgram:
    """A program in two parts.

    Attributes:
      known: Takes the program's inputs; returns the known outputs, then residuals.
      unknown: Takes the residuals, then the shared inputs; returns the other outputs.
      num_residuals: How many residuals there are.
    """

    known: jaxprs.Program
    unknown: jaxprs.Program
    num_residuals: int


def split_outputs(
    program: jaxprs.Program, is_known: Sequence[bool], is_shared: Sequence[bool]
) -> SplitProgram:
    """Split a program by its outputs.

    Args:
      program: A program without calls, each scan of which has a body of its own.
      is_known: For each output, whether the known program computes it.
      is_shared: For each input, whether the unknown program takes it, too.
    """
    known = _computed(
        jaxprs.without_dead_code(program, outputs=is_known, keep_inputs=True)
    )
    naming = _Naming(known, set(known), set())

    def run(*values: Any) -> list[Any]:
        return naming.interpret(program, values)

    named = jaxprs.retrace(run, program)
    is_unknown = [not known for known in is_known]
    return SplitProgram(
        *jaxprs.partial_evaluation(named, is_unknown, is_shared, _is_saved)
    )


@dataclass
class _Naming:
    """Interprets a program, and names the values that may be residuals.

    Its sets have variables of the program and of the bodies of its loops.

    Attributes:
      known: What the known program computes.
      available: What the known program has, or could have by elementwise operations.
      carried: What loops of the known program carry, in their bodies.
    """

    known: Variables
    available: Variables
    carried: Variables

    def interpret(self, program: jaxprs.Program, values: Sequence[Any]) -> list[Any]:
        """The results of a program, or of the body of a loop, with values named."""
        inputs = jaxprs.inputs(program)
        self.available.update(inputs)
        values = [
            checkpoint_name(value, RESIDUAL) if variable in self.carried else value
            for variable, value in zip(inputs, values, strict=True)
        ]
        return interpret(program, values, self._apply)

    def _apply(self, equation: jaxprs.Equation, operands: Sequence[Any]) -> list[Any]:
        is_loop = equation.primitive.name == "scan"
        is_residual = is_loop or self._is_residual(equation)
        if is_loop:
            results = self._interpret_loop(equation, operands)
        else:
            if equation.effects:  # JAX repeats those of values that are not saved
                operands = [checkpoint_name(x, RESIDUAL) for x in operands]
            results = jaxprs.bind(equation, operands)
        if not is_residual:
            return results
        return [
            checkpoint_name(value, RESIDUAL) if variable in self.available else value
            for variable, value in zip(equation.outvars, results, strict=True)
        ]

    def _interpret_loop(
        self, loop: jaxprs.Equation, operands: Sequence[Any]
    ) -> list[Any]:
        body, (consts, carries) = primitives.body(loop), jaxprs.scan_sizes(loop)
        inputs = jaxprs.inputs(body)[consts : consts + carries]
        finals = zip(inputs, loop.outvars[:carries], strict=True)
        self.carried |= {before for before, final in finals if final in self.known}
        results = bind_with_nested(loop, operands, self.interpret)
        for atom, result in zip(jaxprs.outputs(body), loop.outvars, strict=True):
            # Computed again, it would be in a loop of its own.
            if not isinstance(atom, jaxprs.Literal) and atom in self.available:
                self.available.add(result)
        return results

    def _is_residual(self, equation: jaxprs.Equation) -> bool:
        """Whether the available results of an equation may be residuals."""
        operands, results = set(variables(equation.invars)), set(equation.outvars)
        is_elementwise = equation.primitive.name in _ELEMENTWISE
        read, computed = _nbytes(operands), _nbytes(results)
        if not self.known.isdisjoint(results):
            is_slow = equation.primitive.name in _TRANSCENDENTAL
            return not (is_elementwise and read + is_slow <= computed)
        is_early = is_elementwise or equation.primitive.name == "reduce_sum"
        if not is_early or not operands <= self.available:
            return False
        self.available |= results
        return computed < read


# --- equations and variables


def _computed(program: jaxprs.Program) -> Variables:
    """Everything that a program computes, in the bodies of its loops too."""
    computed: Variables = set()
    for equation in jaxprs.equations(program):
        computed.update(equation.outvars)
        if equation.primitive.name == "scan":
            computed |= _computed(primitives.body(equation))
    return computed


def _nbytes(variables: Iterable[Any]) -> int:
    avals = [variable.aval for variable in variables]
    return sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals)
