# SPDX-License-Identifier: Apache-2.0
"""Rewrite weight-gradient matmuls in the form that XLA's CPU compiler runs fast."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import jax.numpy as jnp
from jax import lax

from tessera.graph import rewriting
from tessera.graph.ir import Graph
from tessera.jax_compat import jaxprs, primitives

Dims: TypeAlias = tuple[int, ...]

# With fewer multiplications, one more operation costs more than the form saves.
_WORTH_IT: Final = 1 << 22


def orient_matmuls(graph: Graph) -> Graph:
    """Contract the last dims of left operands, on CPU. Numerics: reordered.

    The product is the same; its sums may be made in another order. XLA's CPU compiler
    hands a matmul to its fast kernels where the left operand's last dims are
    contracted. In a weight gradient those are the first dims of both operands, and JAX
    writes it the other way around, followed by a transpose, which the compiler runs as
    a slow loop. This pass transposes the smaller operand first and makes it the left
    one; the transpose that follows goes where the result is then in its order.
    Optimization barriers keep the compiler from merging the transposes into the matmul
    again. Dims are not merged, so each keeps its layout over the mesh.

    The compiler transposes an activation as soon as it has it, in the forward pass, and
    it may be needed untransposed as well. So of two operands of one size the cotangent
    is transposed, which does not live long.

    Before:  g = dot_general[contract B,T of both] dy:[B,T,F] x:[B,T,D]    [F, D]
             w = transpose g                                               [D, F]
    After:   a = optimization_barrier (transpose x)                        [D, B, T]
             w = dot_general[contract B,T of both] a dy                    [D, F]
    """
    if graph.platform != "cpu":
        return graph
    plans = {id(p.equation): p for p in _plans(graph.program)}
    if not plans:
        return graph
    exchanged = {
        id(plan.transpose) for plan in plans.values() if plan.transpose is not None
    }

    def is_planned(equation: jaxprs.Equation) -> bool:
        return id(equation) in plans or id(equation) in exchanged

    def apply(equation: jaxprs.Equation, operands: Sequence[Any]) -> list[Any]:
        if id(equation) in exchanged:
            return [operands[0]]  # The matmul gave it as it is to be.
        return [plans[id(equation)].product(*operands)]

    return graph.with_program(rewriting.rewrite(graph.program, is_planned, apply))


@dataclass(frozen=True)
class _Operand:
    """One side of a matmul, its dims by what becomes of them."""

    atom: Any
    batch: Dims
    contracted: Dims

    @property
    def shape(self) -> Dims:
        return self.atom.aval.shape

    @property
    def free(self) -> Dims:
        taken = {*self.batch, *self.contracted}
        return tuple(dim for dim in range(len(self.shape)) if dim not in taken)

    def size(self, dims: Dims) -> int:
        """Of some of its dims together."""
        return math.prod(self.shape[dim] for dim in dims)

    @property
    def contracts_first(self) -> bool:
        """Whether the contracted dims come before the free ones."""
        return max(self.contracted) < min(self.free)

    @property
    def contracts_last(self) -> bool:
        """Whether they come after them."""
        return min(self.contracted) > max(self.free)


@dataclass(frozen=True)
class _Orientation:
    """A matmul to be written another way.

    Attributes:
      equation: The matmul.
      left: The operand whose free dims come first in what is wanted.
      right: The other one.
      transpose: The transpose that wants them in the other order than the matmul has.
    """

    equation: jaxprs.Equation
    left: _Operand
    right: _Operand
    transpose: jaxprs.Equation | None

    @property
    def transposes_left(self) -> bool:
        """Whether the left operand is the one to transpose."""
        return self._cost(self.left) <= self._cost(self.right)

    def _cost(self, operand: _Operand) -> tuple[bool, int, bool]:
        """Of transposing an operand; one of mixed dims is transposed in any case.

        Of two as large it is the cotangent, which does not live long. JAX writes it
        first.
        """
        is_second = operand.atom is not self.equation.invars[0]
        return operand.contracts_first, operand.size(operand.free), is_second

    def product(self, first: Any, second: Any) -> Any:
        """The product of the equation's operands, in the order that is wanted."""
        left, right = (self.left, first), (self.right, second)
        if self.transpose is not None:
            left, right = (self.left, second), (self.right, first)
        with jaxprs.source_context(self.equation):
            if self.transposes_left:
                return self._product(*left, *right)
            transposed = lax.optimization_barrier(self._product(*right, *left))
            batch, firsts = len(self.left.batch), len(self.right.free)
            return lax.transpose(transposed, _exchange(batch, firsts, transposed.ndim))

    def _product(self, left: _Operand, a: Any, right: _Operand, b: Any) -> Any:
        """Of ``a``, transposed to have its contracted dims last, and ``b``."""
        order = (*left.batch, *left.free, *left.contracted)
        transposed = lax.optimization_barrier(lax.transpose(a, order))
        batch = len(left.batch)
        last = range(batch + len(left.free), transposed.ndim)
        dims = primitives.DotDims(
            (tuple(last), right.contracted),
            (tuple(range(batch)), right.batch),
        )
        return primitives.bind_matmul(self.equation, [transposed, b], dims=dims)


def _plans(program: jaxprs.Program) -> Iterator[_Orientation]:
    """The matmuls that contract neither operand's last dims, nested ones too."""
    for each in rewriting.programs_from(program, jaxprs.inner_programs):
        equations, read = jaxprs.equations(each), rewriting.use_counts(each)
        transposes = {
            equation.invars[0]: equation
            for equation in equations
            if equation.primitive.name == "transpose" and read[equation.invars[0]] == 1
        }
        for equation in equations:
            if equation.primitive.name == "dot_general":
                plan = _plan(equation, transposes.get(equation.outvars[0]))
                if plan is not None:
                    yield plan


def _plan(
    equation: jaxprs.Equation, transpose: jaxprs.Equation | None
) -> _Orientation | None:
    contracted, batch = primitives.dot_dims(equation)
    first, second = (
        _Operand(atom, b, c)
        for atom, b, c in zip(equation.invars, batch, contracted, strict=True)
    )
    if (
        not all(side.contracted and side.free for side in (first, second))
        or first.contracts_last
        or second.contracts_last
        or math.prod(first.shape) * second.size(second.free) < _WORTH_IT
        or not jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating)
        or primitives.is_product_split(equation)  # its dims, in this order
    ):
        return None
    free = len(first.batch), len(first.free), equation.outvars[0].aval.ndim
    if transpose is None or primitives.permutation(transpose) != _exchange(*free):
        return _Orientation(equation, first, second, None)
    return _Orientation(equation, second, first, transpose)


def _exchange(batch: int, first: int, rank: int) -> Dims:
    """The permutation that puts the free dims of the second operand first."""
    firsts = range(batch, batch + first)
    return (*range(batch), *range(batch + first, rank), *firsts)
