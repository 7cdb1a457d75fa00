# SPDX-License-Identifier: Apache-2.0
"""Keep the sums of parameters' gradients in f32, and narrow matmuls on CPU."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

import jax.numpy as jnp
from jax import lax

from tessera import _jax
from tessera.casts import PARAMETER_CAST
from tessera.compiler import rewriting
from tessera.compiler.ir import Graph
from tessera.primitive_properties import (
    CONTRACTIONS,
    COPIES,
    PLACEMENTS,
    RESHAPES,
    SLICES,
)

# What adds up the parts of a gradient, beside matmuls: of biases, and of rows.
_SUMS: Final = frozenset(("reduce_sum", "scatter-add"))
# What may stand between a sum and the cast, such as a factor of the parameter.
_LINEAR: Final = frozenset(["add", "add_any", "div", "mul", "neg", "select_n", "sub"])
_BETWEEN: Final = COPIES | PLACEMENTS | RESHAPES | SLICES | _LINEAR
_CAST: Final = "convert_element_type"
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

    On CPU narrow operands are cast to f32, which is exact, and narrow results rounded:
    XLA's CPU compiler accepts every narrow matmul with an f32 result and then refuses
    some of them at run time ("Unsupported element type for DotThunk", JAX 0.10.2).

    Source: Micikevicius et al., Mixed Precision Training, arXiv 1710.03740.
    """
    on_cpu = graph.platform == "cpu"
    widened = _widened(graph.program)

    def is_rewritten(equation: _jax.Equation, scopes: str) -> bool:
        return id(equation) in widened or (on_cpu and _is_narrow_matmul(equation))

    def apply(
        equation: _jax.Equation, operands: Sequence[Any], scopes: str
    ) -> list[Any]:
        with _jax.source_context(equation):
            if equation.primitive.name in CONTRACTIONS:
                return [_product(equation, operands, id(equation) in widened, on_cpu)]
            return [_in_f32(equation, operands)]

    return graph.with_program(rewriting.rewrite(graph.program, is_rewritten, apply))


def _product(
    equation: _jax.Equation, operands: Sequence[Any], is_widened: bool, on_cpu: bool
) -> Any:
    params, result = dict(equation.params), equation.outvars[0].aval.dtype
    on_cpu = on_cpu and _is_narrow_matmul(equation)
    if is_widened or on_cpu:
        params["preferred_element_type"] = jnp.dtype(jnp.float32)
    if on_cpu:
        # Of a ragged dot the third operand is the sizes of its groups.
        operands = [*map(_rounded, operands[:2]), *operands[2:]]
    (product,) = _jax.bind(equation, operands, params)
    return product if is_widened else product.astype(result)


def _in_f32(equation: _jax.Equation, operands: Sequence[Any]) -> Any:
    """The f32 result of an equation that is no matmul."""
    wide = list(map(_wide, operands))
    if equation.primitive.name == _CAST:
        return wide[0]
    if equation.primitive.name != "scatter-add":
        return _jax.bind(equation, wide)[0]
    params, (operand, indices, updates) = equation.params, wide
    return lax.scatter_add(
        operand,
        indices,
        updates,
        params["dimension_numbers"],
        indices_are_sorted=params["indices_are_sorted"],
        unique_indices=params["unique_indices"],
        mode=params["mode"],
    )


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


def _is_narrow(atom: _jax.Atom) -> bool:
    return atom.aval.dtype in _NARROW


def _is_narrow_matmul(equation: _jax.Equation) -> bool:
    is_matmul = equation.primitive.name in CONTRACTIONS
    return is_matmul and all(map(_is_narrow, equation.invars[:2]))


def _widened(program: _jax.Program) -> set[int]:
    """The equations, by their ids, that have f32 results on the way to a cast."""
    calls = Counter(_called(program))
    found: set[int] = set()
    for tree in _gradients(program, ""):
        # A jitted function that others call, too, has one result for all of them.
        jitted = Counter(id(each.params["jaxpr"]) for each in tree if _jax.is_jit(each))
        if all(calls[function] == times for function, times in jitted.items()):
            found.update(id(each) for each in tree if not _jax.is_jit(each))
    return found


def _called(program: _jax.Program) -> Iterator[int]:
    for equation in _jax.equations(program):
        if _jax.is_jit(equation):
            yield id(equation.params["jaxpr"])
        for inner in _jax.inner_programs(equation):
            yield from _called(inner)


def _gradients(program: _jax.Program, scopes: str) -> Iterator[list[_jax.Equation]]:
    """For each cast of a parameter's gradient, the cast and what computes it."""
    sums = _Sums(program)
    for equation in _jax.equations(program):
        path = f"{scopes}/{_jax.name_scopes(equation)}"
        if _casts_gradient(equation, path) and (tree := sums.of(equation.invars[0])):
            yield [equation, *tree]
        for inner in _jax.inner_programs(equation):
            yield from _gradients(inner, path)


def _casts_gradient(equation: _jax.Equation, scopes: str) -> bool:
    if equation.primitive.name != _CAST or PARAMETER_CAST not in scopes:
        return False
    is_wide = equation.outvars[0].aval.dtype == jnp.float32
    return is_wide and _is_narrow(equation.invars[0])


class _Sums:
    """Finds the sums of which the variables of a program are made."""

    def __init__(self, program: _jax.Program) -> None:
        equations = _jax.equations(program)
        self._makers = {var: each for each in equations for var in each.outvars}
        self._uses = rewriting.use_counts(program)

    def of(self, atom: _jax.Atom) -> list[_jax.Equation]:
        """The equations from sums to a variable; none if it is not made of sums.

        What something else reads, too, is left as it is.
        """
        maker = None if isinstance(atom, _jax.Literal) else self._makers.get(atom)
        if maker is None or self._uses[atom] > 1 or len(maker.outvars) > 1:
            return []
        name = maker.primitive.name
        if name in CONTRACTIONS or name in _SUMS:
            return [maker]
        if name == _CAST:  # from f32: not rounding it is all there is to do
            return [] if _is_narrow(maker.invars[0]) else [maker]
        if _jax.is_jit(maker):
            inner = maker.params["jaxpr"]
            tree = _Sums(inner).of(_jax.outputs(inner)[0])
        elif name in _BETWEEN:
            narrow = filter(_is_narrow, maker.invars)
            tree = [each for operand in narrow for each in self.of(operand)]
        else:
            return []
        return [maker, *tree] if tree else []
