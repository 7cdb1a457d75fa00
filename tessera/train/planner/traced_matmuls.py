# SPDX-License-Identifier: Apache-2.0
"""Finds the matmuls of a traced loss, and which parameter each of them multiplies by.

A parameter is followed from the program's inputs through casts, transposes, scans over
layers and calls, so that a product is known by the logical names of the dims that it
contracts and keeps. Products of two activations, as in attention, are counted apart.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import jax
import numpy as np

from tessera.analysis.flops import count_equation, is_live, repetitions
from tessera.analysis.timeline.operation_work import visited_share
from tessera.foundations.primitive_properties import KERNELS
from tessera.jax_compat import jaxprs, primitives
from tessera.tracing.scope import FALLBACK, GROUPED
from tessera.train.planner.matmuls import Lookup, Product, TracedCosts, Weight

# Larger constants are not evaluated: what selects a branch is of a few numbers.
_LARGEST_KNOWN: Final = 65_536
# What moves parts of arrays is an operation of its own in a compiled program.
_STARTS: Final = ("dynamic_", "gather", "scatter", "concatenate")
_SAME_DIMS: Final = (
    "convert_element_type",
    "copy",
    "optimization_barrier",
    "sharding_constraint",
    "stop_gradient",
)


@dataclass(frozen=True)
class _Known:
    """A value that is computed from constants alone.

    Attributes:
      value: The value; with ``per_step`` of each step of the scan around it.
      per_step: Whether the value is a scalar of each step.
    """

    value: np.ndarray
    per_step: bool = False


_Env: TypeAlias = dict[Any, Weight | _Known]


def find_products(
    program: jaxprs.Program, weights: Sequence[Weight | None]
) -> TracedCosts:
    """The matmuls of one execution of a program.

    Args:
      program: A jaxpr.
      weights: What each of its inputs is, where it is a parameter.

    Returns:
      Counts for one execution, without dead code. A branch whose index is computed
      from constants counts as often as it is taken; of others each counts equally.
    """
    found = TracedCosts()
    program = jaxprs.without_dead_code(program, keep_inputs=True)
    inputs = jaxprs.inputs(program)
    env: _Env = {
        var: weight for var, weight in zip(inputs, weights, strict=True) if weight
    }
    _Walk(found).program(program, env, 1.0)
    return found


class _Walk:
    """One pass over a program and those inside of it."""

    def __init__(self, found: TracedCosts) -> None:
        self.found = found
        self.scans = 0
        self.visited = 1.0  # of the blocks of kernels

    def program(self, program: jaxprs.Program, env: _Env, times: float) -> None:
        """Count what is in a program, and follow parameters through it."""
        constants = zip(
            jaxprs.constant_inputs(program), jaxprs.constants(program), strict=False
        )
        for var, value in constants:
            if np.size(value) <= _LARGEST_KNOWN:
                env[var] = _Known(np.asarray(value))
        for equation in jaxprs.equations(program):
            if is_live(equation):
                self._equation(equation, env, times)

    def _equation(self, equation: jaxprs.Equation, env: _Env, times: float) -> None:
        name = equation.primitive.name
        operands = [_value(atom, env) for atom in equation.invars]
        if self._evaluated(equation, operands, env):
            return
        if name in ("dot_general", "ragged_dot_general"):
            self._dot(equation, operands, times)
        elif name == "scan":
            self._scan(equation, operands, env, times)
        elif name == "cond":
            self._cond(equation, operands, env, times)
        elif name == "while" and _is_fallback(jaxprs.inner_programs(equation)[-1]):
            pass
        elif name in ("gather", "dynamic_slice") and isinstance(operands[0], Weight):
            self._rows(equation, operands[0], env)
        elif name in KERNELS or name.startswith("custom_call"):
            self._kernel(equation, times)
        elif inner := list(jaxprs.nested(equation)):
            self._call(equation, [each for _, each in inner], operands, env, times)
        elif name.startswith(("reduce_", "argmax", "sort", "cum")):
            self.found.reduced_bytes += times * _nbytes(equation.invars[0])
            self.found.other_flops += times * count_equation(equation).other
            self.found.operations += times
        else:
            if name.startswith(_STARTS):
                self.found.operations += times
            self.found.other_flops += times * count_equation(equation).other
            weights = [each for each in operands if isinstance(each, Weight)]
            if weights and (moved := _moved(equation, weights[0])):
                env[equation.outvars[0]] = moved

    def _evaluated(
        self, equation: jaxprs.Equation, operands: list[Any], env: _Env
    ) -> bool:
        """Compute an equation of constants; whether that was possible."""
        sizes = [math.prod(getattr(var.aval, "shape", ())) for var in equation.outvars]
        if max(sizes, default=0) > _LARGEST_KNOWN:
            return False
        if not all(isinstance(each, _Known) for each in operands):
            return False
        if equation.primitive.name in ("scan", "while", "pallas_call"):
            return False
        per_step = any(each.per_step for each in operands)
        if per_step and (max(sizes) > 1 or list(jaxprs.nested(equation))):
            return False
        if not operands and equation.primitive.name != "iota":
            return False
        try:
            results = jaxprs.bind(equation, [each.value for each in operands])
        except (TypeError, ValueError, NameError, RuntimeError):
            return False
        for var, result in zip(equation.outvars, results, strict=True):
            env[var] = _Known(np.asarray(result), per_step)
        return True

    def _dot(
        self, equation: jaxprs.Equation, operands: list[Any], times: float
    ) -> None:
        flops = float(count_equation(equation).matmul)
        self.found.total_flops += times * flops
        self.found.operations += times
        places = [i for i in (0, 1) if isinstance(operands[i], Weight)]
        if not places:
            self.found.inner_flops += times * flops
            atoms = [*equation.invars[:2], *equation.outvars]
            self.found.inner_bytes += times * sum(map(_nbytes, atoms))
            return
        place = places[-1]
        weight = operands[place]
        contracted, groups, kept = _weight_dims(equation, place)
        shape = equation.invars[place].aval.shape
        inner = math.prod(shape[dim] for dim in contracted)
        outer = math.prod(shape[dim] for dim in kept)
        is_ragged = (
            equation.primitive.name != "dot_general"
            or GROUPED in jaxprs.name_scopes(equation)
        )
        self.found.products.append(
            Product(
                path=weight.path,
                times=times,
                rows=flops / (2 * inner * outer),
                inner=inner,
                outer=outer,
                inner_names=tuple(weight.names[dim] for dim in contracted),
                outer_names=tuple(weight.names[dim] for dim in (*groups, *kept)),
                source=id(equation.invars[1 - place]),
                itemsize=equation.outvars[0].aval.dtype.itemsize,
                groups=math.prod(shape[dim] for dim in groups) if is_ragged else 1,
            )
        )

    def _kernel(self, equation: jaxprs.Equation, times: float) -> None:
        flops = float(count_equation(equation).matmul) * self.visited
        self.found.total_flops += times * flops
        self.found.inner_flops += times * flops
        atoms = [*equation.invars, *equation.outvars]
        self.found.inner_bytes += times * sum(map(_nbytes, atoms))
        self.found.operations += times

    def _rows(self, equation: jaxprs.Equation, weight: Weight, env: _Env) -> None:
        (result,) = equation.outvars
        if equation.primitive.name == "gather":
            row = Lookup(weight.path, weight.names, _nbytes(result))
            self.found.lookups.append(row)
        elif moved := _moved(equation, weight):
            env[result] = moved

    def _scan(
        self, equation: jaxprs.Equation, operands: list[Any], env: _Env, times: float
    ) -> None:
        body, length = primitives.body(equation), primitives.scan_length(equation)
        assert length is not None
        consts, carries = jaxprs.scan_sizes(equation)
        inner: _Env = {}
        for place, (var, value) in enumerate(
            zip(jaxprs.inputs(body), operands, strict=True)
        ):
            if value is None or consts <= place < consts + carries:
                continue
            if place < consts:
                inner[var] = value
            elif isinstance(value, Weight):
                inner[var] = Weight(value.path, value.names[1:])
            elif value.value.ndim == 1 and not value.per_step:
                inner[var] = _Known(value.value, per_step=True)
        self.found.operations += times * length
        self.scans += 1
        self.program(body, inner, times * length)
        self.scans -= 1
        for var, result in zip(
            equation.outvars[carries:], jaxprs.outputs(body)[carries:], strict=True
        ):
            if not self.scans:
                self.found.stacked_bytes += _nbytes(var)
            value = _value(result, inner)
            if isinstance(value, _Known) and value.per_step:
                env[var] = _Known(value.value)

    def _cond(
        self, equation: jaxprs.Equation, operands: list[Any], env: _Env, times: float
    ) -> None:
        branches = primitives.branches(equation)
        shares = [1 / len(branches)] * len(branches)
        index = operands[0]
        is_fallback = [*map(_is_fallback, branches)]
        if len(branches) == 2 and sum(is_fallback) == 1:
            shares = [0.0 if each else 1.0 for each in is_fallback]
        elif isinstance(index, _Known):
            taken = np.clip(index.value.astype(int).ravel(), 0, len(branches) - 1)
            counts = np.bincount(taken, minlength=len(branches))
            shares = [float(each) for each in counts / taken.size]
        for share, branch in zip(shares, branches, strict=True):
            if share:
                self._inside(branch, operands[1:], env, times * share)

    def _call(
        self,
        equation: jaxprs.Equation,
        programs: list[Any],
        operands: list[Any],
        env: _Env,
        times: float,
    ) -> None:
        """A call of a program with the operands of the equation."""
        program = programs[0]
        if len(jaxprs.inputs(program)) != len(operands):
            operands = [None] * len(jaxprs.inputs(program))
        times *= repetitions(equation)
        outer = self.visited
        self.visited = visited_share(jaxprs.name_scopes(equation)) or outer
        inner = self._inside(program, operands, env, times)
        self.visited = outer
        for var, result in zip(equation.outvars, jaxprs.outputs(program), strict=False):
            value = _value(result, inner)
            if value is not None:
                env[var] = value

    def _inside(
        self, program: jaxprs.Program, operands: list[Any], env: _Env, times: float
    ) -> _Env:
        pairs = zip(jaxprs.inputs(program), operands, strict=True)
        inner: _Env = {var: value for var, value in pairs if value is not None}
        self.program(program, inner, times)
        return inner


def _value(atom: Any, env: Mapping[Any, Any]) -> Weight | _Known | None:
    if hasattr(atom, "val"):
        return _Known(np.asarray(atom.val)) if np.size(atom.val) == 1 else None
    return env.get(atom)


def _moved(equation: jaxprs.Equation, weight: Weight) -> Weight | None:
    """What a parameter is after an equation that only moves or scales its numbers."""
    name = equation.primitive.name
    shape = equation.outvars[0].aval.shape
    match name:
        case "transpose":
            names = tuple(weight.names[dim] for dim in primitives.permutation(equation))
        case "squeeze":
            dims = primitives.removed_dims(equation) or ()
            names = tuple(n for i, n in enumerate(weight.names) if i not in dims)
        case "broadcast_in_dim":
            dims = zip(primitives.broadcast_dims(equation), weight.names, strict=True)
            names = tuple(map(dict(dims).get, range(len(shape))))
        case "reshape":
            return _reshaped(equation, weight)
        case _ if len(shape) == len(weight.names) and len(equation.outvars) == 1:
            names = weight.names
            if name not in (*_SAME_DIMS, "mul", "dynamic_slice", "slice", "add"):
                return None
        case _:
            return None
    return Weight(weight.path, names)


def _reshaped(equation: jaxprs.Equation, weight: Weight) -> Weight:
    """Names after a reshape: of merged dims that of the first with a name."""
    before = equation.invars[0].aval.shape
    after = equation.outvars[0].aval.shape
    names: list[str | None] = []
    start, products = 0, np.cumprod([1, *before])
    for size in after:
        end_product = products[start] * size
        ends = [i for i in range(start, len(products)) if products[i] == end_product]
        end = ends[-1] if ends and size > 1 else start
        merged = [name for name in weight.names[start:end] if name]
        names.append(merged[0] if merged else None)
        start = end
    return Weight(weight.path, tuple(names))


def _weight_dims(
    equation: jaxprs.Equation, place: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The weight's dims that are summed over, that choose a matrix, and the others."""
    shape = equation.invars[place].aval.shape
    dims = primitives.dot_dims(equation)
    if equation.primitive.name == "dot_general":
        groups = dims.batch[place]
    else:
        groups = primitives.ragged_dims(equation).groups if place == 1 else ()
    inner = dims.contracted[place]
    kept = tuple(d for d in range(len(shape)) if d not in (*inner, *groups))
    return inner, groups, kept


def _is_fallback(branch: jaxprs.Program) -> bool:
    """Whether data have to demand a branch or a loop; see ``scope.FALLBACK``."""
    names = map(jaxprs.name_scopes, jaxprs.equations(branch))
    return any(FALLBACK in name for name in names)


def _nbytes(atom: Any) -> int:
    aval = atom.aval
    dtype = getattr(aval, "dtype", None)
    if dtype is None or jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return 0
    return math.prod(getattr(aval, "shape", ())) * dtype.itemsize
