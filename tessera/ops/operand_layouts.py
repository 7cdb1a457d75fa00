# SPDX-License-Identifier: Apache-2.0
"""Where an operand lives: the mesh and the spec that it brings along.

What acts per device - kernels and collectives - takes each operand as its own layout
splits it. A traced value has the layout that the tracing scope recorded for it.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jax.sharding import Mesh as JaxMesh

from tessera import _jax, scope
from tessera.errors import LayoutMismatchError, OperandError
from tessera.mesh import AUTO_AXES, Mesh
from tessera.shard import DistTensor
from tessera.spec import check_even

Layout: TypeAlias = tuple[Mesh, PartitionSpec]


def layout_of(value: Any) -> Layout | None:
    """Mesh and spec of a tensor, an array or a traced value; None where it has none.

    Arrays on one device and NumPy arrays have none: every device gets them whole.
    """
    if isinstance(value, DistTensor):
        return None if value.mesh is None else (value.mesh, value.spec)
    if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
        sharding = value.sharding
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, JaxMesh):
            return Mesh.of(sharding.mesh), sharding.spec
        return None
    if (recorded := scope.layout_of(value)) is not None:
        return recorded
    inner = _jax.underlying(value)
    return None if inner is value else layout_of(inner)


def block_layout_of(value: Any, what: str) -> Layout | None:
    """The layout of a value whose blocks are computed with.

    Args:
      value: A tensor, an array or a traced value.
      what: What takes blocks, such as ``a kernel``.

    Raises:
      ShardDivisibilityError: [T201] the layout pads it, so that blocks differ in size.
    """
    if (layout := layout_of(value)) is not None:
        mesh, spec = layout
        why = f"{what} takes blocks of one size, and an array is stored padded"
        check_even(why, value.shape, spec, mesh)
    return layout


def is_unplaced(value: Any) -> bool:
    """Whether a value is traced, so that it may be split in a way nobody can see."""
    inner = _jax.underlying(value)
    return isinstance(inner, jax.core.Tracer) and layout_of(value) is None


def region_mesh(mesh: Mesh, *, explicit: bool = False) -> JaxMesh | AbstractMesh:
    """What to map over while tracing: a mesh of the devices, where they exist.

    Args:
      mesh: The mesh.
      explicit: Whether what enters the region lies as the region takes it, so that the
        axes may be Explicit: JAX moves nothing over these by itself.

    Raises:
      LayoutMismatchError: [T205] an axis is Explicit.
    """
    if mesh.explicit_axes and not explicit:
        raise LayoutMismatchError(
            "an operation needs its arrays in a layout of its own, and over Explicit "
            "axes JAX moves none by itself",
            got=f"{mesh!r}",
            fix=AUTO_AXES,
        )
    return mesh.abstract if mesh.is_abstract else mesh.jax


def placed(value: jax.Array, sharding: NamedSharding) -> jax.Array:
    """A value laid out by a sharding; as it is, where it lies so already.

    What every process has on its own may differ: each gives its own devices theirs.
    """
    if isinstance(value, jax.core.Tracer):
        return jax.device_put(value, sharding)
    if value.sharding == sharding:
        return value
    if value.is_fully_addressable and not sharding.is_fully_addressable:
        own = np.asarray(value)
        return jax.make_array_from_callback(own.shape, sharding, own.__getitem__)
    return jax.device_put(value, sharding)


def as_array(value: Any) -> jax.Array:
    """``jnp.asarray``, without its cost where there is nothing to convert.

    Raises:
      OperandError: [T401] the value is a dict, such as a whole batch.
    """
    if isinstance(value, jax.Array):
        return value
    if isinstance(value, Mapping):
        names = ", ".join(map(repr, value))
        raise OperandError(
            "an operation takes arrays, and is given a dict",
            got=f"{type(value).__name__} of {names or 'nothing'}",
            fix=f"pass what it holds, such as batch[{next(iter(value), 'input')!r}]",
        )
    return jnp.asarray(value)
