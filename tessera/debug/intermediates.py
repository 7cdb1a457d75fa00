# SPDX-License-Identifier: Apache-2.0
"""Lists the intermediate values of a program, and returns them as its outputs.

A program is interpreted equation by equation. Calls are entered, and loops are run with
the values of their bodies stacked, one entry for each iteration. An SPMD region is one
operation; ``sites_inside`` enters one, with the value of each device as a row.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from tessera import _jax
from tessera.compiler.rewriting import interpret, variables
from tessera.primitive_properties import (
    BROADCASTS,
    CALLS,
    CONTRACTIONS,
    COPIES,
    PLACEMENTS,
    RESHAPES,
)

# What such operations do shows in the next one that computes with their results.
_MOVES: Final = COPIES | PLACEMENTS | RESHAPES | BROADCASTS | {"iota"}
# Matmuls of f32 at default precision: TF32 on GPUs, bf16 on TPUs.
_MATMUL_EPSILON: Final = {"gpu": 2.0**-10, "tpu": 2.0**-7}
_BOOL: Final = np.dtype(bool)


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop that a value is computed in."""

    length: int
    is_reversed: bool


@dataclass(frozen=True, slots=True)
class Site:
    """One value of a program.

    Attributes:
      position: Index of the equation in its program, after those of the equations that
        contain that program.
      loops: For each index in ``position``, the loop that this equation is, if any.
      result: Which of the equation's results it is.
      operation: The primitive; ``input`` and ``output`` for the program's own.
      shape: Global shape, in a loop that of one iteration; in an SPMD region that of
        one device's block, after the number of devices.
      dtype: NumPy dtype.
      path: Name scopes, such as ``encoder/block``; the name of an input or output.
      source: ``file:line`` of the user's line, or ``""``.
      inside: For an SPMD region, the operation and the line that compute the value.
      region: Position of the SPMD region that contains it, if it was entered.
      axes: The mesh axes of that region, along which its rows are counted.
      is_residual: Whether only another SPMD region reads it, which runs its backward.
      epsilon: Machine epsilon of the coarsest dtype that was computed in so far.
    """

    position: tuple[int, ...] = ()
    loops: tuple[Loop | None, ...] = ()
    result: int = 0
    operation: str = ""
    shape: tuple[int, ...] = ()
    dtype: np.dtype[Any] = _BOOL
    path: str = ""
    source: str = ""
    inside: str = ""
    region: tuple[int, ...] | None = None
    axes: tuple[str, ...] = ()
    is_residual: bool = False
    epsilon: float = 0.0

    @property
    def label(self) -> str:
        """The operation and its line: ``dot_general at train.py:12``."""
        return f"{self.operation} at {self.source or '?'}"

    @property
    def iterations(self) -> tuple[Loop, ...]:
        """The loops around it, outermost first; each is a leading dim of its values."""
        return tuple(loop for loop in self.loops if loop is not None)

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of its values, all iterations together."""
        return (*(loop.length for loop in self.iterations), *self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its values, all devices and iterations together."""
        return int(np.prod(self.full_shape)) * self.dtype.itemsize

    def when(self, iterations: Sequence[int]) -> tuple[int, ...]:
        """A key that orders values as they are computed, in certain iterations."""
        steps = iter(iterations)
        pairs = zip(self.position, self.loops, strict=True)
        key = [(index, 0 if loop is None else next(steps)) for index, loop in pairs]
        return (*(number for pair in key for number in pair), self.result)


def sites(
    program: _jax.Program, inputs: Sequence[str], outputs: Sequence[str], platform: str
) -> list[Site]:
    """Every value of a program that is worth comparing, in the order of computation.

    Args:
      program: A program without constants.
      inputs: Names of its inputs.
      outputs: Names of its outputs.
      platform: What it runs on.
    """
    return _Interpreter(platform).retrace(program, inputs, outputs)[0]


def sites_inside(program: _jax.Program, region: Site, platform: str) -> list[Site]:
    """The values inside one SPMD region, in order.

    Args:
      program: The program.
      region: A value that the region returns.
      platform: What it runs on.
    """
    every, _ = _Interpreter(platform, region=region.position).retrace(program)
    depth = len(region.position)
    return [s for s in every if s.position[:depth] == region.position != s.position]


def collecting(program: _jax.Program, selected: Iterable[Site]) -> _jax.Program:
    """The program whose outputs are the values at some sites, in the order of sites."""
    selected = list(selected)
    region = next((site.region for site in selected if site.region), None)
    keys = {(site.position, site.result) for site in selected}
    _, retraced = _Interpreter("", keys, region).retrace(program)
    return _jax.without_dead_code(retraced, keep_inputs=True)


class _Interpreter:
    """Runs a program equation by equation, and collects its values.

    Args:
      platform: What the program runs on.
      selected: Position and result of each value to collect; None is every number.
      region: Position of the SPMD region to enter.
    """

    def __init__(
        self,
        platform: str,
        selected: set[tuple[tuple[int, ...], int]] | None = None,
        region: tuple[int, ...] | None = None,
    ) -> None:
        self._selected, self._region = selected, region
        self._matmul_epsilon = _MATMUL_EPSILON.get(platform, 0.0)
        self._epsilon = 0.0
        # What is collected, with the traced value of each.
        self._values: list[tuple[Site, Any]] = []

    def retrace(
        self,
        program: _jax.Program,
        inputs: Sequence[str] = (),
        outputs: Sequence[str] = (),
    ) -> tuple[list[Site], _jax.Program]:
        """The sites collected, and the program that returns their values."""

        def run(*arguments: Any) -> list[Any]:
            # As yet the inputs are exact.
            self._collect_ends(-1, "input", arguments, inputs)
            results = self._program(program, arguments, Site())
            count = len(_jax.equations(program))
            self._collect_ends(count, "output", results, outputs)
            return [value for _, value in self._values]

        retraced = _jax.retrace(run, program)
        return [site for site, _ in self._values], retraced

    def _collect_ends(
        self, index: int, kind: str, values: Sequence[Any], names: Sequence[str]
    ) -> None:
        """Collect the inputs or outputs of the whole program."""
        named = zip(names or [""] * len(values), values, strict=True)
        for result, (name, value) in enumerate(named):
            self._collect(Site((index,), (None,), result, kind, path=name), value)

    def _collect(self, site: Site, value: Any) -> None:
        """Collect a value, if it is one of those that are selected."""
        aval = jax.typeof(value)
        if self._selected is None:
            dtype = getattr(aval, "dtype", object)
            is_selected = jnp.issubdtype(dtype, jnp.number) or dtype == jnp.bool_
        else:
            is_selected = (site.position, site.result) in self._selected
        if is_selected:
            kind = {"shape": aval.shape, "dtype": aval.dtype, "epsilon": self._epsilon}
            self._values.append((replace(site, **kind), value))

    def _program(
        self, program: _jax.Program, arguments: Sequence[Any], around: Site
    ) -> list[Any]:
        """The outputs of a program, whose values are collected."""
        read = {public: _read_atoms(program, public) for public in (False, True)}
        numbers = itertools.count()

        def apply(equation: _jax.Equation, operands: Sequence[Any]) -> list[Any]:
            number = next(numbers)
            if not equation.outvars:
                return []  # it prints, and would print once for each comparison
            scopes = _jax.name_scopes(equation)
            here = replace(
                around,
                position=(*around.position, number),
                loops=(*around.loops, None),
                operation=equation.primitive.name,
                path="/".join(filter(None, (around.path, scopes))),
                source=_jax.source_line(equation) or around.source,
            )
            count = len(self._values)
            results = self._equation(equation, operands, here)
            if len(self._values) == count and here.operation not in _MOVES | CALLS:
                self._collect_results(equation, results, here, read)
            return results

        return interpret(program, arguments, apply)

    def _collect_results(
        self,
        equation: _jax.Equation,
        results: Sequence[Any],
        here: Site,
        read: Mapping[bool, set[_jax.Atom]],
    ) -> None:
        self._epsilon = max(self._epsilon, self._epsilon_of(equation))
        pairs = zip(equation.outvars, results, strict=True)
        for result, (atom, value) in enumerate(pairs):
            site = replace(here, result=result)
            if _jax.is_shard_map(equation):
                inside, is_residual = (
                    _computed_by(equation, result),
                    atom not in read[True],
                )
                site = replace(site, inside=inside, is_residual=is_residual)
            if atom in read[False]:
                self._collect(site, value)

    def _equation(
        self, equation: _jax.Equation, operands: Sequence[Any], here: Site
    ) -> list[Any]:
        inner = _jax.inner_programs(equation)
        depth = len(self._region or here.position)
        in_region = here.position[:depth] == self._region and len(here.position) > depth
        if here.operation in CALLS and len(inner) == 1:
            with _jax.source_context(equation):
                return self._program(inner[0], operands, here)
        if here.operation == "scan" and not in_region:
            return self._scan(equation, operands, here)
        if here.position == self._region:
            return self._enter_region(equation, operands, here)
        return _jax.bind(equation, operands)

    def _apart(
        self, program: _jax.Program, arguments: Sequence[Any], here: Site
    ) -> tuple[list[Any], list[Site], list[Any]]:
        """The outputs of a program, the sites collected in it, and their values."""
        outer, self._values = self._values, list[tuple[Site, Any]]()
        results = self._program(program, arguments, here)
        inner, self._values = self._values, outer
        return results, [site for site, _ in inner], [value for _, value in inner]

    def _scan(
        self, equation: _jax.Equation, operands: Sequence[Any], here: Site
    ) -> list[Any]:
        """A loop whose body also returns the values collected in it, stacked."""
        params = equation.params
        num_constants, num_carries = _jax.scan_sizes(equation)
        constants = list(operands[:num_constants])
        start = list(operands[num_constants:][:num_carries])
        stacked = list(operands[num_constants + num_carries :])
        loop = Loop(params["length"], params["reverse"])
        here = replace(here, loops=(*here.loops[:-1], loop))
        inside: list[Site] = []

        def body(carry: list[Any], item: list[Any]) -> Any:
            arguments = [*constants, *carry, *item]
            results, inside[:], values = self._apart(params["jaxpr"], arguments, here)
            carried = list(map(_with_dtype_of, results[:num_carries], carry))
            return carried, (results[num_carries:], values)

        with _jax.source_context(equation):
            end, (rows, values) = jax.lax.scan(
                body,
                start,
                stacked,
                length=loop.length,
                reverse=loop.is_reversed,
                unroll=params["unroll"],
            )
        self._values += zip(inside, values, strict=True)
        return [*end, *rows]

    def _enter_region(
        self, region: _jax.Equation, operands: Sequence[Any], here: Site
    ) -> list[Any]:
        """An SPMD region that also returns the values of each device, as rows."""
        params = region.params
        mesh = params["mesh"]
        axes = tuple(a for a in mesh.axis_names if a in params["newly_manual_axes"])
        count = math.prod(mesh.shape[axis] for axis in axes)
        inside: list[Site] = []

        def body(*blocks: Any) -> Any:
            results, inside[:], values = self._apart(params["jaxpr"], blocks, here)
            rows = [_jax.varying_over(value, axes)[None] for value in values]
            return tuple(results), rows

        with _jax.source_context(region):
            results, values = jax.shard_map(
                body,
                mesh=mesh,
                in_specs=tuple(params["in_specs"]),
                out_specs=(tuple(params["out_specs"]), PartitionSpec(axes)),
                check_vma=params["check_vma"],
                axis_names=set(axes),
            )(*operands)
        for site, value in zip(inside, values, strict=True):
            shape = (count, *site.shape)
            site = replace(site, shape=shape, region=here.position, axes=axes)
            self._values.append((site, value))
        return list(results)

    def _epsilon_of(self, equation: _jax.Equation) -> float:
        """Machine epsilon of the coarsest dtype that an equation computes in."""
        epsilons = [_epsilon(atom.aval) for atom in equation.outvars]
        for inner in _jax.inner_programs(equation):
            epsilons += map(self._epsilon_of, _jax.equations(inner))
        if equation.primitive.name == "reduce_precision":
            epsilons.append(2.0 ** -equation.params["mantissa_bits"])
        if equation.primitive.name in CONTRACTIONS:
            epsilons.append(self._matmul_epsilon)
        return max(epsilons, default=0.0)


def _epsilon(aval: Any) -> float:
    dtype = getattr(aval, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        return 0.0
    return float(jnp.finfo(dtype).eps)


def _with_dtype_of(value: Any, before: Any) -> Any:
    """A carry with the dtype of its initial value, which a body may have promoted."""
    dtype = jax.typeof(before).dtype
    return value if jax.typeof(value).dtype == dtype else value.astype(dtype)


def _read_atoms(program: _jax.Program, public: bool) -> set[_jax.Atom]:
    """The variables that something reads, or something other than regions and calls."""
    atoms = list(_jax.outputs(program))
    for equation in _jax.equations(program):
        is_call = equation.primitive.name in CALLS
        if not (public and (is_call or _jax.is_shard_map(equation))):
            atoms += equation.invars
    return set(variables(atoms))


def _computed_by(region: _jax.Equation, result: int) -> str:
    """The operation that computes a result of an SPMD region, with its line."""
    body = region.params["jaxpr"]
    atom = _jax.outputs(body)[result]
    for inner in reversed(_jax.equations(body)):
        if atom not in inner.outvars:
            continue
        if inner.primitive.name not in _MOVES:
            return f"{inner.primitive.name} at {_jax.source_line(inner) or '?'}"
        atom = inner.invars[0]
    return ""
