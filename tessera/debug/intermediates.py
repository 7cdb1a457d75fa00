# SPDX-License-Identifier: Apache-2.0
"""Lists the values inside a program, and returns them as its outputs.

A program is interpreted equation by equation. Calls are entered, and loops are run with
the values of their bodies stacked, one entry for each iteration. An SPMD region is one
operation.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from tessera.foundations.primitive_properties import (
    BROADCASTS,
    CALLS,
    CONTRACTIONS,
    COPIES,
    PLACEMENTS,
    RESHAPES,
)
from tessera.graph.rewriting import interpret, use_counts
from tessera.jax_compat import jaxprs, primitives

# What such operations do shows in the next one that computes with their results.
_MOVES: Final = COPIES | PLACEMENTS | RESHAPES | BROADCASTS | {"iota"}
# Matmuls of f32 at default precision: TF32 on GPUs, bf16 on TPUs.
_MATMUL_EPSILON: Final = {"gpu": 2.0**-10, "tpu": 2.0**-7}
_BOOL: Final = np.dtype(bool)


@dataclass(frozen=True, slots=True)
class EnclosingLoop:
    """A loop that a value is computed in.

    Attributes:
      number: That of its equation, in the order of computation.
      length: How often it runs.
      is_reversed: Whether its last index comes first.
    """

    number: int
    length: int
    is_reversed: bool


@dataclass(frozen=True, slots=True)
class Site:
    """One value of a program.

    Attributes:
      number: That of its equation, in the order of computation.
      loops: The loops around it, outermost first; each is a leading dim of its values.
      result: Which of the equation's results it is.
      operation: The primitive; ``input`` and ``output`` for the program's own.
      shape: Global shape, in a loop that of one iteration.
      dtype: NumPy dtype.
      path: Name scopes, such as ``encoder/block``; the name of an input or output.
      source: ``file:line`` of the user's line, or ``""``.
      inside: For an SPMD region, the operation and the line that compute the value.
      epsilon: Machine epsilon of the coarsest dtype that was computed in so far.
    """

    number: int = 0
    loops: tuple[EnclosingLoop, ...] = ()
    result: int = 0
    operation: str = ""
    shape: tuple[int, ...] = ()
    dtype: np.dtype[Any] = _BOOL
    path: str = ""
    source: str = ""
    inside: str = ""
    epsilon: float = 0.0

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of its values, all iterations together."""
        return (*(loop.length for loop in self.loops), *self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its values, all devices and iterations together."""
        return int(np.prod(self.full_shape)) * self.dtype.itemsize

    def when(self, steps: Sequence[int] = ()) -> tuple[int, ...]:
        """A key that orders values as they are computed.

        Args:
          steps: For each loop, after how many iterations; by default after none.
        """
        loops = zip(self.loops, steps or [0] * len(self.loops), strict=True)
        around = [(loop.number, step) for loop, step in loops]
        return (*itertools.chain.from_iterable(around), self.number)


def intermediates(
    program: jaxprs.Program,
    inputs: Sequence[str],
    outputs: Sequence[str],
    platform: str,
) -> tuple[tuple[Site, ...], jaxprs.Program]:
    """Every value of a program that is worth comparing, in the order of computation.

    Args:
      program: A program without constants.
      inputs: Names of its inputs.
      outputs: Names of its outputs.
      platform: What it runs on.

    Returns:
      The values, and the program that has them as its outputs.
    """
    collector = _Collector(platform)

    def run(*arguments: Any) -> list[Any]:
        collector.collect_ends("input", inputs, arguments)  # as yet exact
        results = collector.run(program, arguments, Site())
        collector.collect_ends("output", outputs, results)
        return [value for _, value in collector.values]

    retraced = jaxprs.retrace(run, program)
    return tuple(site for site, _ in collector.values), retraced


class _Collector:
    """Runs a program equation by equation, and collects its values.

    Args:
      platform: What the program runs on.

    Attributes:
      values: What is collected, with the traced value of each.
    """

    def __init__(self, platform: str) -> None:
        self.values: list[tuple[Site, Any]] = []
        self._numbers = itertools.count()
        self._matmul_epsilon = _MATMUL_EPSILON.get(platform, 0.0)
        self._epsilon = 0.0

    def collect_ends(
        self, kind: str, names: Sequence[str], values: Sequence[Any]
    ) -> None:
        """Collect the inputs or outputs of the whole program."""
        for name, value in zip(names, values, strict=True):
            self._collect(Site(next(self._numbers), operation=kind, path=name), value)

    def run(
        self, program: jaxprs.Program, arguments: Sequence[Any], around: Site
    ) -> list[Any]:
        """The outputs of a program, whose values are collected."""
        read = use_counts(program)

        def apply(equation: jaxprs.Equation, operands: Sequence[Any]) -> list[Any]:
            if not equation.outvars:
                return []  # it prints, and would print once for each comparison
            scopes, inner = (
                jaxprs.name_scopes(equation),
                jaxprs.inner_programs(equation),
            )
            here = replace(
                around,
                number=next(self._numbers),
                operation=equation.primitive.name,
                path="/".join(filter(None, (around.path, scopes))),
                source=jaxprs.source_line(equation) or around.source,
            )
            if here.operation in CALLS and len(inner) == 1:
                with jaxprs.source_context(equation):
                    return self.run(inner[0], operands, here)
            if here.operation == "scan":
                return self._scan(equation, operands, here)
            results = jaxprs.bind(equation, operands)
            if here.operation in _MOVES | CALLS:
                return results
            self._epsilon = max(self._epsilon, self._epsilon_of(equation))
            for result, atom in enumerate(equation.outvars):
                inside = ""
                if jaxprs.is_shard_map(equation):
                    inside = _computed_by(equation, result)
                if atom in read:
                    site = replace(here, result=result, inside=inside)
                    self._collect(site, results[result])
            return results

        return interpret(program, arguments, apply)

    def _collect(self, site: Site, value: Any) -> None:
        """Collect a value, if it is one of numbers."""
        aval = jax.typeof(value)
        dtype = getattr(aval, "dtype", object)
        if jnp.issubdtype(dtype, jnp.number) or dtype == jnp.bool_:
            kind = {"shape": aval.shape, "dtype": aval.dtype, "epsilon": self._epsilon}
            self.values.append((replace(site, **kind), value))

    def _scan(
        self, equation: jaxprs.Equation, operands: Sequence[Any], here: Site
    ) -> list[Any]:
        """A loop whose body also returns the values collected in it, stacked."""
        options, outer = primitives.scan_options(equation), self.values
        num_constants, num_carries = jaxprs.scan_sizes(equation)
        constants = operands[:num_constants]
        start = list(operands[num_constants:][:num_carries])
        stacked = list(operands[num_constants + num_carries :])
        loop = EnclosingLoop(here.number, options["length"], options["reverse"])
        around = replace(here, loops=(*here.loops, loop))
        inside: list[Site] = []

        def body(carry: list[Any], item: list[Any]) -> Any:
            self.values = []
            arguments = [*constants, *carry, *item]
            results = self.run(primitives.body(equation), arguments, around)
            inside[:] = [site for site, _ in self.values]
            carried = list(map(_with_dtype_of, results[:num_carries], carry))
            values = [value for _, value in self.values]
            return carried, (results[num_carries:], values)

        with jaxprs.source_context(equation):
            end, (rows, values) = jax.lax.scan(body, start, stacked, **options)
        self.values = [*outer, *zip(inside, values, strict=True)]
        return [*end, *rows]

    def _epsilon_of(self, equation: jaxprs.Equation) -> float:
        """Machine epsilon of the coarsest dtype that an equation computes in."""
        epsilons = [_epsilon(atom.aval) for atom in equation.outvars]
        for inner in jaxprs.inner_programs(equation):
            epsilons += map(self._epsilon_of, jaxprs.equations(inner))
        if (bits := primitives.mantissa_bits(equation)) is not None:
            epsilons.append(2.0**-bits)
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
    return value.astype(before.dtype) if value.dtype != before.dtype else value


def _computed_by(region: jaxprs.Equation, result: int) -> str:
    """The operation that computes a result of an SPMD region, with its line."""
    body = primitives.body(region)
    atom = jaxprs.outputs(body)[result]
    for inner in reversed(jaxprs.equations(body)):
        if atom not in inner.outvars:
            continue
        if inner.primitive.name not in _MOVES:
            return f"{inner.primitive.name} at {jaxprs.source_line(inner) or '?'}"
        atom = inner.invars[0]
    return ""
