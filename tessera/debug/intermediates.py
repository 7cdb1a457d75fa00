# SPDX-License-Identifier: Apache-2.0
"""Lists the intermediate values of a program, and returns them as its outputs.

A program is interpreted equation by equation. Calls are entered, and loops are run with
the values of their bodies stacked, one entry for each iteration. An SPMD region is one
operation; ``sites_inside`` enters one, with the value of each device as a row.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from tessera import _jax
from tessera.compiler.rewriting import Environment
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

    position: tuple[int, ...]
    loops: tuple[Loop | None, ...]
    result: int
    operation: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    path: str
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


# Sites with the traced value of each.
_Values: TypeAlias = list[tuple[Site, Any]]


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


@dataclass(frozen=True, slots=True)
class _Context:
    """The position of an equation, and what surrounds it."""

    position: tuple[int, ...] = ()
    loops: tuple[Loop | None, ...] = ()
    path: str = ""
    source: str = ""


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

    def retrace(
        self,
        program: _jax.Program,
        inputs: Sequence[str] = (),
        outputs: Sequence[str] = (),
    ) -> tuple[list[Site], _jax.Program]:
        """The sites collected, and the program that returns their values."""
        collected: list[Site] = []

        def run(*arguments: Any) -> list[Any]:
            # As yet the inputs are exact.
            first = self._ends(_Context((-1,), (None,)), "input", arguments, inputs)
            results, inside = self._program(program, arguments, _Context())
            last = _Context((len(_jax.equations(program)),), (None,))
            values = [*first, *inside, *self._ends(last, "output", results, outputs)]
            collected[:] = [site for site, _ in values]
            return [value for _, value in values]

        return collected, _jax.retrace(run, program)

    def _ends(
        self, here: _Context, kind: str, values: Sequence[Any], names: Sequence[str]
    ) -> _Values:
        """The inputs or outputs of the whole program."""
        names = names or [""] * len(values)
        return [
            (self._site(replace(here, path=name), i, kind, value), value)
            for i, (name, value) in enumerate(zip(names, values, strict=True))
            if self._is_selected(here.position, i, value)
        ]

    def _is_selected(self, position: tuple[int, ...], result: int, value: Any) -> bool:
        if self._selected is not None:
            return (position, result) in self._selected
        dtype = getattr(jax.typeof(value), "dtype", object)
        return jnp.issubdtype(dtype, jnp.number) or dtype == jnp.bool_

    def _site(self, here: _Context, result: int, operation: str, value: Any) -> Site:
        aval = jax.typeof(value)
        return Site(
            position=here.position,
            loops=here.loops,
            result=result,
            operation=operation,
            shape=aval.shape,
            dtype=aval.dtype,
            path=here.path,
            source=here.source,
            epsilon=self._epsilon,
        )

    def _program(
        self, program: _jax.Program, arguments: Sequence[Any], around: _Context
    ) -> tuple[list[Any], _Values]:
        """The outputs of a program, and the values collected in it."""
        env = Environment(program, arguments)
        values: _Values = []
        read = {public: _read_atoms(program, public) for public in (False, True)}
        for index, equation in enumerate(_jax.equations(program)):
            if not equation.outvars:
                continue  # it prints, and would print once for each comparison
            operands = [env.read(atom) for atom in equation.invars]
            scopes = _jax.name_scopes(equation)
            here = _Context(
                (*around.position, index),
                (*around.loops, None),
                "/".join(filter(None, (around.path, scopes))),
                _jax.source_line(equation) or around.source,
            )
            results, inside = self._equation(equation, operands, here)
            env.write(equation.outvars, results)
            values += inside
            if not inside and equation.primitive.name not in _MOVES | CALLS:
                values += self._results(equation, results, here, read)
        return [env.read(atom) for atom in _jax.outputs(program)], values

    def _results(
        self,
        equation: _jax.Equation,
        results: Sequence[Any],
        here: _Context,
        read: Mapping[bool, set[_jax.Atom]],
    ) -> _Values:
        self._epsilon = max(self._epsilon, self._epsilon_of(equation))
        values: _Values = []
        pairs = zip(equation.outvars, results, strict=True)
        for i, (atom, value) in enumerate(pairs):
            if atom in read[False] and self._is_selected(here.position, i, value):
                site = self._site(here, i, equation.primitive.name, value)
                if _jax.is_shard_map(equation):
                    is_residual = atom not in read[True]
                    inside = _computed_by(equation, i)
                    site = replace(site, inside=inside, is_residual=is_residual)
                values.append((site, value))
        return values

    def _equation(
        self, equation: _jax.Equation, operands: Sequence[Any], here: _Context
    ) -> tuple[list[Any], _Values]:
        name, inner = equation.primitive.name, _jax.inner_programs(equation)
        depth = len(self._region or here.position)
        in_region = here.position[:depth] == self._region and len(here.position) > depth
        if name in CALLS and len(inner) == 1:
            with _jax.source_context(equation):
                return self._program(inner[0], operands, here)
        if name == "scan" and not in_region:
            return self._scan(equation, operands, here)
        if here.position == self._region:
            return self._enter_region(equation, operands, here)
        return _jax.bind(equation, operands), []

    def _scan(
        self, equation: _jax.Equation, operands: Sequence[Any], here: _Context
    ) -> tuple[list[Any], _Values]:
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
            results, values = self._program(params["jaxpr"], arguments, here)
            inside[:] = [site for site, _ in values]
            carried = list(map(_with_dtype_of, results[:num_carries], carry))
            return carried, (results[num_carries:], [value for _, value in values])

        with _jax.source_context(equation):
            end, (rows, values) = jax.lax.scan(
                body,
                start,
                stacked,
                length=loop.length,
                reverse=loop.is_reversed,
                unroll=params["unroll"],
            )
        return [*end, *rows], list(zip(inside, values, strict=True))

    def _enter_region(
        self, region: _jax.Equation, operands: Sequence[Any], here: _Context
    ) -> tuple[list[Any], _Values]:
        """An SPMD region that also returns the values of each device, as rows."""
        params = region.params
        mesh = params["mesh"]
        axes = tuple(a for a in mesh.axis_names if a in params["newly_manual_axes"])
        count = math.prod(mesh.shape[axis] for axis in axes)
        inside: list[Site] = []

        def body(*blocks: Any) -> Any:
            results, values = self._program(params["jaxpr"], blocks, here)
            inside[:] = [
                replace(
                    site, shape=(count, *site.shape), region=here.position, axes=axes
                )
                for site, _ in values
            ]
            rows = [_jax.varying_over(value, axes)[None] for _, value in values]
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
        return list(results), list(zip(inside, values, strict=True))

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
    return {atom for atom in atoms if not isinstance(atom, _jax.Literal)}


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
