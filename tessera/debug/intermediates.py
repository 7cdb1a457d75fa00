# SPDX-License-Identifier: Apache-2.0
"""The values inside a program as outputs of it, for those who compare runs.

A program is interpreted equation by equation. Calls are entered, and loops are run with
what is wanted of their bodies stacked, one entry for each iteration. A manual region is
one operation; ``sites_inside`` enters one, with what each device holds as a row.
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

# What such operations do is seen in the next one that computes with their results.
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
      place: Number of the equation in its program, after those of the equations that
        hold that program.
      loops: For each number of ``place``, the loop that this equation is, if one.
      result: Which of the equation's results it is.
      operation: The primitive; ``input`` and ``output`` for the program's own.
      shape: Global shape, in a loop that of one iteration; in a manual region that of
        one device's block, after the number of devices.
      dtype: NumPy dtype.
      path: Name scopes, such as ``encoder/block``; the name of an input or output.
      source: ``file:line`` of the user's line, or ``""``.
      inside: For a manual region, the operation and the line that make the value there.
      region: Place of the manual region that was entered for it, if one was.
      axes: The mesh axes of that region, along which its rows are counted.
      is_kept: Whether one manual region alone keeps it for another.
      epsilon: Machine epsilon of the coarsest dtype that was computed in so far.
    """

    place: tuple[int, ...]
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
    is_kept: bool = False
    epsilon: float = 0.0

    @property
    def made(self) -> str:
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
        rest = iter(iterations)
        key: list[int] = []
        for number, loop in zip(self.place, self.loops, strict=True):
            key += (number, 0 if loop is None else next(rest))
        return (*key, self.result)


Found: TypeAlias = list[tuple[Site, Any]]


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
    walk = _Walk(platform, None)
    found: list[Site] = []

    def run(*values: Any) -> list[Any]:
        found[:] = [site for site, _ in walk.whole(program, values, inputs, outputs)]
        return []

    _jax.retrace(run, program)
    return found


def sites_inside(program: _jax.Program, region: Site, platform: str) -> list[Site]:
    """The values inside one manual region, and around it in calls and loops.

    Args:
      program: The program.
      region: A value that the region makes.
      platform: What it runs on.
    """
    walk = _Walk(platform, None, region.place)
    found: list[Site] = []

    def run(*values: Any) -> list[Any]:
        _, inside = walk.program(program, values, _Around())
        found[:] = [site for site, _ in inside]
        return []

    _jax.retrace(run, program)
    depth = len(region.place)
    return [s for s in found if s.place[:depth] == region.place != s.place]


def collecting(program: _jax.Program, wanted: Iterable[Site]) -> _jax.Program:
    """The program whose outputs are the values at some sites, in the order of sites."""
    wanted = list(wanted)
    region = next((site.region for site in wanted if site.region), None)
    walk = _Walk("", {(site.place, site.result) for site in wanted}, region)
    names = [""] * len(_jax.inputs(program)), [""] * len(_jax.outputs(program))

    def run(*values: Any) -> list[Any]:
        return [value for _, value in walk.whole(program, values, *names)]

    made = _jax.retrace(run, program)
    return _jax.without_dead_code(made, keep_inputs=True)


@dataclass(frozen=True, slots=True)
class _Around:
    """What an equation is in."""

    place: tuple[int, ...] = ()
    loops: tuple[Loop | None, ...] = ()
    path: str = ""
    source: str = ""


class _Walk:
    """One interpretation of a program, which keeps what is wanted of its values."""

    def __init__(
        self,
        platform: str,
        wanted: set[tuple[tuple[int, ...], int]] | None,
        region: tuple[int, ...] | None = None,
    ) -> None:
        self._wanted, self._region = wanted, region
        self._matmul_epsilon = _MATMUL_EPSILON.get(platform, 0.0)
        self._epsilon = 0.0

    def whole(
        self,
        program: _jax.Program,
        values: Sequence[Any],
        inputs: Sequence[str],
        outputs: Sequence[str],
    ) -> Found:
        """The program's inputs, the values inside, its outputs."""
        given = self._named("input", -1, values, inputs)  # as yet, these are exact
        results, inside = self.program(program, values, _Around())
        last = len(_jax.equations(program))
        return [*given, *inside, *self._named("output", last, results, outputs)]

    def _named(
        self, kind: str, place: int, values: Sequence[Any], names: Sequence[str]
    ) -> Found:
        return [
            (self._site(_Around((place,), (None,), name), i, kind, value), value)
            for i, (name, value) in enumerate(zip(names, values, strict=True))
            if self._is_wanted((place,), i, value)
        ]

    def _is_wanted(self, place: tuple[int, ...], result: int, value: Any) -> bool:
        if self._wanted is not None:
            return (place, result) in self._wanted
        aval = jax.typeof(value)
        return jnp.issubdtype(getattr(aval, "dtype", object), jnp.number) or (
            getattr(aval, "dtype", object) == jnp.bool_
        )

    def _site(self, here: _Around, result: int, operation: str, value: Any) -> Site:
        aval = jax.typeof(value)
        return Site(
            place=here.place,
            loops=here.loops,
            result=result,
            operation=operation,
            shape=aval.shape,
            dtype=aval.dtype,
            path=here.path,
            source=here.source,
            epsilon=self._epsilon,
        )

    def program(
        self, program: _jax.Program, values: Sequence[Any], around: _Around
    ) -> tuple[list[Any], Found]:
        """The outputs of a program, and what is wanted of the values inside."""
        env = Environment(program, values)
        found: Found = []
        read = {public: _read_atoms(program, public) for public in (False, True)}
        for number, equation in enumerate(_jax.equations(program)):
            if not equation.outvars:
                continue  # it prints, and would do so once for each comparison
            operands = [env.read(atom) for atom in equation.invars]
            scopes = _jax.name_scopes(equation)
            here = _Around(
                (*around.place, number),
                (*around.loops, None),
                "/".join(filter(None, (around.path, scopes))),
                _jax.source_line(equation) or around.source,
            )
            results, inside = self._equation(equation, operands, here)
            env.write(equation.outvars, results)
            found += inside
            if inside or equation.primitive.name in _MOVES | CALLS:
                continue
            found += self._results(equation, results, here, read)
        return [env.read(atom) for atom in _jax.outputs(program)], found

    def _results(
        self,
        equation: _jax.Equation,
        results: Sequence[Any],
        here: _Around,
        read: Mapping[bool, set[_jax.Atom]],
    ) -> Found:
        self._epsilon = max(self._epsilon, self._epsilon_of(equation))
        name, is_region = equation.primitive.name, _jax.is_manual_region(equation)
        return [
            (
                replace(
                    self._site(here, i, name, value),
                    inside=_maker(equation, i) if is_region else "",
                    is_kept=is_region and atom not in read[True],
                ),
                value,
            )
            for i, (atom, value) in enumerate(
                zip(equation.outvars, results, strict=True)
            )
            if atom in read[False] and self._is_wanted(here.place, i, value)
        ]

    def _equation(
        self, equation: _jax.Equation, operands: Sequence[Any], here: _Around
    ) -> tuple[list[Any], Found]:
        name, inner = equation.primitive.name, _jax.inner_programs(equation)
        if name in CALLS and len(inner) == 1:
            with _jax.source_context(equation):
                return self.program(inner[0], operands, here)
        if name == "scan" and not self._is_in_region(here):
            return self._scan(equation, operands, here)
        if here.place == self._region:
            return self._inside(equation, operands, here)
        return _jax.bind(equation, operands), []

    def _scan(
        self, equation: _jax.Equation, operands: Sequence[Any], here: _Around
    ) -> tuple[list[Any], Found]:
        """A loop whose body also gives what is wanted of it, stacked."""
        params = equation.params
        num_constants, num_carries = _jax.scan_sizes(equation)
        constants = list(operands[:num_constants])
        start = list(operands[num_constants:][:num_carries])
        stacked = list(operands[num_constants + num_carries :])
        loop = Loop(params["length"], params["reverse"])
        here = replace(here, loops=(*here.loops[:-1], loop))
        inside: list[Site] = []

        def body(carry: list[Any], item: list[Any]) -> Any:
            results, found = self.program(
                params["jaxpr"], [*constants, *carry, *item], here
            )
            inside[:] = [site for site, _ in found]
            carried = [
                _like(value, before)
                for value, before in zip(results[:num_carries], carry, strict=True)
            ]
            return carried, (results[num_carries:], [value for _, value in found])

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

    def _inside(
        self, region: _jax.Equation, operands: Sequence[Any], here: _Around
    ) -> tuple[list[Any], Found]:
        """A manual region that also gives what each device holds inside, as rows."""
        params = region.params
        mesh = params["mesh"]
        axes = tuple(a for a in mesh.axis_names if a in params["newly_manual_axes"])
        inside: list[Site] = []

        def body(*blocks: Any) -> Any:
            results, found = self.program(params["jaxpr"], blocks, here)
            count = math.prod(mesh.shape[axis] for axis in axes)
            inside[:] = [
                replace(site, shape=(count, *site.shape), region=here.place, axes=axes)
                for site, _ in found
            ]
            return tuple(results), [
                _jax.varying_over(value, axes)[None] for _, value in found
            ]

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

    def _is_in_region(self, here: _Around) -> bool:
        depth = len(self._region or here.place)
        return here.place[:depth] == self._region and len(here.place) > depth

    def _epsilon_of(self, equation: _jax.Equation) -> float:
        """Machine epsilon of the coarsest dtype that an equation computes in."""
        found = [_epsilon(atom.aval) for atom in equation.outvars]
        for inner in _jax.inner_programs(equation):
            found += map(self._epsilon_of, _jax.equations(inner))
        if equation.primitive.name == "reduce_precision":
            found.append(2.0 ** -equation.params["mantissa_bits"])
        if equation.primitive.name in CONTRACTIONS:
            found.append(self._matmul_epsilon)
        return max(found, default=0.0)


def _epsilon(aval: Any) -> float:
    dtype = getattr(aval, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        return 0.0
    return float(jnp.finfo(dtype).eps)


def _like(value: Any, before: Any) -> Any:
    """A carry with the type that it had: a body may have given a strong dtype."""
    dtype = jax.typeof(before).dtype
    return value if jax.typeof(value).dtype == dtype else value.astype(dtype)


def _read_atoms(program: _jax.Program, public: bool) -> set[_jax.Atom]:
    """The variables that something reads, or something other than regions and calls."""
    atoms = list(_jax.outputs(program))
    for equation in _jax.equations(program):
        is_private = equation.primitive.name in CALLS or _jax.is_manual_region(equation)
        if not (public and is_private):
            atoms += equation.invars
    return {atom for atom in atoms if not isinstance(atom, _jax.Literal)}


def _maker(region: _jax.Equation, result: int) -> str:
    """``dot_general at train.py:12``, which makes a result of a manual region."""
    body = region.params["jaxpr"]
    atom = _jax.outputs(body)[result]
    for inner in reversed(_jax.equations(body)):
        if atom not in inner.outvars:
            continue
        if inner.primitive.name not in _MOVES:
            return f"{inner.primitive.name} at {_jax.source_line(inner) or '?'}"
        atom = inner.invars[0]
    return ""
