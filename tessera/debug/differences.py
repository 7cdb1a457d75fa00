# SPDX-License-Identifier: Apache-2.0
"""Compares the values of one program on two meshes, and reports the differences."""

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from tessera.analysis.source_lines import short
from tessera.debug.intermediates import Site
from tessera.mesh import Mesh

__all__ = ["Difference", "Report"]

Array: TypeAlias = np.ndarray[Any, Any]


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

    def as_lines(self) -> list[str]:
        """The operation, its source line, the error, and its index."""
        site = self.site
        path = f" in {site.path}" if site.path else ""
        shape = ",".join(map(str, site.shape))
        lines = [f"operation  {site.operation}: {site.dtype.name}[{shape}]{path}"]
        if site.source:
            lines.append(f"line       {short(site.source)}")
        if site.inside:
            operation, _, source = site.inside.partition(" at ")
            lines.append(f"inside     made by {operation} at {short(source)}")
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


def difference(
    site: Site,
    expected: Array,
    value: Array,
    rtol: float | None = None,
    atol: float | None = None,
) -> Difference | None:
    """Compare the values of one operation on two meshes.

    Args:
      site: The operation on the reference.
      expected: Its values on the reference; loops around it are leading dims.
      value: Its values on the other mesh.
      rtol: Relative error that is no difference; see ``compare_layouts``.
      atol: The same, absolute.
    """
    if expected.shape != value.shape:
        depth = len(site.loops)
        first, shape = (0,) * depth, value.shape[depth:]
        return Difference(site=site, when=site.when(), iterations=first, shape=shape)
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    expected, value = expected.astype(wide), value.astype(wide)
    allowed = _allowed(site, expected, rtol, atol)
    same = (value == expected) | (np.isnan(value) & np.isnan(expected))
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.where(same, 0.0, np.abs(value - expected))
    error = np.where(np.isnan(error), math.inf, error)
    wrong = error > allowed
    if not wrong.any():
        return None
    # The first iteration in time: a reversed loop begins with the last index.
    each = wrong.reshape(*wrong.shape[: len(site.loops)], -1).any(axis=-1)
    flipped = tuple(axis for axis, loop in enumerate(site.loops) if loop.is_reversed)
    steps = tuple(map(int, np.argwhere(np.flip(each, flipped))[0]))
    iterations = tuple(
        loop.length - 1 - step if loop.is_reversed else step
        for loop, step in zip(site.loops, steps, strict=True)
    )
    wrong, error = wrong[iterations], np.where(wrong, error, -1.0)[iterations]
    index = tuple(map(int, np.unravel_index(int(error.argmax()), error.shape)))
    at = (*iterations, *index)
    return Difference(
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


def _allowed(
    site: Site, expected: Array, rtol: float | None, atol: float | None
) -> Array:
    """The largest error of each element: none of integers, half of the digits else.

    A number has the error of what it was computed from, so a share of the largest
    number of the array is allowed too.
    """
    if not site.epsilon or not jnp.issubdtype(site.dtype, jnp.inexact):
        return np.zeros(expected.shape)
    sizes = np.where(np.isfinite(expected), np.abs(expected), 0.0)
    rtol = math.sqrt(site.epsilon) if rtol is None else rtol
    atol = rtol * sizes.max(initial=0.0) if atol is None else atol
    return atol + rtol * sizes


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report:
    """The result of ``compare_layouts``; prints as text.

    Attributes:
      name: The step.
      reference: The mesh that the other is compared with.
      mesh: The other mesh.
      first: The first difference in the order of computation; None where there is none.
      compared: How many operations both meshes have.
      alone: How many operations only one of the two meshes has.
    """

    name: str
    reference: Mesh
    mesh: Mesh
    first: Difference | None
    compared: int
    alone: int

    @property
    def agrees(self) -> bool:
        """Whether there is no difference."""
        return self.first is None

    def as_text(self) -> str:
        """The first operation that differs, or that none does."""
        found = f"no difference in {self.compared} operations"
        if self.first is not None:
            found = "\n  ".join(("the first difference", *self.first.as_lines()))
        lines = [
            f"step {self.name}, compared with {self.reference.topology}",
            f"{self.mesh.topology}: {found}",
        ]
        if self.alone:
            verb = "operation has" if self.alone == 1 else "operations have"
            lines.append(f"  {self.alone} {verb} no counterpart")
        return "\n".join(lines)

    __str__ = as_text
    __repr__ = as_text
