# SPDX-License-Identifier: Apache-2.0
"""Meshes: grids of devices with named axes.

A :class:`Mesh` holds axes and device ids, and no arrays. Creating one does not query
the machine, so a mesh of 72 devices can be declared, traced and analyzed on a laptop;
only running on it needs the devices.

    mesh = Mesh(axes=["tp", "dp"], devices=[[0, 1, 2, 3], [4, 5, 6, 7]])
    with mesh:
        ...  # operations that need a mesh find this one
"""

import logging
import math
from collections.abc import Sequence
from contextvars import ContextVar
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeAlias
from weakref import WeakKeyDictionary, WeakValueDictionary

import jax
import numpy as np
from jax import Array, Device
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import Mesh as JaxMesh

from tessera.errors import (
    MeshAttributeError,
    NoMeshError,
    UnknownAxisError,
    did_you_mean,
)
from tessera.foundations.device_grid import (
    checked_axes,
    checked_shape,
    fold,
    listed,
    read_devices,
)
from tessera.jax_compat import jaxprs, target_devices
from tessera.jax_compat.traces import manual_axes
from tessera.targets import device_layout
from tessera.targets.mesh_devices import default_ids, find_devices, no_place
from tessera.targets.target import Target

__all__ = ("Mesh", "auto", "current")

_logger = logging.getLogger("tessera.mesh")
# The Tessera mesh of each JAX mesh. It cannot be reconstructed if ids are positions,
# see find_devices.
_mesh_of_jax: WeakValueDictionary[JaxMesh, "Mesh"] = WeakValueDictionary()
# The target of each JAX mesh that has one, and the numbers of its devices there.
_placed_of_jax = WeakKeyDictionary[JaxMesh, tuple[Target, tuple[int, ...]]]()
# The meshes of ``with mesh:``, each with the one that JAX had when it was opened.
_opened: ContextVar[tuple[tuple["Mesh", JaxMesh | None], ...]] = ContextVar(
    "tessera_meshes", default=()
)


class Mesh:
    """A grid of devices whose axes have names.

    Args:
      axes: One name per axis, outermost first.
      devices: A nested sequence of device ids, whose nesting is the shape; a flat
        sequence or range, which is folded into ``shape``; or None for every device
        there is (the first ones, if ``shape`` has fewer). Devices of
        ``jax.devices()`` work as well as their ids.
      shape: Size of each axis; one may be -1. Left out, a flat sequence is factored
        as evenly as the names of the axes allow: ``tp``, ``pp``, ``ep``, ``cp`` and
        ``sp`` get powers of two, the others what is left over. See
        ``grid.even_sizes``.
      target: A machine to compile for that need not be here, such as ``h100:2x8``.
        Without ``devices`` the axes are laid onto its links, inner axes onto the
        fastest. Over several TPU slices, of a target or here, the first axes cross
        them; see ``dcn_shape``. Programs
        for a mesh whose ``fsdp``, ``tp``, ``ep``, ``cp`` or ``sp`` crosses them begin
        with a warning.

    Raises:
      MeshShapeError: [T101] axes, nesting and shape do not describe one grid, or one of
        more than 2**20 devices.
      DuplicateAxisError: [T102] an axis name is repeated or is not a name.
      DeviceIdError: [T104] a device id is repeated or is not an id.
      TargetError: [T711] there is no such target, or it has too few devices.

    Example:
      >>> mesh = Mesh(axes=["tp", "pp", "dp"], devices=range(72))
      >>> mesh.topology
      'tp × pp × dp mesh, 4 × 2 × 9'
      >>> mesh.shape["pp"]
      2
    """

    def __init__(
        self,
        axes: Sequence[str] | str,
        devices: Any = None,
        shape: Sequence[int] | None = None,
        target: Target | str | None = None,
    ) -> None:
        self.axes: tuple[str, ...] = checked_axes(axes)
        self.target = Target.parse(target) if isinstance(target, str) else target
        ids, nesting = read_devices(devices)
        if shape is not None:
            shape = checked_shape(shape, self.axes)
        if devices is None:
            ids = default_ids(shape, self.target)
        self._sizes = fold(self.axes, len(ids), nesting, shape)
        if self.target is not None:
            chosen = None if devices is None else ids
            ids = device_layout.device_grid(self.target, self._sizes, chosen)
        elif devices is None:
            ids = device_layout.grid_here(self._sizes, tuple(ids))
        self._ids = ids
        # Axes of a JAX mesh may be Explicit: then array types include their layout.
        self.axis_types: tuple[AxisType, ...] = (AxisType.Auto,) * len(self.axes)
        # A mesh of an abstract JAX mesh, which has no devices, has the first ones.
        self.of_abstract = False
        # The manual axes of an SPMD region, whose device ids are positions in it.
        self._is_region = False

    @classmethod
    def of(cls, mesh: "AnyMesh") -> "Mesh":
        """The Tessera mesh of a JAX mesh: same axes, axis types and devices.

        An abstract mesh gets the first device ids.

        Raises:
          NoMeshError: [T106] what is given is no mesh.
        """
        if isinstance(mesh, Mesh):
            return mesh
        if not isinstance(mesh, (JaxMesh, AbstractMesh)) or mesh.empty:
            raise NoMeshError(
                "what is given as a mesh is none",
                got=f"{mesh!r}, of type {type(mesh).__name__}",
                fix="pass a dist.Mesh, or a mesh of JAX",
            )
        if (
            isinstance(mesh, JaxMesh)
            and (existing := _mesh_of_jax.get(mesh)) is not None
        ):
            return existing
        ids, target = range(mesh.size), None
        if isinstance(mesh, JaxMesh):
            ids = [device.id for device in mesh.devices.flat]
            target, ids = _placed_of_jax.get(mesh, (None, ids))
        sizes = tuple(mesh.shape.values())
        result = cls(mesh.axis_names, devices=ids, shape=sizes, target=target)
        # Axes are Manual only inside the region that the array was created in.
        result.axis_types = tuple(
            kind if kind is AxisType.Explicit else AxisType.Auto
            for kind in mesh.axis_types
        )
        result.of_abstract = isinstance(mesh, AbstractMesh)
        return result

    @cached_property
    def device_ids(self) -> tuple[int, ...]:
        """The ids of its devices, in row-major order."""
        return tuple(self._ids)

    @property
    def shape(self) -> dict[str, int]:
        """Size of each axis, by name, outermost first."""
        return dict(zip(self.axes, self._sizes, strict=True))

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self._sizes)

    @cached_property
    def slices(self) -> tuple[int, ...]:
        """The TPU slice, or the target's rack, of each device in :attr:`device_ids`."""
        return device_layout.slices_of(self.device_ids, self.target)

    @property
    def dcn_shape(self) -> dict[str, int]:
        """Of each axis that crosses slices or racks, in how many parts it lies.

        What ``jax.experimental.mesh_utils`` calls ``dcn_mesh_shape``.

        Example:
          >>> Mesh(["dp", "fsdp"], shape=(4, 8), target="v5e:4x4*2").dcn_shape
          {'dp': 2}
        """
        return device_layout.dcn_shape(self.axes, self._sizes, self.slices)

    @property
    def topology(self) -> str:
        """Axes and sizes for messages, such as ``tp × dp mesh, 4 × 4``."""
        sizes = " × ".join(str(size) for size in self._sizes)
        return f"{' × '.join(self.axes)} mesh, {sizes}"

    @property
    def rank(self) -> int | Array:
        """The rank of this process, or of this device inside an SPMD region.

        In a region that is manual over some axes it is a traced i32 scalar: the
        position along those axes in row-major order.
        """
        manual = manual_axes()
        mine = tuple(axis for axis in self.axes if axis in manual)
        return jax.lax.axis_index(mine) if mine else jax.process_index()

    @property
    def is_abstract(self) -> bool:
        """Whether this machine lacks some of the devices. Starts JAX's backend."""
        if self._is_region or self.target is not None:
            return True
        return find_devices(self.device_ids) is None

    @property
    def idle_device_ids(self) -> tuple[int, ...]:
        """Ids of existing devices that are not in the mesh. Starts JAX's backend."""
        if self.target is not None:
            return tuple(sorted({*range(self.target.num_devices)} - {*self.device_ids}))
        devices = find_devices(self.device_ids)
        used = {device.id for device in devices or ()}
        return tuple(d.id for d in jax.devices() if d.id not in used)

    @property
    def explicit_axes(self) -> tuple[str, ...]:
        """The axes whose sharding is part of the types of arrays."""
        types = zip(self.axes, self.axis_types, strict=True)
        return tuple(axis for axis, kind in types if kind is AxisType.Explicit)

    @cached_property
    def jax(self) -> JaxMesh:
        """The JAX mesh; its axes are Auto, unless this was created from a JAX mesh.

        Raises:
          AbstractMeshError: [T105] this machine lacks some of the devices.
        """
        devices = None if self.is_abstract else find_devices(self.device_ids)
        if devices is None:
            raise no_place(
                self.topology, self.device_ids, self.target, is_region=self._is_region
            )
        if idle := self.idle_device_ids:
            _logger.info(
                "%s leaves %d of %d devices idle: %s",
                self.topology,
                len(idle),
                jax.device_count(),
                listed(idle),
            )
        mesh = self._grid_of(devices)
        if not self.of_abstract:
            _mesh_of_jax[mesh] = self
        return mesh

    @cached_property
    def abstract(self) -> AbstractMesh:
        """The abstract JAX mesh, without devices: enough for specs and tracing."""
        return AbstractMesh(self._sizes, self.axes, axis_types=self.axis_types)

    @cached_property
    def compile_mesh(self) -> JaxMesh:
        """A JAX mesh for lowering and compiling.

        It is :attr:`jax` if the devices exist; otherwise its devices are those of the
        target, or belong to a client that compiles for the CPU, and cannot run.

        Raises:
          TargetCompilerError: [T712] the compiler of the target is not installed.
        """
        if not self.is_abstract:
            return self.jax
        if self.target is not None:
            devices = self.target.devices
            mesh = self._grid_of([devices[i] for i in self.device_ids])
            _placed_of_jax[mesh] = self.target, self.device_ids
            return mesh
        return self._grid_of(target_devices.cpu_devices(self.size))

    def axis_tuple(self, axis: str | Sequence[str]) -> tuple[str, ...]:
        """One or several axis names as a tuple; checks that the mesh has them.

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
        """Number of devices along one axis, or the product along several.

        Raises:
          UnknownAxisError: [T103] the mesh has no such axis.

        Example:
          >>> Mesh(["tp", "dp"], devices=range(16)).axis_size(("tp", "dp"))
          16
        """
        shape = self.shape
        return math.prod(shape[name] for name in self.axis_tuple(axis))

    def coordinates(self, position: int) -> dict[str, int]:
        """The coordinates of a device, given its index in :attr:`device_ids`.

        Example:
          >>> Mesh(["tp", "dp"], devices=range(8), shape=(4, 2)).coordinates(5)
          {'tp': 2, 'dp': 1}
        """
        indices = np.unravel_index(position, self._sizes)
        return dict(zip(self.axes, map(int, indices), strict=True))

    def __enter__(self) -> Self:
        _opened.set((*_opened.get(), (self, jaxprs.ambient_mesh())))
        return self

    def __exit__(self, *_: object) -> None:
        _opened.set(_opened.get()[:-1])

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise MeshAttributeError(
                f"a dist.Mesh has no attribute {name!r}: it is no mesh of JAX",
                fix='give JAX its own: NamedSharding(mesh.jax, P("dp"))',
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.shape.items())
        notes = [f"devices {listed(self.device_ids)}"]
        if self.target is not None:
            notes.insert(0, f"target {self.target}")
        if explicit := self.explicit_axes:
            notes.insert(0, f"Explicit axes {', '.join(explicit)}")
        # A repr must not start a backend.
        if jaxprs.backend_started() and self.target is None:
            if self.is_abstract:
                notes.append(f"abstract: {jax.device_count()} devices here")
            elif idle := self.idle_device_ids:
                notes.append(f"idle {listed(idle)}")
        return f"Mesh({sizes}; {'; '.join(notes)})"

    @cached_property
    def _key(self) -> tuple[object, ...]:
        parts = self.axes, self._sizes, self.device_ids, self.axis_types
        return (*parts, self.target)

    def _grid_of(self, devices: Sequence[Device]) -> JaxMesh:
        device_layout.warn_of_slow_axes(self.dcn_shape)
        grid = np.array(devices, dtype=object).reshape(self._sizes)
        return JaxMesh(grid, self.axes, axis_types=self.axis_types)


# What is taken for a mesh wherever one is declared.
AnyMesh: TypeAlias = Mesh | JaxMesh | AbstractMesh


def as_mesh(mesh: AnyMesh | None) -> Mesh | None:
    """A declared mesh, which may be one of JAX; None where none is declared.

    Raises:
      NoMeshError: [T106] what is given is no mesh.
    """
    return None if mesh is None else Mesh.of(mesh)


mesh_of_jax = lru_cache(maxsize=64)(Mesh.of)


def auto() -> Mesh:
    """All devices, along one axis named ``dp``. Starts JAX's backend."""
    return Mesh(("dp",))


def current() -> Mesh:
    """The mesh of the innermost ``with mesh:``, or ``jax.set_mesh``.

    Inside an SPMD region it has the manual axes: ``size`` is the number of devices that
    run the region, and ``rank`` the index of this one.

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
    """Like :func:`current`, but None if no mesh is open."""
    mesh = opened_or_none()
    manual = manual_axes()
    if not manual:
        return mesh
    if mesh is not None and mesh.shape == dict(manual):
        return mesh
    sizes = tuple(manual.values())
    region = Mesh(tuple(manual), devices=range(math.prod(sizes)), shape=sizes)
    region._is_region = True
    return region


def opened_or_none(*, takes_jaxs: bool = True) -> Mesh | None:
    """The innermost mesh that is open, even inside an SPMD region.

    Args:
      takes_jaxs: Whether it may be one of JAX, opened by ``jax.set_mesh``; else it is
        None there.
    """
    ambient = jaxprs.ambient_mesh()
    mesh = opened_within(ambient)
    if mesh is None and ambient is not None and takes_jaxs:
        return mesh_of_jax(ambient)
    return mesh


def opened_within(ambient: JaxMesh | None) -> Mesh | None:
    """The mesh of the innermost ``with mesh:``, if no mesh of JAX was opened inside.

    Args:
      ambient: The mesh of ``jax.set_mesh``, if one is open.
    """
    opened = _opened.get()
    mesh, around = opened[-1] if opened else (None, None)
    return mesh if ambient is None or ambient is around else None
