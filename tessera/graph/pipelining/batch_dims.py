# SPDX-License-Identifier: Apache-2.0
"""Finds the batch dims of a traced step, and which equations are row-wise independent.

A step is traced for a batch and for one microbatch. The programs have the same
equations, and a dim that is smaller in the second is a batch dim. An equation is
*row-wise* independent if its results for the microbatch are those rows of its results
for the batch. Of what is not known to be, only some is known to mix rows.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final

import numpy as np

from tessera.foundations.primitive_properties import SIZE_PRESERVING
from tessera.graph.rewriting import variables
from tessera.jax_compat import jaxprs, primitives

_OTHER_WORDS = """
    broadcast_in_dim conv_general_dilated dynamic_update_slice gather pad reshape rev
"""
# Whether these mix rows can be decided; others, such as kernels, may or may not.
_UNDERSTOOD: Final = (
    SIZE_PRESERVING | primitives.ALONG_ONE_DIM | frozenset(_OTHER_WORDS.split())
)
# The number of the first operand that is an index.
_FIRST_INDEX: Final = {"gather": 1, "dynamic_slice": 1, "dynamic_update_slice": 2}


@dataclass
class BatchDims:
    """Batch dims, by comparing the programs of a batch and of a microbatch.

    Attributes:
      microbatches: Rows of the batch over rows of the microbatch.
      twin: For each variable of the batch's program, the microbatch's.
    """

    microbatches: int | Fraction
    twin: dict[Any, Any] = field(default_factory=dict)

    def pair(self, whole: Sequence[Any], micro: Sequence[Any]) -> None:
        """Note which variables correspond to each other."""
        self.twin.update(zip(whole, micro, strict=True))

    def dim(self, variable: Any) -> int | None:
        """The batch dim of a variable; None without one, -1 if it is not unique."""
        long, short = variable.aval.shape, self.twin[variable].aval.shape
        if len(long) != len(short):
            return -1
        pairs = zip(long, short, strict=True)
        differ = [dim for dim, sizes in enumerate(pairs) if sizes[0] != sizes[1]]
        if not differ:
            return None
        first = differ[0]
        exact = len(differ) == 1 and long[first] == self.microbatches * short[first]
        return first if exact else -1

    def of(self, atoms: Iterable[jaxprs.Atom]) -> dict[Any, int]:
        """The variables among some atoms that have a batch dim, and these dims."""
        dims = {v: self.dim(v) for v in variables(atoms)}
        return {v: dim for v, dim in dims.items() if dim is not None}

    def is_row_wise(self, equation: jaxprs.Equation, twin: jaxprs.Equation) -> bool:
        """Whether the microbatch's results are rows of the batch's."""
        operand_dims, result_dims = self.of(equation.invars), self.of(equation.outvars)
        if -1 in (*operand_dims.values(), *result_dims.values()):
            return False
        if equation.primitive.name == "stage_end":
            return True  # the identity
        if jaxprs.inner_programs(equation):
            return self._is_row_wise_inside(equation, twin)
        dims = {result_dims.get(v) for v in equation.outvars}
        if len(dims) != 1 or None in dims:
            return False
        dim = next(iter(result_dims.values()))
        if not operand_dims:
            return _is_alike(equation, dim)
        return _depends_on_own_row(equation, operand_dims, dim)

    def _is_row_wise_inside(
        self, equation: jaxprs.Equation, twin: jaxprs.Equation
    ) -> bool:
        lengths = [primitives.scan_length(e) for e in (equation, twin)]
        if lengths[0] != lengths[1] or jaxprs.is_shard_map(equation):
            return False
        inner = zip(
            jaxprs.inner_programs(equation), jaxprs.inner_programs(twin), strict=True
        )
        return all(self.are_row_wise(*programs) for programs in inner)

    def are_row_wise(self, program: jaxprs.Program, twin: jaxprs.Program) -> bool:
        """Whether a program's equations are row-wise, and the same for any batch."""
        equations = map(jaxprs.equations, (program, twin))
        return have_same_equations(*equations) and all(
            have_same_numbers(equation, other)
            and (not has_rows or self.is_row_wise(equation, other))
            for equation, other, has_rows in self._pairs(program, twin)
        )

    def find_mixing(self, program: jaxprs.Program, twin: jaxprs.Program) -> str | None:
        """What is known to mix rows, or to depend on their numbers, or None.

        Kernels and other equations that are not understood are passed over.
        """
        numbered: dict[Any, jaxprs.Equation] = {}  # what depends on a row's own number
        for equation, other, has_rows in self._pairs(program, twin):
            values, indices = _values_and_indices(equation)
            origin = next((numbered[v] for v in values if v in numbered), None)
            if has_rows and equation.primitive.name == "iota":
                origin = None if self.is_row_wise(equation, other) else equation
            if origin is not None:
                numbered.update(dict.fromkeys(equation.outvars, origin))
            elif equation.outvars and not have_same_numbers(equation, other):
                return _message("depends on the number of rows", equation)
            reads_own_row = not numbered.keys().isdisjoint(indices)
            if has_rows and not (origin is equation or reads_own_row):
                is_numbered = origin is not None
                mixing = self._find_mixing_in(equation, other, is_numbered=is_numbered)
                if mixing is not None:
                    return mixing
        for atom in variables(jaxprs.outputs(program)):
            if atom in numbered:
                return _message("numbers the rows", numbered[atom])
        same = have_same_equations(jaxprs.equations(program), jaxprs.equations(twin))
        return None if same else "it does other things for another number of rows"

    def _find_mixing_in(
        self, equation: jaxprs.Equation, twin: jaxprs.Equation, *, is_numbered: bool
    ) -> str | None:
        if self.is_row_wise(equation, twin) or jaxprs.is_shard_map(equation):
            return None
        if inner := jaxprs.inner_programs(equation):
            pairs = zip(inner, jaxprs.inner_programs(twin), strict=True)
            if is_numbered:
                return None
            return next(filter(None, (self.find_mixing(*pair) for pair in pairs)), None)
        is_understood = equation.primitive.name in _UNDERSTOOD
        if is_understood and -1 not in self.of(equation.invars).values():
            return _message("mixes the rows", equation)
        return None

    def _pairs(
        self, program: jaxprs.Program, twin: jaxprs.Program
    ) -> Iterator[tuple[jaxprs.Equation, jaxprs.Equation, bool]]:
        """Equations that both programs begin with, and whether they have batch dims."""
        self.pair(jaxprs.constant_inputs(program), jaxprs.constant_inputs(twin))
        self.pair(jaxprs.inputs(program), jaxprs.inputs(twin))
        pairs = zip(jaxprs.equations(program), jaxprs.equations(twin), strict=False)
        for equation, other in pairs:
            if equation.primitive is not other.primitive:
                return
            self.pair(equation.outvars, other.outvars)
            has_rows = bool(self.of((*equation.invars, *equation.outvars)))
            yield equation, other, has_rows


def _message(what: str, equation: jaxprs.Equation) -> str:
    line = jaxprs.source_line(equation)
    return f"{equation.primitive.name} {what}" + (f"\nat {line}" if line else "")


def _values_and_indices(equation: jaxprs.Equation) -> tuple[list[Any], list[Any]]:
    """The operands that an equation computes with, and its indices."""
    name, operands = equation.primitive.name, equation.invars
    if name.startswith("scatter"):
        return variables((operands[0], *operands[2:])), variables(operands[1:2])
    count = _FIRST_INDEX.get(name, len(operands))
    return variables(operands[:count]), variables(operands[count:])


def have_same_equations(
    equations: Sequence[jaxprs.Equation], twins: Sequence[jaxprs.Equation]
) -> bool:
    """Whether two lists of equations have the same primitives in the same order."""
    return [e.primitive for e in equations] == [e.primitive for e in twins]


def have_same_numbers(equation: jaxprs.Equation, twin: jaxprs.Equation) -> bool:
    """Whether two equations have the same literals and parameters, but for sizes."""
    pairs = zip(equation.invars, twin.invars, strict=True)
    are_same = all(
        np.array_equal(a.val, b.val, equal_nan=np.asarray(a.val).dtype.kind == "f")
        for a, b in pairs
        if isinstance(a, jaxprs.Literal) and isinstance(b, jaxprs.Literal)
    )
    return are_same and primitives.have_same_parameters(equation, twin)


def _is_alike(equation: jaxprs.Equation, dim: int) -> bool:
    """Whether an equation that reads no rows has the same result in all of them."""
    match equation.primitive.name:
        case "iota":
            return primitives.dim_along(equation) != dim
        case "broadcast_in_dim":
            return dim not in primitives.broadcast_dims(equation)
    return False


def _depends_on_own_row(
    equation: jaxprs.Equation, rows: dict[Any, int], dim: int
) -> bool:
    """Whether an equation is row-wise, by its batch dims in operands and results."""
    name = equation.primitive.name
    if (along := primitives.dim_along(equation)) is not None:
        return along != dim
    if name in SIZE_PRESERVING:
        sizes = {v.aval.shape[d] for v, d in rows.items()}
        return sizes == {equation.outvars[0].aval.shape[dim]}
    match name:
        case "broadcast_in_dim":
            return primitives.broadcast_dims(equation)[rows[equation.invars[0]]] == dim
        case "reshape":
            return _keeps_row_order(equation.invars[0], rows, equation.outvars[0], dim)
        case "rev":
            return dim not in primitives.reversed_dims(equation)
        case "pad":
            return rows.keys() == {equation.invars[0]} and not any(
                primitives.padding(equation)[dim]
            )
        case "gather":
            return _is_gathered_by_row(equation, rows)
        case "dynamic_update_slice":
            return all(rows.get(v) == dim for v in equation.invars[:2])
        case "conv_general_dilated":
            conv = primitives.convolution(equation)
            is_batch = conv.dims.lhs_spec[0] == dim and conv.batch_groups == 1
            return is_batch and rows.keys() == {equation.invars[0]}
    return False


def _keeps_row_order(before: Any, rows: dict[Any, int], after: Any, to: int) -> bool:
    """Whether a reshape keeps rows in order, as a dim or the outer part of one."""
    first = before.aval.shape[: rows[before]]
    return math.prod(first) == math.prod(after.aval.shape[:to])


def _is_gathered_by_row(equation: jaxprs.Equation, rows: dict[Any, int]) -> bool:
    """Whether each row's results are gathered from that row, or from no row."""
    operand, dims = equation.invars[0], primitives.gather_dims(equation)
    dim = rows.get(operand)
    if dim is None or dim in dims.batch:
        return True
    return dims.sizes[dim] == operand.aval.shape[dim] and dim not in dims.indexed
