# SPDX-License-Identifier: Apache-2.0
"""``plan``: the mesh for a step of the user's own, compiled for each candidate."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import PartitionSpec

from tessera.analysis.memory import Memory, format_bytes
from tessera.analysis.tables import aligned, format_seconds
from tessera.analysis.timeline.report import Timeline
from tessera.errors import PlanError, TesseraError
from tessera.graph.function import Function
from tessera.mesh import Mesh
from tessera.targets.target import Target
from tessera.train.planner.search_space import factorings

_COLUMNS = ("mesh", "step", "compute", "exposed", "idle", "memory", "of device")
_MOST_MESHES = 64


@dataclass(frozen=True)
class PlannedMesh:
    """A mesh that the step was compiled for.

    Attributes:
      mesh: With the target.
      timeline: What a step takes, as predicted.
      memory: Bytes of a device, as the target's compiler says.
    """

    mesh: Mesh
    timeline: Timeline
    memory: Memory

    @property
    def fits(self) -> bool:
        """Whether a device has so much memory."""
        target = self.mesh.target
        return target is None or self.memory.peak <= target.machine.memory_bytes


@dataclass(frozen=True)
class StepPlan:
    """The meshes of a target for one step.

    Attributes:
      target: The machine.
      meshes: Those that the step was compiled for; those that fit first, fastest first.
      rejected: Meshes that the step has no legal layout on, by the code and headline of
        the error.
    """

    target: Target
    meshes: tuple[PlannedMesh, ...]
    rejected: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def best(self) -> Mesh:
        """The fastest mesh whose memory fits a device."""
        return self.meshes[0].mesh

    def as_text(self) -> str:
        """A table, and what was rejected."""
        return "\n".join(self._lines())

    __str__ = as_text

    def _lines(self) -> Iterator[str]:
        capacity = self.target.machine.memory_bytes
        yield f"meshes of {self.target.name}, by the predicted time of a step"
        rows = []
        for each in self.meshes:
            found, peak = each.timeline, each.memory.peak
            parts = (found.seconds, found.compute, found.exposed, found.idle)
            share = f"{100 * peak / capacity:.0f} %"
            if not each.fits:
                share += " (too much)"
            times = map(format_seconds, parts)
            rows.append([each.mesh.topology, *times, format_bytes(peak), share])
        yield aligned(_COLUMNS, rows, right=_COLUMNS[1:])
        for (code, what), count in self.rejected.most_common():
            yield f"not legal: {count} times [{code}] {what}"


def plan(
    step: Function,
    batch: Any,
    target: str | Target,
    *,
    axes: Sequence[str] | None = None,
    meshes: Iterable[Mesh] | None = None,
) -> StepPlan:
    """Find the mesh of a target on which a step is predicted to be fastest.

    The step is compiled for each candidate by the target's own compiler, which needs
    none of its devices; nothing runs.

    Args:
      step: From ``tessera.function``, without a mesh of its own.
      batch: The arguments of a call: a tuple of them, or the only one. Shapes, such as
        ``jax.ShapeDtypeStruct``, are enough; they are global.
      target: Such as ``h100:2x8``.
      axes: The axes to factor the devices over, outermost first. By default those that
        the ``in_specs`` of the step name, in their order.
      meshes: The candidates, instead of all factorings.

    Raises:
      PlanError: [T714] there are no axes to factor, too many factorings, or no mesh on
        which the step is legal and fits.
      TargetError: [T711] there is no such target.
      TargetCompilerError: [T712] its compiler is not installed.

    Example:
      >>> import jax, tessera as ts
      >>> from jax.sharding import PartitionSpec as P
      >>> @ts.function(in_specs={"x": P("dp"), "w": P(None, "tp")})
      ... def step(x, w):
      ...     return x @ w
      >>> x = jax.ShapeDtypeStruct((4096, 1024), "float32")
      >>> w = jax.ShapeDtypeStruct((1024, 1024), "float32")
      >>> len(ts.plan(step, (x, w), "cpu:4").meshes)
      3
    """
    found = Target.parse(target) if isinstance(target, str) else target
    arguments = batch if isinstance(batch, tuple) else (batch,)
    rejected: Counter[tuple[str, str]] = Counter()
    errors: list[TesseraError] = []
    planned = []
    candidates = meshes if meshes is not None else _meshes(step, found, axes)
    for mesh in candidates:
        try:
            with mesh:
                compiled = step.compile(*arguments)
            planned.append(PlannedMesh(mesh, compiled.timeline, compiled.memory))
        except TesseraError as error:
            if error.code in ("T711", "T712", "T713"):
                raise
            rejected[error.code, error.what] += 1
            errors.append(error)
    if not any(each.fits for each in planned):
        raise PlanError(
            f"there is no mesh of {found.name} for this step",
            got="\n".join(_reasons(planned, errors)),
            fix="use a larger target, a smaller batch, or other axes",
        )
    planned.sort(key=lambda each: (not each.fits, each.timeline.seconds))
    return StepPlan(found, tuple(planned), rejected)


def _reasons(
    planned: Sequence[PlannedMesh], errors: Sequence[TesseraError]
) -> Iterator[str]:
    for error in errors[:3]:
        yield f"[{error.code}] {error.what}"
    if planned:
        least = min(planned, key=lambda each: each.memory.peak)
        yield f"{least.mesh.topology} takes least: {format_bytes(least.memory.peak)}"


def _meshes(
    step: Function, target: Target, axes: Sequence[str] | None
) -> Iterator[Mesh]:
    names = tuple(axes) if axes is not None else _named(step)
    if not names:
        raise PlanError(
            "there are no axes to factor the devices over",
            got="in_specs of the step that name none",
            fix='name them: plan(step, batch, target, axes=("dp", "tp"))',
        )
    shapes = list(factorings(target.num_devices, len(names)))
    if len(shapes) > _MOST_MESHES:
        raise PlanError(
            "there are too many meshes to compile for",
            got=f"{len(shapes)} factorings of {target.num_devices} devices",
            fix=f"pass meshes=[...] of your choice, or fewer axes than {len(names)}",
        )
    for shape in shapes:
        yield Mesh(names, shape=shape, target=target)


def _named(step: Function) -> tuple[str, ...]:
    """The axes that the declared layouts of a step's arguments name."""
    names: dict[str, None] = {}
    rest: list[Any] = [*step.options.in_specs.values()][::-1]
    while rest:
        value = rest.pop()
        if isinstance(value, str):
            names[value] = None
        elif isinstance(value, (PartitionSpec, tuple, list, dict)):
            inside = value.values() if isinstance(value, dict) else value
            rest += reversed([*inside])
    return tuple(names)
