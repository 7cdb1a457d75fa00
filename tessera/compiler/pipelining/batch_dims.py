# SPDX-License-Identifier: Apache-2.0
"""Which dims of a traced step count the rows of its batch, and what keeps rows apart.

A step is traced for a batch and for one microbatch. The programs have the same
equations, and a dim that is smaller in the second counts rows. An equation *keeps rows
apart* where the microbatch's results are the rows of the batch's that its inputs are
the rows of. What is not known to do so does not, and only some of that is known to mix
them.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final

import numpy as np

from tessera import _jax
from tessera.primitive_properties import SIZE_PRESERVING

# Dims where an equation's results are made of several entries: by the parameter's name.
_ALONG: Final = {
    "cumsum": "axis",
    "cumprod": "axis",
    "cummax": "axis",
    "cummin": "axis",
    "cumlogsumexp": "axis",
    "sort": "dimension",
    "concatenate": "dimension",
    "split": "axis",
}
_OTHER_WORDS = """
    broadcast_in_dim conv_general_dilated dynamic_update_slice gather pad reshape rev
    top_k
"""
# Where it is known when they mix rows; others, such as kernels, may or may not.
_UNDERSTOOD: Final = SIZE_PRESERVING | frozenset((*_ALONG, *_OTHER_WORDS.split()))
# Parameters that say sizes of results, which are compared themselves.
_OF_SIZES: Final = frozenset(
    ("shape", "new_sizes", "limit_indices", "slice_sizes", "sizes")
)
# Operands from which on the others are indices.
_LOOK_UPS: Final = {"gather": 1, "dynamic_slice": 1, "dynamic_update_slice": 2}


@dataclass
class Rows:
    """The variables of a batch's program beside those of a microbatch's.

    Attributes:
      microbatches: How many times the rows of a microbatch the batch has.
      twin: For each variable of the batch's program, that of the microbatch's.
    """

    microbatches: int | Fraction
    twin: dict[Any, Any] = field(default_factory=dict)

    def pair(self, whole: Sequence[Any], micro: Sequence[Any]) -> None:
        """Let some variables be each other's."""
        self.twin.update(zip(whole, micro, strict=True))

    def dim(self, variable: Any) -> int | None:
        """The dim of a variable that counts rows; -1 where several do."""
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

    def of(self, atoms: Iterable[_jax.Atom]) -> dict[Any, int]:
        """The variables among some atoms that have rows, and their dims."""
        dims = {v: self.dim(v) for v in variables(atoms)}
        return {v: dim for v, dim in dims.items() if dim is not None}

    def are_kept_apart(self, equation: _jax.Equation, twin: _jax.Equation) -> bool:
        """Whether a microbatch's results are the rows of the batch's."""
        read, made = self.of(equation.invars), self.of(equation.outvars)
        if -1 in (*read.values(), *made.values()):
            return False
        if equation.primitive.name == "stage_end":
            return True  # it gives what it is given
        if _jax.inner_programs(equation):
            return self._are_kept_apart_inside(equation, twin)
        dims = {made.get(v) for v in equation.outvars}
        if len(dims) != 1 or None in dims:
            return False
        dim = next(iter(made.values()))
        return _keeps_apart(equation, read, dim) if read else _is_alike(equation, dim)

    def _are_kept_apart_inside(
        self, equation: _jax.Equation, twin: _jax.Equation
    ) -> bool:
        lengths = [e.params.get("length") for e in (equation, twin)]
        if lengths[0] != lengths[1] or _jax.is_shard_map(equation):
            return False
        inner = zip(
            _jax.inner_programs(equation), _jax.inner_programs(twin), strict=True
        )
        return all(self.unproven(*programs) is None for programs in inner)

    def unproven(self, program: _jax.Program, twin: _jax.Program) -> str | None:
        """What is not known to keep rows apart in a program of its inputs' rows."""
        for equation, other, has_rows in self._pairs(program, twin):
            if not have_same_numbers(equation, other):
                return _said("depends on the number of rows", equation)
            if has_rows and not self.are_kept_apart(equation, other):
                return _said("is not known to treat each row by itself", equation)
        return _other_equations(program, twin)

    def mixed(self, program: _jax.Program, twin: _jax.Program) -> str | None:
        """What makes rows of each other, or of their numbers, in a program of rows.

        Nothing is said of equations that are not understood, such as kernels.
        """
        numbered: dict[Any, _jax.Equation] = {}  # what depends on a row's own number
        for equation, other, has_rows in self._pairs(program, twin):
            values, indices = _values_and_indices(equation)
            origin = next((numbered[v] for v in values if v in numbered), None)
            if has_rows and equation.primitive.name == "iota":
                origin = None if self.are_kept_apart(equation, other) else equation
            if origin is not None:
                numbered.update(dict.fromkeys(equation.outvars, origin))
            elif equation.outvars and not have_same_numbers(equation, other):
                return _said("depends on the number of rows", equation)
            looks_itself_up = not numbered.keys().isdisjoint(indices)
            if has_rows and not (origin is equation or looks_itself_up):
                found = self._mixed_in(equation, other, is_numbered=origin is not None)
                if found is not None:
                    return found
        for atom in variables(_jax.outputs(program)):
            if atom in numbered:
                return _said("numbers the rows", numbered[atom])
        return _other_equations(program, twin)

    def _mixed_in(
        self, equation: _jax.Equation, twin: _jax.Equation, *, is_numbered: bool
    ) -> str | None:
        if self.are_kept_apart(equation, twin) or _jax.is_shard_map(equation):
            return None
        if inner := _jax.inner_programs(equation):
            pairs = zip(inner, _jax.inner_programs(twin), strict=True)
            found = (None if is_numbered else self.mixed(*pair) for pair in pairs)
            return next(filter(None, found), None)
        is_understood = equation.primitive.name in _UNDERSTOOD
        if is_understood and -1 not in self.of(equation.invars).values():
            return _said("mixes the rows", equation)
        return None

    def _pairs(
        self, program: _jax.Program, twin: _jax.Program
    ) -> Iterator[tuple[_jax.Equation, _jax.Equation, bool]]:
        """Equations as far as both programs have the same; whether they have rows."""
        self.pair(_jax.constant_inputs(program), _jax.constant_inputs(twin))
        self.pair(_jax.inputs(program), _jax.inputs(twin))
        pairs = zip(_jax.equations(program), _jax.equations(twin), strict=False)
        for equation, other in pairs:
            if equation.primitive is not other.primitive:
                return
            self.pair(equation.outvars, other.outvars)
            has_rows = bool(self.of((*equation.invars, *equation.outvars)))
            yield equation, other, has_rows


def _other_equations(program: _jax.Program, twin: _jax.Program) -> str | None:
    same = have_same_equations(_jax.equations(program), _jax.equations(twin))
    return None if same else "it does other things for another number of rows"


def _said(what: str, equation: _jax.Equation) -> str:
    line = _jax.source_line(equation)
    return f"{equation.primitive.name} {what}" + (f"\nat {line}" if line else "")


def _values_and_indices(equation: _jax.Equation) -> tuple[list[Any], list[Any]]:
    """What an equation computes with, and what tells it where to look that up."""
    name, operands = equation.primitive.name, equation.invars
    if name.startswith("scatter"):
        return variables((operands[0], *operands[2:])), variables(operands[1:2])
    count = _LOOK_UPS.get(name, len(operands))
    return variables(operands[:count]), variables(operands[count:])


def have_same_equations(
    equations: Sequence[_jax.Equation], twins: Sequence[_jax.Equation]
) -> bool:
    """Whether two lists of equations do the same things in the same order."""
    return [e.primitive for e in equations] == [e.primitive for e in twins]


def have_same_numbers(equation: _jax.Equation, twin: _jax.Equation) -> bool:
    """Whether two equations have the same numbers written into them, but for sizes."""
    pairs = zip(equation.invars, twin.invars, strict=True)
    are_same = all(
        np.array_equal(a.val, b.val, equal_nan=np.asarray(a.val).dtype.kind == "f")
        for a, b in pairs
        if isinstance(a, _jax.Literal) and isinstance(b, _jax.Literal)
    )
    return are_same and have_same_parameters(equation, twin)


def have_same_parameters(equation: _jax.Equation, twin: _jax.Equation) -> bool:
    """Whether two equations do the same, but for the sizes of their results."""
    return all(
        repr(value) == repr(twin.params.get(name))  # not-a-number is like itself
        for name, value in equation.params.items()
        if name not in _OF_SIZES and _is_plain(value)
    )


def _is_plain(value: Any) -> bool:
    """Whether a parameter is made of numbers and names, and holds no program."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, np.dtype))


def variables(atoms: Iterable[_jax.Atom]) -> list[Any]:
    """Those that are no literals."""
    return [atom for atom in atoms if not isinstance(atom, _jax.Literal)]


def _is_alike(equation: _jax.Equation, dim: int) -> bool:
    """Whether something that reads no rows is the same in all of them."""
    name, params = equation.primitive.name, equation.params
    if name == "iota":
        return params["dimension"] != dim
    return name == "broadcast_in_dim" and dim not in params["broadcast_dimensions"]


def _keeps_apart(equation: _jax.Equation, rows: dict[Any, int], dim: int) -> bool:
    """Whether rows stay apart, given their dims in the inputs and in the results."""
    name, params = equation.primitive.name, equation.params
    if name in _ALONG:
        return params[_ALONG[name]] != dim
    if name in SIZE_PRESERVING:
        sizes = {v.aval.shape[d] for v, d in rows.items()}
        return sizes == {equation.outvars[0].aval.shape[dim]}
    match name:
        case "broadcast_in_dim":
            return params["broadcast_dimensions"][rows[equation.invars[0]]] == dim
        case "reshape":
            return _stay_in_order(equation.invars[0], rows, equation.outvars[0], dim)
        case "rev":
            return dim not in params["dimensions"]
        case "pad":
            return rows.keys() == {equation.invars[0]} and not any(
                params["padding_config"][dim]
            )
        case "gather":
            return _is_gathered_by_row(equation, rows)
        case "dynamic_update_slice":
            return all(rows.get(v) == dim for v in equation.invars[:2])
        case "conv_general_dilated":
            is_batch = params["dimension_numbers"].lhs_spec[0] == dim
            is_whole = params["batch_group_count"] == 1
            return is_batch and is_whole and rows.keys() == {equation.invars[0]}
        case "top_k":
            return dim != len(equation.outvars[0].aval.shape) - 1
    return False


def _stay_in_order(before: Any, rows: dict[Any, int], after: Any, to: int) -> bool:
    """Whether a reshape keeps rows in order, alone or as the outer part of a dim."""
    first = before.aval.shape[: rows[before]]
    return math.prod(first) == math.prod(after.aval.shape[:to])


def _is_gathered_by_row(equation: _jax.Equation, rows: dict[Any, int]) -> bool:
    """Whether each row's results are gathered from that row, or from no row."""
    operand, numbers = equation.invars[0], equation.params["dimension_numbers"]
    dim = rows.get(operand)
    if dim is None or dim in numbers.operand_batching_dims:
        return True
    is_whole = equation.params["slice_sizes"][dim] == operand.aval.shape[dim]
    return is_whole and dim not in numbers.start_index_map
