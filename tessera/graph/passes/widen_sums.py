# SPDX-License-Identifier: Apache-2.0
"""Keep the sums of parameters' gradients in f32, and narrow matmuls on CPU."""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, Final

import jax.numpy as jnp
from jax import lax

from tessera.foundations.primitive_properties import (
    CALLS,
    CONTRACTIONS,
    COPIES,
    PLACEMENTS,
    RESHAPES,
    SLICES,
)
from tessera.graph import rewriting
from tessera.graph.ir import Graph
from tessera.jax_compat import jaxprs, primitives
from tessera.tracing.casts import PARAMETER_CAST

# What adds up the parts of a gradient, beside matmuls: of biases, and of rows.
_SUMS: Final = frozenset(("reduce_sum", "scatter-add"))
# What may stand between a sum and the cast, such as a factor of the parameter.
_LINEAR: Final = frozenset(["add", "add_any", "div", "mul", "neg", "select_n", "sub"])
_BETWEEN: Final = COPIES | PLACEMENTS | RESHAPES | SLICES | _LINEAR
_CAST: Final = "convert_element_type"
_ENDS: Final = CONTRACTIONS | _SUMS | {_CAST}
_NARROW: Final = (jnp.bfloat16, jnp.float16)


def widen_sums(graph: Graph) -> Graph:
    """Keep f32 sums whose rounding nothing needs. Numerics: changed.

    A parameter that is cast where it is used has a gradient that JAX rounds to the
    dtype of the cast, and casts back. Devices would add up rounded numbers, and a
    lookup would add thousands of rows to a bf16 number. Here the matmuls, lookups and
    other sums of the gradient have f32 results on their way to the parameter.

    Before:  g:bf16 = dot_general x:bf16 dy:bf16
             h:bf16 = transpose g
             w:f32 = convert h                              (of a parameter's cast)
    After:   g:f32 = dot_general[preferred_element_type=f32] x dy
             w:f32 = transpose g

    A loop adds up the gradients of what it closes over in the dtype of that, so cast
    inside of it. The terms of a sum are rounded, as gradients of activations are.

    On CPU narrow operands are cast to f32, which is exact, and narrow results rounded:
    XLA's CPU compiler accepts every narrow matmul with an f32 result and then refuses
    some of them at run time ("Unsupported element type for DotThunk", JAX 0.10.2).

    Source: Micikevicius et al., Mixed Precision Training, arXiv 1710.03740.
    """
    widening = _Widening(graph.platform == "cpu", _marked(graph.program))
    return graph.with_program(widening.rewritten(graph.program))


class _Widening:
    """Interprets a program with f32 results of some of its equations.

    Args:
      on_cpu: Whether matmuls have f32 operands.
      marked: The ids of the equations whose results are f32.
    """

    def __init__(self, on_cpu: bool, marked: set[int]) -> None:
        self._on_cpu, self._marked = on_cpu, marked

    def rewritten(self, program: jaxprs.Program) -> jaxprs.Program:
        """The program; the same if there is nothing to do."""
        if not rewriting.contains(program, self._changes):
            return program

        def run(*values: Any) -> list[Any]:
            return self._run(program, values, is_marked=False)

        return jaxprs.retrace(run, program)

    def _changes(self, equation: jaxprs.Equation) -> bool:
        return id(equation) in self._marked or self._is_on_cpu(equation)

    def _is_on_cpu(self, equation: jaxprs.Equation) -> bool:
        is_matmul = self._on_cpu and equation.primitive.name in CONTRACTIONS
        return is_matmul and all(map(_is_narrow, equation.invars[:2]))

    def _run(
        self, program: jaxprs.Program, values: Sequence[Any], *, is_marked: bool
    ) -> list[Any]:
        """The outputs; those of a marked call may be f32, others have their dtype."""
        outputs = rewriting.interpret(program, values, self._apply)
        return outputs if is_marked else _as_declared(jaxprs.outputs(program), outputs)

    def _apply(self, equation: jaxprs.Equation, operands: Sequence[Any]) -> list[Any]:
        is_marked = id(equation) in self._marked
        if is_marked and jaxprs.is_jit(equation):
            with jaxprs.source_context(equation):
                return self._run(primitives.body(equation), operands, is_marked=True)
        if is_marked and equation.primitive.name not in CONTRACTIONS | CALLS:
            with jaxprs.source_context(equation):
                return _in_f32(equation, operands)
        operands = _as_declared(equation.invars, operands)
        is_matmul = equation.primitive.name in CONTRACTIONS
        if is_matmul and (is_marked or self._is_on_cpu(equation)):
            with jaxprs.source_context(equation):
                return [self._product(equation, operands, is_marked)]
        if rewriting.contains_inside(equation, self._changes):
            run = partial(self._run, is_marked=is_marked)
            return rewriting.bind_with_nested(equation, operands, run)
        return jaxprs.bind(equation, operands)

    def _product(
        self, equation: jaxprs.Equation, operands: Sequence[Any], is_marked: bool
    ) -> Any:
        if self._is_on_cpu(equation):
            # Of a ragged dot the third operand is the sizes of its groups.
            operands = [*map(_rounded, operands[:2]), *operands[2:]]
        wide = jnp.dtype(jnp.float32)
        product = primitives.bind_matmul(equation, operands, wide)
        dtype = equation.outvars[0].aval.dtype
        return product if is_marked else product.astype(dtype)


def _as_declared(atoms: Sequence[jaxprs.Atom], values: Sequence[Any]) -> list[Any]:
    """Values in the dtypes that a program has for them, of which some may be f32."""
    pairs = zip(atoms, values, strict=True)
    return [
        value.astype(atom.aval.dtype) if _is_widened(atom, value) else value
        for atom, value in pairs
    ]


def _is_widened(atom: jaxprs.Atom, value: Any) -> bool:
    return _is_narrow(atom) and value.dtype == jnp.float32


def _in_f32(equation: jaxprs.Equation, operands: Sequence[Any]) -> list[Any]:
    """The f32 results of an equation that is neither a matmul nor a call."""
    wide = list(map(_wide, operands))
    if equation.primitive.name == _CAST:
        return wide
    if equation.primitive.name != "scatter-add":
        return list(jaxprs.bind(equation, wide))
    return [primitives.bind_scatter_add(equation, wide)]


def _wide(operand: Any) -> Any:
    array = jnp.asarray(operand)  # a literal may be a number
    return array.astype(jnp.float32) if array.dtype in _NARROW else operand


def _rounded(operand: Any) -> Any:
    """An operand in f32 with the precision of its dtype.

    XLA may leave out a cast to a narrower dtype and back (excess precision).
    """
    info = jnp.finfo(operand.dtype)
    return lax.reduce_precision(
        operand.astype(jnp.float32), exponent_bits=info.nexp, mantissa_bits=info.nmant
    )


def _is_narrow(atom: jaxprs.Atom) -> bool:
    return atom.aval.dtype in _NARROW


def _marked(program: jaxprs.Program) -> set[int]:
    """The ids of casts of parameters' gradients, and of what computes these."""
    found: set[int] = set()
    for each, scopes in rewriting.programs_in_scopes(program):
        sums = _Sums(each, found)
        for equation in jaxprs.equations(each):
            if _casts_gradient(equation, scopes) and sums.mark(equation.invars[0]):
                found.add(id(equation))
    return found


def _casts_gradient(equation: jaxprs.Equation, scopes: str) -> bool:
    if equation.primitive.name != _CAST or not _is_narrow(equation.invars[0]):
        return False
    path = f"{scopes}/{jaxprs.name_scopes(equation)}"
    return equation.outvars[0].aval.dtype == jnp.float32 and PARAMETER_CAST in path


class _Sums:
    """Finds the sums of which variables of a program are made.

    Args:
      program: The program.
      found: The ids of the equations from sums to variables are added to it.
      mark_input: Marks what makes an input, for a program that is called.
    """

    def __init__(
        self,
        program: jaxprs.Program,
        found: set[int],
        mark_input: Callable[[int, frozenset[str]], bool] = lambda *_: False,
    ) -> None:
        self._program = program
        self._found, self._mark_input = found, mark_input
        self._marks: dict[tuple[jaxprs.Atom, frozenset[str]], bool] = {}

    @cached_property
    def _makers(self) -> dict[jaxprs.Atom, jaxprs.Equation]:
        equations = jaxprs.equations(self._program)
        return {var: each for each in equations for var in each.outvars}

    @cached_property
    def _inputs(self) -> dict[jaxprs.Atom, int]:
        return {var: n for n, var in enumerate(jaxprs.inputs(self._program))}

    def mark(self, atom: jaxprs.Atom, ends: frozenset[str] = _ENDS) -> bool:
        """Mark the equations from sums to a variable; whether there are any.

        Args:
          atom: The variable.
          ends: The primitives that count as sums.
        """
        if isinstance(atom, jaxprs.Literal) or not _is_narrow(atom):
            return False
        if (atom, ends) not in self._marks:
            self._marks[atom, ends] = self._is_made_of_sums(atom, ends)
        return self._marks[atom, ends]

    def _is_made_of_sums(self, atom: jaxprs.Atom, ends: frozenset[str]) -> bool:
        if atom in self._inputs:
            return self._mark_input(self._inputs[atom], ends)
        maker = self._makers.get(atom)
        if maker is None or not self._leads_to_sums(maker, atom, ends):
            return False
        self._found.add(id(maker))
        return True

    def _leads_to_sums(
        self, maker: jaxprs.Equation, atom: jaxprs.Atom, ends: frozenset[str]
    ) -> bool:
        name, operands = maker.primitive.name, maker.invars
        if name in CALLS:
            (inner,) = jaxprs.inner_programs(maker)
            output = jaxprs.outputs(inner)[maker.outvars.index(atom)]
            return self._inside(maker, inner).mark(output, ends)
        if name == _CAST:  # from f32: not rounding it is all there is to do
            return name in ends and not _is_narrow(operands[0])
        if name in _SUMS:  # a sum may be made in steps, such as of a reshaped array
            _ = [self.mark(each, _SUMS) for each in operands]
            return True
        if name in _BETWEEN:
            marks = [self.mark(each, ends) for each in operands]
            return any(marks)
        return name in ends

    def _inside(self, call: jaxprs.Equation, inner: jaxprs.Program) -> "_Sums":
        if not jaxprs.is_jit(call):
            return _Sums(inner, self._found)
        return _Sums(
            inner, self._found, lambda n, ends: self.mark(call.invars[n], ends)
        )
