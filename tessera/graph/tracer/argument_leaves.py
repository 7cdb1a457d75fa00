# SPDX-License-Identifier: Apache-2.0
"""One array among the arguments of a call: its type, its layout, how it is stored."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import (
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

from tessera.errors import LayoutMismatchError
from tessera.graph.tracer.static_values import ATOMS, static_key
from tessera.jax_compat import jaxprs, traces
from tessera.mesh import Mesh, mesh_of_jax
from tessera.shard import ARRAYS, DistTensor
from tessera.shard_spec import axes_of_dims, spec_of_axes, spec_on

# The mesh axis of an array that is committed to one device.
ONE_DEVICE = "device"

TRACED = (*ARRAYS, jax.Ref, jax.ShapeDtypeStruct)


def mesh_of_one_device(sharding: SingleDeviceSharding) -> Mesh:
    """The mesh that an array of this layout lies on."""
    (device,) = sharding.device_set
    return Mesh((ONE_DEVICE,), devices=(device.id,))


class LeafKey(NamedTuple):
    """What a program is specialized to in one array."""

    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool
    reference: Any
    layout: tuple[Mesh, PartitionSpec] | None
    on_host: bool
    varying_axes: frozenset[str] | None


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array among the arguments.

    Attributes:
      name: Its path: the argument's name, then keys.
      value: The array.
      of_object: Whether an NNX object holds it, so that it is no batch.
      of_trace: Whether JAX is tracing it, so that its values are unknown.
      reference: The type of a mutable array; None for an array.
    """

    name: str
    value: Any
    of_object: bool = False
    of_trace: bool = False
    reference: Any = None

    @property
    def layout(self) -> tuple[Mesh, PartitionSpec] | None:
        """The mesh and spec that the array itself carries, if it carries any.

        An array that is committed to one device lives on a mesh of that device.
        """
        if isinstance(self.value, DistTensor):
            mesh = self.value.mesh
            return None if mesh is None else (mesh, self.value.spec)
        if isinstance(self.value, jaxprs.Tracer):
            return None
        sharding = getattr(self.value, "sharding", None)
        if isinstance(sharding, NamedSharding):
            spec, mesh = sharding.spec, mesh_here(mesh_of_jax(sharding.mesh))
            if spec.unreduced or spec.reduced:
                return mesh, spec
            return mesh, spec_of_axes(axes_of_dims(spec, len(self.value.shape)))
        is_committed = getattr(self.value, "committed", True)
        if isinstance(sharding, SingleDeviceSharding) and is_committed:
            return mesh_of_one_device(sharding), PartitionSpec()
        if sharding is not None and len(sharding.device_set) > 1:
            raise LayoutMismatchError(
                f"{self.name!r} lies on several devices, and its layout names no mesh",
                got=str(sharding),
                fix="move it first: jax.device_put(x, NamedSharding(mesh, spec))",
            )
        return None

    @property
    def spec(self) -> PartitionSpec:
        """The spec of its layout, replicated where it has none."""
        return self.layout[1] if self.layout else PartitionSpec()

    @property
    def aval(self) -> Any:
        """Global shape, dtype and whether the dtype is weak."""
        if self.reference is not None:
            return self.reference
        if isinstance(self.value, (DistTensor, jax.ShapeDtypeStruct)):
            return self.value
        return jax.typeof(self.value)

    @property
    def is_weak(self) -> bool:
        """Whether the dtype is weak, as that of a Python number is."""
        return _is_weak(self.aval)

    def key(self) -> LeafKey:
        """What a program is specialized to in this array."""
        return LeafKey(
            shape=tuple(self.aval.shape),
            dtype=self.aval.dtype,
            weak_type=self.is_weak,
            reference=self.reference,
            layout=self.layout,
            on_host=jaxprs.on_host(self.value),
            # No compiled program takes a value that JAX is tracing.
            varying_axes=traces.varying_axes(self.value) if self.of_trace else None,
        )

    def abstract(self) -> "Leaf":
        """The same leaf without its data, which a program must not keep alive."""
        if isinstance(self.value, jax.ShapeDtypeStruct):
            is_of_now = traces.canonical_dtype(self.aval.dtype) == self.aval.dtype
            return self if is_of_now else self._struct(self.value.sharding)
        if not isinstance(self.value, (jax.Array, np.ndarray, jax.Ref)):
            return self
        if self.of_trace and self.reference is None:
            return replace(self, value=jaxprs.struct(self.aval))
        return self._struct(
            getattr(self.value, "sharding", None) if self.layout else None
        )

    def laid_out(self, layout: NamedSharding | None) -> "Leaf":
        """The same leaf in a layout, unless it has one of its own."""
        if layout is None or self.layout is not None:
            return self
        return self._struct(layout)

    def is_on(self, mesh: Mesh) -> bool:
        """Whether its layout is one on a mesh: it has none, or one of its devices."""
        return self.layout is None or self._spec_on(mesh) is not None

    def on_mesh(self, mesh: Mesh | None) -> "Leaf":
        """The same leaf in the same layout by the axes of a mesh that it ``is_on``."""
        if mesh is None or self.layout is None or self.layout[0] == mesh:
            return self
        if (spec := self._spec_on(mesh)) is None:
            return self
        kind = self.value.sharding.memory_kind
        sharding = NamedSharding(mesh.compile_mesh, spec, memory_kind=kind)
        if isinstance(self.value, jax.Array):
            return replace(self, value=jax.device_put(self.value, sharding))
        return self._struct(sharding)

    def _spec_on(self, mesh: Mesh) -> PartitionSpec | None:
        assert self.layout is not None, "only a layout has a spec"
        own, spec = self.layout
        if isinstance(self.value, DistTensor):  # it stays on its mesh
            return spec if own == mesh else None
        return spec_on(spec, own, mesh)

    def _struct(self, sharding: Any) -> "Leaf":
        struct = jax.ShapeDtypeStruct(
            tuple(self.aval.shape),
            traces.canonical_dtype(self.aval.dtype),
            sharding=sharding,
            weak_type=self.is_weak,
        )
        return replace(self, value=struct)


def leaf_signature(value: Any) -> Hashable:
    """What a program depends on in one leaf of a call, quickly.

    Leaves of one signature have equal keys, ``Leaf.key()`` or that of their static
    value. The converse does not hold: NumPy's arrays differ from JAX's here.
    """
    kind = type(value)
    if kind in ATOMS:
        return static_key(value)
    if kind is DistTensor:
        return kind, value.shape, value.dtype, value.mesh, value.spec
    try:
        return value.aval, value.sharding, value.committed
    except AttributeError:
        pass
    if isinstance(value, TRACED):
        sharding = getattr(value, "sharding", None)
        return kind, tuple(value.shape), value.dtype, _is_weak(value), sharding
    return static_key(value)


def is_array(value: object) -> bool:
    """Whether a leaf is an array or stands for one."""
    return isinstance(value, ARRAYS)


def is_stored(value: Any) -> bool:
    """Whether a program takes an array as it is.

    It takes the stored array of a tensor, and one of 64 bits that was made while x64
    was enabled as JAX itself does: in the dtype that it has now.
    """
    if isinstance(value, DistTensor):
        return False
    return not isinstance(value, jax.Array) or (
        value.dtype == traces.canonical_dtype(value.dtype)
    )


def stored_arrays(values: Sequence[Any]) -> list[Any]:
    """Arrays as programs take them."""
    return [v if is_stored(v) else _stored(v) for v in values]


def _stored(value: Any) -> Any:
    if isinstance(value, DistTensor):
        return value.materialize()
    return value.astype(traces.canonical_dtype(value.dtype))


def _is_weak(value: Any) -> bool:
    return getattr(value, "weak_type", False)


def mesh_here(mesh: Mesh) -> Mesh:
    """The mesh of ``jax.set_mesh``, for an abstract one with the same axes."""
    if not mesh.of_abstract or (ambient := jaxprs.ambient_mesh()) is None:
        return mesh
    found = mesh_of_jax(ambient)
    is_alike = (found.axes, found.shape, found.axis_types) == (
        mesh.axes,
        mesh.shape,
        mesh.axis_types,
    )
    return found if is_alike else mesh
