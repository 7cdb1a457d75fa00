# SPDX-License-Identifier: Apache-2.0
"""Meshes: devices in a grid whose axes have names.

A :class:`Mesh` knows axes and device ids, and no arrays. It is made without asking
the machine what it has, so a mesh of 72 devices can be declared, traced and analyzed
on a laptop; only running on it needs the devices.

    mesh = Mesh(axes=["tp", "dp"], devices=[[0, 1, 2, 3], [4, 5, 6, 7]])
    with mesh:
        ...  # operations that need a mesh find this one
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import cached_property
from types import TracebackType
from typing import Any, NoReturn, Self

import jax
import numpy as np
from jax import Array, Device
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import Mesh as JaxMesh

from tessera import _jax
from tessera.errors import (
    AbstractMeshError,
    DeviceIdError,
    DuplicateAxisError,
    MeshShapeError,
    NoMeshError,
    UnknownAxisError,
    did_you_mean,
)

_logger = logging.getLogger("tessera.mesh")
_opened: ContextVar[tuple["Mesh", ...]] = ContextVar("tessera_meshes", default=())


class Mesh:
    """A grid of devices whose axes have names.

    Args:
      axes: One name per axis, outermost first.
      devices: A nested sequence of device ids, whose nesting is the shape; a flat
        sequence or range, which is folded into ``shape``; or None for every device
        there is (the first ones, when ``shape`` holds fewer). Devices of
        ``jax.devices()`` may stand for their ids.
      shape: Size of each axis; one may be -1. Left out, a flat sequence is factored
        as evenly as possible, larger factors first.

    Raises:
      MeshShapeError: [T101] axes, nesting and shape do not describe one grid.
      DuplicateAxisError: [T102] an axis name is repeated or is not a name.
      DeviceIdError: [T104] a device id is repeated or is not an id.

    Example:
      >>> mesh = Mesh(axes=["tp", "pp", "dp"], devices=range(72))
      >>> mesh.topology
      'tp × pp × dp mesh, 6 × 4 × 3'
      >>> mesh.shape["pp"]
      4
    """

    def __init__(
        self,
        axes: Sequence[str] | str,
        devices: Any = None,
        shape: Sequence[int] | None = None,
    ) -> None:
        self.axes: tuple[str, ...] = _checked_axes(axes)
        ids, nesting = _read_devices(devices)
        if shape is not None:
            shape = _checked_shape(shape, self.axes)
        if devices is None:
            ids = _default_ids(shape)
        self._sizes = _fold(self.axes, len(ids), nesting, shape)
        self.device_ids: tuple[int, ...] = ids

    @classmethod
    def from_shape(
        cls, mesh_shape: Sequence[Any], num_devices: int | None = None
    ) -> "Mesh":
        """A mesh from the form that configurations use: sizes, then names.

        Args:
          mesh_shape: ``[[4, 2], ["fsdp", "tp"]]``; one size may be -1.
          num_devices: What a -1 is inferred from; None asks JAX.

        Raises:
          MeshShapeError: [T101] not a pair of sizes and names, or sizes that do not
            divide the devices.

        Example:
          >>> Mesh.from_shape([[-1, 2], ["fsdp", "tp"]], num_devices=8).shape
          {'fsdp': 4, 'tp': 2}
        """
        if len(mesh_shape) != 2 or any(
            isinstance(part, (str, int)) for part in mesh_shape
        ):
            raise MeshShapeError(
                "a mesh shape is a pair of sizes and axis names",
                got=f"{mesh_shape!r}",
                fix='write [[4, 2], ["fsdp", "tp"]]',
            )
        axes = _checked_axes(mesh_shape[1])
        sizes = _checked_shape(mesh_shape[0], axes)
        if -1 in sizes:
            total = jax.device_count() if num_devices is None else num_devices
            sizes = _inferred(axes, sizes, total)
        return cls(axes, devices=range(math.prod(sizes)), shape=sizes)

    @property
    def shape(self) -> dict[str, int]:
        """Size of each axis, by name, outermost first."""
        return dict(zip(self.axes, self._sizes, strict=True))

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self._sizes)

    @property
    def topology(self) -> str:
        """The grid in words, such as ``tp × dp mesh, 4 × 4``."""
        sizes = " × ".join(str(size) for size in self._sizes)
        return f"{' × '.join(self.axes)} mesh, {sizes}"

    @property
    def rank(self) -> int | Array:
        """This process's number, or inside a manual region this device's.

        In a region that is manual over some of the axes it is a traced i32 scalar:
        the position along those axes, counted row by row.
        """
        manual = _manual_axes()
        mine = tuple(axis for axis in self.axes if axis in manual)
        return jax.lax.axis_index(mine) if mine else jax.process_index()

    @property
    def is_abstract(self) -> bool:
        """Whether this machine lacks some of the devices. Starts JAX's backend."""
        return _find_devices(self.device_ids) is None

    @property
    def idle_device_ids(self) -> tuple[int, ...]:
        """Devices that exist and are not in the mesh. Starts JAX's backend."""
        found = _find_devices(self.device_ids)
        used = {device.id for device in found or ()}
        return tuple(d.id for d in jax.devices() if d.id not in used)

    @cached_property
    def jax(self) -> JaxMesh:
        """The same mesh for JAX, with Auto axes.

        Raises:
          AbstractMeshError: [T105] this machine lacks some of the devices.
        """
        devices = _find_devices(self.device_ids)
        if devices is None:
            self._refuse_to_run()
        if idle := self.idle_device_ids:
            _logger.info(
                "%s leaves %d of %d devices idle: %s",
                self.topology,
                len(idle),
                jax.device_count(),
                _listed(idle),
            )
        return self._grid_of(devices)

    @cached_property
    def abstract(self) -> AbstractMesh:
        """Axes and sizes for JAX, without devices: enough for specs and traces."""
        return AbstractMesh(self._sizes, self.axes, axis_types=self._auto)

    @cached_property
    def compile_mesh(self) -> JaxMesh:
        """A mesh to lower and compile on, for as many devices as this one has.

        It is :attr:`jax` where the devices exist; otherwise its devices belong to a
        client that compiles for the CPU and cannot run.
        """
        if not self.is_abstract:
            return self.jax
        return self._grid_of(_jax.compile_only_cpu_devices(self.size))

    def axis_tuple(self, axis: str | Sequence[str]) -> tuple[str, ...]:
        """One axis name or several, as a tuple of axes that this mesh has.

        Raises:
          UnknownAxisError: [T103] the mesh has no such axis.
        """
        names = (axis,) if isinstance(axis, str) else tuple(axis)
        unknown = [name for name in names if name not in self.axes]
        if unknown:
            raise UnknownAxisError(
                f"the mesh has no axis {', '.join(repr(name) for name in unknown)}",
                got=self.topology,
                fix="\n".join(did_you_mean(str(n), self.axes) for n in unknown),
            )
        return names

    def axis_size(self, axis: str | Sequence[str]) -> int:
        """Number of devices along one axis, or along several together.

        Raises:
          UnknownAxisError: [T103] the mesh has no such axis.

        Example:
          >>> Mesh(["tp", "dp"], devices=range(16)).axis_size(("tp", "dp"))
          16
        """
        shape = self.shape
        return math.prod(shape[name] for name in self.axis_tuple(axis))

    def __enter__(self) -> Self:
        _opened.set((*_opened.get(), self))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _opened.set(_opened.get()[:-1])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.shape.items())
        notes = [f"devices {_listed(self.device_ids)}"]
        # A repr must not be what starts a backend.
        if _jax.backend_started():
            if self.is_abstract:
                notes.append(f"abstract: {jax.device_count()} devices here")
            elif idle := self.idle_device_ids:
                notes.append(f"idle {_listed(idle)}")
        return f"Mesh({sizes}; {'; '.join(notes)})"

    @property
    def _key(self) -> tuple[object, ...]:
        return (self.axes, self._sizes, self.device_ids)

    @property
    def _auto(self) -> tuple[AxisType, ...]:
        return (AxisType.Auto,) * len(self.axes)

    def _grid_of(self, devices: Sequence[Device]) -> JaxMesh:
        grid = np.array(devices, dtype=object).reshape(self._sizes)
        return JaxMesh(grid, self.axes, axis_types=self._auto)

    def _refuse_to_run(self) -> NoReturn:
        here = tuple(device.id for device in jax.devices())
        needed = max(self.size, max(self.device_ids) + 1)
        raise AbstractMeshError(
            "this mesh is abstract: it has devices that this machine lacks",
            got=f"{self.topology}, devices {_listed(self.device_ids)}; "
            f"this machine has {len(here)}: {_listed(here)}",
            fix=f"run it where there are {needed} devices, or simulate them: "
            f'jax.config.update("jax_num_cpu_devices", {needed}) before JAX is used\n'
            "specs, traces and compile-only analysis work on it as it is",
        )


class _ManualMesh(Mesh):
    """What one device sees inside a manual region: the manual axes alone.

    Its device ids are positions within the region.
    """

    @property
    def jax(self) -> NoReturn:  # pyrefly: ignore[bad-override]
        raise AbstractMeshError(
            "inside a manual region there is no mesh to place arrays on",
            got=f"the region is manual over {self.topology}",
            fix="place arrays outside the region and pass them in as arguments",
        )


def auto() -> Mesh:
    """Every device there is, along one axis named ``dp``. Starts JAX's backend."""
    return Mesh(("dp",))


def current() -> Mesh:
    """The mesh of the innermost ``with mesh:``.

    Inside a manual region it speaks of the manual axes: ``size`` is how many devices
    run the region side by side and ``rank`` which of them this one is.

    Raises:
      NoMeshError: [T106] no mesh is open.

    Example:
      >>> with Mesh(["dp"], devices=range(4)):
      ...     current().size
      4
    """
    mesh = current_or_none()
    if mesh is None:
        raise NoMeshError(
            "there is no mesh here",
            fix="open one with 'with mesh:', or 'with ts.mesh.auto():' for all devices",
        )
    return mesh


def current_or_none() -> Mesh | None:
    """Like :func:`current`, with None where no mesh is open."""
    mesh = opened_or_none()
    manual = _manual_axes()
    if not manual:
        return mesh
    if mesh is not None and mesh.shape == dict(manual):
        return mesh
    sizes = tuple(manual.values())
    return _ManualMesh(tuple(manual), devices=range(math.prod(sizes)), shape=sizes)


def opened_or_none() -> Mesh | None:
    """The mesh of the innermost ``with mesh:``, whatever region this is."""
    meshes = _opened.get()
    return meshes[-1] if meshes else None


def even_factors(number: int, count: int) -> tuple[int, ...]:
    """``number`` as ``count`` factors: the largest is the least possible, and so on.

    Example:
      >>> even_factors(16, 2), even_factors(72, 3), even_factors(7, 2)
      ((4, 4), (6, 4, 3), (7, 1))
    """
    if count == 1:
        return (number,)
    for first in range(1, number):
        if number % first == 0:
            rest = even_factors(number // first, count - 1)
            if rest[0] <= first:
                return (first, *rest)
    return (number, *(1,) * (count - 1))


def _manual_axes() -> Mapping[str, int]:
    """Axes that the code being traced is manual over, with sizes, outermost first."""
    region = jax.sharding.get_abstract_mesh()
    manual = set(region.manual_axes)
    return {axis: region.shape[axis] for axis in region.axis_names if axis in manual}


def _find_devices(ids: tuple[int, ...]) -> list[Device] | None:
    """The devices with these ids, or None where some are missing.

    Ids count from zero in every process, but CPU clients of several processes number
    theirs with gaps: there, ids below the device count are positions.
    """
    devices = sorted(jax.devices(), key=lambda device: device.id)
    by_id = {device.id: device for device in devices}
    if all(i in by_id for i in ids):
        return [by_id[i] for i in ids]
    if all(i < len(devices) for i in ids):
        return [devices[i] for i in ids]
    return None


def _default_ids(shape: tuple[int, ...] | None) -> tuple[int, ...]:
    """All devices, or as many as the shape holds: made-up ids where too few exist."""
    here = tuple(device.id for device in jax.devices())
    if shape is None or -1 in shape:
        return here
    wanted = math.prod(shape)
    return here[:wanted] if wanted <= len(here) else tuple(range(wanted))


def _checked_axes(axes: Sequence[str] | str) -> tuple[str, ...]:
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    if not names:
        raise MeshShapeError("a mesh has at least one axis", fix='write axes=["dp"]')
    if bad := [name for name in names if not isinstance(name, str) or not name]:
        raise DuplicateAxisError(
            "a mesh axis has no proper name",
            got=f"axes {names!r}: {bad[0]!r} is not a non-empty string",
            fix='name every axis, such as axes=["tp", "dp"]',
        )
    if repeated := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise DuplicateAxisError(
            "a mesh names one axis twice",
            got=f"axes {names!r}: {', '.join(map(repr, repeated))} is repeated",
            fix="give every axis a name of its own",
        )
    return names


def _checked_shape(shape: Sequence[int], axes: tuple[str, ...]) -> tuple[int, ...]:
    sizes = tuple(shape)
    whole = all(
        isinstance(s, (int, np.integer)) and not isinstance(s, bool) for s in sizes
    )
    if not whole or any(s < 1 and s != -1 for s in sizes) or sizes.count(-1) > 1:
        raise MeshShapeError(
            "axis sizes are positive whole numbers, and at most one is -1",
            got=f"shape {sizes!r}",
            fix="write sizes such as (4, 2), or (4, -1) to infer one",
        )
    if len(sizes) != len(axes):
        raise MeshShapeError(
            "a mesh has one size per axis",
            got=f"{len(axes)} axes {axes!r}, {len(sizes)} sizes {sizes!r}",
            fix=f"give {len(axes)} sizes, or {len(sizes)} axes",
        )
    return tuple(int(s) for s in sizes)


def _read_devices(devices: Any) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Flat ids of a nested sequence, and its nesting where it has any."""
    if devices is None:
        return (), None
    if not _is_sequence(devices):
        raise DeviceIdError(
            "devices is not a sequence of device ids",
            got=f"{devices!r}",
            fix="write devices=range(8), or a nested list such as [[0, 1], [2, 3]]",
        )
    shape = _nesting(devices)
    ids = tuple(_device_id(leaf) for leaf in _leaves(devices))
    if not ids:
        raise DeviceIdError(
            "a mesh has at least one device",
            got=f"devices={devices!r}",
            fix="list device ids, or leave devices out to take all there are",
        )
    if repeated := [i for i in dict.fromkeys(ids) if ids.count(i) > 1]:
        raise DeviceIdError(
            "a mesh holds one device twice",
            got=f"device ids {_listed(ids)}: {_listed(tuple(repeated))} repeated",
            fix="list every device once",
        )
    return ids, shape if len(shape) > 1 else None


def _is_sequence(item: object) -> bool:
    return isinstance(item, (Sequence, np.ndarray)) and not isinstance(item, str)


def _nesting(devices: Any) -> tuple[int, ...]:
    if not _is_sequence(devices) or not len(devices):
        return (0,) if _is_sequence(devices) else ()
    inner = {_nesting(item) for item in devices}
    if len(inner) > 1:
        raise MeshShapeError(
            "the nested device list is not a full grid",
            got=f"{devices!r}: rows of shapes "
            + " and ".join(str(shape) for shape in sorted(inner)),
            fix="give every row the same number of devices",
        )
    return (len(devices), *inner.pop())


def _leaves(devices: Any) -> Iterator[object]:
    for item in devices:
        yield from _leaves(item) if _is_sequence(item) else (item,)


def _device_id(leaf: object) -> int:
    if isinstance(leaf, Device):
        return leaf.id
    if isinstance(leaf, (int, np.integer)) and not isinstance(leaf, bool) and leaf >= 0:
        return int(leaf)
    raise DeviceIdError(
        "a device id is not a whole number from 0 up",
        got=f"{leaf!r}",
        fix="use the ids that jax.devices() shows, such as devices=range(8)",
    )


def _fold(
    axes: tuple[str, ...],
    total: int,
    nesting: tuple[int, ...] | None,
    shape: tuple[int, ...] | None,
) -> tuple[int, ...]:
    """Size of each axis for this many devices."""
    if shape is not None:
        sizes = _inferred(axes, shape, total)
        if nesting is not None and nesting != sizes:
            raise MeshShapeError(
                "the nesting of devices and the shape disagree",
                got=f"devices nested {_times(nesting)}, shape {_times(sizes)}",
                fix="leave shape out, or give devices as a flat sequence",
            )
        return sizes
    if nesting is None:
        return even_factors(total, len(axes))
    if len(nesting) != len(axes):
        raise MeshShapeError(
            "the nesting of devices has one level per axis",
            got=f"{len(axes)} axes {axes!r}, devices nested {_times(nesting)}",
            fix=f"name {len(nesting)} axes, or give devices as a flat sequence",
        )
    return nesting


def _inferred(
    axes: tuple[str, ...], sizes: tuple[int, ...], total: int
) -> tuple[int, ...]:
    """Sizes with the -1 filled in; their product is the number of devices."""
    known = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and total % known == 0:
        return tuple(total // known if size == -1 else size for size in sizes)
    if -1 not in sizes and known == total:
        return sizes
    named = " × ".join(f"{a} {s}" for a, s in zip(axes, sizes, strict=True))
    low, high = total // known * known, -(-total // known) * known
    if -1 in sizes:
        got = f"{named}: {known} does not divide {total} devices"
        near = f"{low} or {high}" if low else f"{high}"
        fix = f"use {near} devices, or sizes whose product divides {total}"
    else:
        got = f"{named} = {known}, and {total} devices"
        even = " × ".join(str(size) for size in even_factors(total, len(axes)))
        fix = f"list {known} devices, or use a shape such as {even}"
    raise MeshShapeError("the shape does not hold the devices", got=got, fix=fix)


def _times(sizes: tuple[int, ...]) -> str:
    return " × ".join(str(size) for size in sizes)


def _listed(ids: tuple[int, ...]) -> str:
    """Ids in few words: ``0..7`` where they run on."""
    if len(ids) > 2 and ids == tuple(range(ids[0], ids[0] + len(ids))):
        return f"{ids[0]}..{ids[-1]}"
    shown = [str(i) for i in ids]
    if len(shown) > 12:
        shown = [*shown[:6], "…", *shown[-5:]]
    return ", ".join(shown)
