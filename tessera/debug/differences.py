# SPDX-License-Identifier: Apache-2.0
"""Compares the values of one program on two meshes, and reports the differences."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import jax.numpy as jnp
import numpy as np

from tessera.analysis.source_lines import short
from tessera.debug.intermediates import Site
from tessera.mesh import Mesh

__all__ = ["Difference", "MeshComparison", "Report", "Tolerance"]

_MAX_LATER: Final = 5
Array: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far two floating-point numbers may be apart; others have to be equal.

    Attributes:
      rtol: Relative error; None is the square root of the machine epsilon of the
        coarsest dtype that was computed in up to it, which is half of its digits.
      atol: Absolute error allowed in addition; None is ``rtol`` of the largest number
        of the array, because a difference has the error of what it was computed from.
    """

    rtol: float | None = None
    atol: float | None = None

    def allowed(self, site: Site, expected: Array) -> Array:
        """The largest error of each element."""
        if not site.epsilon or not jnp.issubdtype(site.dtype, jnp.inexact):
            return np.zeros(expected.shape)
        sizes = np.where(np.isfinite(expected), np.abs(expected), 0.0)
        rtol = math.sqrt(site.epsilon) if self.rtol is None else self.rtol
        atol = rtol * sizes.max(initial=0.0) if self.atol is None else self.atol
        return atol + rtol * sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One value that is not the same on two meshes.

    In a loop, the values are those of the first iteration that differs.

    Attributes:
      site: The operation on the reference.
      when: A key that orders differences as they are computed.
      iterations: The iteration of each loop around it.
      error: The largest error.
      allowed: The largest error allowed there.
      index: The index of the largest error.
      value: The number there.
      expected: The number there on the reference.
      count: How many elements differ.
      shape: Its shape, where that is not the reference's.
      diagnosis: What is wrong in an SPMD region, as far as the numbers show: lines,
        each with what it is about.
    """

    site: Site
    when: tuple[int, ...] = ()
    iterations: tuple[int, ...] = ()
    error: float = math.inf
    allowed: float = 0.0
    index: tuple[int, ...] = ()
    value: Any = None
    expected: Any = None
    count: int = 0
    shape: tuple[int, ...] | None = None
    diagnosis: tuple[tuple[str, str], ...] = ()

    def as_lines(self) -> list[str]:
        """The operation, its source line, the error, and its index."""
        site = self.site
        path = f" in {site.path}" if site.path else ""
        lines = [f"operation  {site.operation}: {_typed(site, site.shape)}{path}"]
        if site.source:
            lines.append(f"line       {short(site.source)}")
        if site.inside:
            lines.append(f"inside     made by {shortened(site.inside)}")
        lines += [f"{head:9}  {text}" for head, text in self.diagnosis]
        if self.shape is not None:
            return [*lines, f"shape      {list(self.shape)}, not {list(site.shape)}"]
        where = list(self.index) if self.index else "the only element"
        if self.iterations:
            where = f"{where} of iteration {', '.join(map(str, self.iterations))}"
        return [
            *lines,
            f"error      {self.error:.3g}, allowed {self.allowed:.3g}, "
            f"in {self.count} of {math.prod(site.shape)} elements",
            f"largest    at {where}: {self.value:.6g}, not {self.expected:.6g}",
        ]

    def as_phrase(self) -> str:
        """The operation, its line and the error in one phrase."""
        name = self.site.path if self.site.operation == "output" else ""
        line = f" at {short(self.site.source)}" if self.site.source else ""
        error = "shape" if self.shape is not None else f"{self.error:.3g}"
        return f"{name or self.site.operation}{line}: {error}"


def difference(
    site: Site, other: Site, expected: Array, value: Array, tolerance: Tolerance
) -> tuple[Difference | None, float]:
    """Compare the values of one operation on two meshes.

    Args:
      site: The operation on the reference.
      other: The same operation on the other mesh.
      expected: Its values on the reference; loops around it are leading dims.
      value: Its values on the other mesh.
      tolerance: What is no difference.

    Returns:
      The difference or None, and the largest error as a share of what is allowed.
    """
    if expected.shape != value.shape:
        first = (0,) * len(site.iterations)
        differs = Difference(
            site=site, when=site.when(first), iterations=first, shape=other.shape
        )
        return differs, math.inf
    expected, value = wide(expected), wide(value)
    allowed = tolerance.allowed(site, expected)
    same = (value == expected) | (np.isnan(value) & np.isnan(expected))
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.where(same, 0.0, np.abs(value - expected))
    error = np.where(np.isnan(error), math.inf, error)
    wrong = error > allowed
    if not wrong.any():
        inexact = allowed > 0
        return None, float((error[inexact] / allowed[inexact]).max(initial=0.0))
    steps, iterations = _first_iteration(site, wrong)
    wrong, error = wrong[iterations], np.where(wrong, error, -1.0)[iterations]
    index = tuple(map(int, np.unravel_index(int(error.argmax()), error.shape)))
    at = (*iterations, *index)
    differs = Difference(
        site=site,
        when=site.when(steps),
        iterations=iterations,
        error=float(error[index]),
        allowed=float(allowed[at]),
        index=index,
        value=value[at].item(),
        expected=expected[at].item(),
        count=int(wrong.sum()),
    )
    return differs, math.inf


def wide(array: Array) -> Array:
    """The same numbers in a dtype that can represent their differences."""
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _first_iteration(
    site: Site, wrong: Array
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first iteration with a difference: its number in time, and its index."""
    loops = site.iterations
    each = wrong.reshape(*wrong.shape[: len(loops)], -1).any(axis=-1)
    flipped = tuple(axis for axis, loop in enumerate(loops) if loop.is_reversed)
    steps = tuple(map(int, np.argwhere(np.flip(each, flipped))[0]))
    indices = tuple(
        loop.length - 1 - step if loop.is_reversed else step
        for loop, step in zip(loops, steps, strict=True)
    )
    return steps, indices


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshComparison:
    """One mesh against the reference.

    Attributes:
      mesh: The mesh.
      differences: What differs, in the order of computation; after the first one, only
        those that were computed in the same run.
      compared: How many operations both meshes have.
      alone: How many operations only one of the two meshes has.
      largest: The largest error that is no difference, as a share of what is allowed.
      largest_at: The operation that has it.
    """

    mesh: Mesh
    differences: tuple[Difference, ...]
    compared: int
    alone: int
    largest: float
    largest_at: Site | None

    @property
    def first(self) -> Difference | None:
        """The first difference; None where there is none."""
        return self.differences[0] if self.differences else None

    def as_lines(self) -> list[str]:
        """The comparison in lines."""
        lines = [f"{self.mesh.topology}: {self._verdict()}"]
        if self.first is not None:
            lines += [f"  {line}" for line in self.first.as_lines()]
            lines += [f"  {line}" for line in self._later()]
        if self.alone:
            verb = "operation has" if self.alone == 1 else "operations have"
            lines.append(f"  {self.alone} {verb} no counterpart")
        return lines

    def _verdict(self) -> str:
        if self.first is not None:
            return "the first difference"
        text = f"no difference in {self.compared} operations"
        if self.largest_at is None or not self.largest:
            return f"{text}; all are equal"
        source = self.largest_at.source
        line = f" at {short(source)}" if source else ""
        return (
            f"{text}; the largest error is {self.largest:.2g} of what is allowed, "
            f"in {self.largest_at.operation}{line}"
        )

    def _later(self) -> list[str]:
        later = [d for d in self.differences[1:] if d.site.operation != "output"]
        results = [d for d in self.differences[1:] if d.site.operation == "output"]
        return [*_listed("then       ", later), *_listed("results    ", results)]


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """The result of ``compare_layouts``; prints as text.

    Attributes:
      name: The step.
      reference: The mesh that the others are compared with.
      meshes: One comparison for each of them.
    """

    name: str
    reference: Mesh
    meshes: tuple[MeshComparison, ...]

    @property
    def agrees(self) -> bool:
        """Whether no mesh differs from the reference."""
        return all(comparison.first is None for comparison in self.meshes)

    @property
    def first(self) -> Difference | None:
        """The first difference of the first mesh that has one."""
        return next((m.first for m in self.meshes if m.first is not None), None)

    def as_text(self) -> str:
        """For each mesh the first operation that differs, or that none does."""
        lines = [f"step {self.name}, compared with {self.reference.topology}"]
        for comparison in self.meshes:
            lines += comparison.as_lines()
        return "\n".join(lines)

    __str__ = as_text
    __repr__ = as_text


def _listed(head: str, differences: Sequence[Difference]) -> list[str]:
    shown = [each.as_phrase() for each in differences[:_MAX_LATER]]
    if more := len(differences) - len(shown):
        shown.append(f"{more} more")
    return [(head if i == 0 else " " * len(head)) + s for i, s in enumerate(shown)]


def _typed(site: Site, shape: tuple[int, ...]) -> str:
    return f"{site.dtype.name}[{','.join(map(str, shape))}]"


def shortened(phrase: str) -> str:
    """``dot_general at train.py:12``, with the line as tables show it."""
    operation, _, source = phrase.partition(" at ")
    return f"{operation} at {short(source)}"
