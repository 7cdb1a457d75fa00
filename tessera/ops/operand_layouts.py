# SPDX-License-Identifier: Apache-2.0
"""The layout of an operand, and running a function on the blocks of operands.

Kernels and collectives, which act per device, split each operand by its own layout. A
traced value has the layout that the tracing scope recorded for it.
"""

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jax.sharding import Mesh as JaxMesh

from tessera.errors import AUTO_AXES, LayoutMismatchError, OperandError
from tessera.jax_compat import jaxprs
from tessera.jax_compat.traces import manual_axes
from tessera.jax_compat.workarounds import CorrectJit
from tessera.mesh import Mesh
from tessera.ops import device_collectives
from tessera.shard import DistTensor
from tessera.shard_spec import axes_of_dims
from tessera.tracing import scope

Layout: TypeAlias = tuple[Mesh, PartitionSpec]


def layout_of(value: Any) -> Layout | None:
    """Mesh and spec of a tensor, an array or a traced value; None if it has none.

    Arrays on one device and NumPy arrays have none: they are replicated.
    """
    if isinstance(value, DistTensor):
        return None if value.mesh is None else (value.mesh, value.spec)
    is_array = isinstance(value, (jax.Array, jax.Ref))
    if is_array and not isinstance(value, jaxprs.Tracer):
        sharding = value.sharding
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, JaxMesh):
            return Mesh.of(sharding.mesh), sharding.spec
        return None
    if (recorded := scope.layout_of(value)) is not None:
        return recorded
    inner = jaxprs.underlying(value)
    return None if inner is value else layout_of(inner)


def is_unplaced(value: Any) -> bool:
    """Whether a value is traced and its layout is unknown."""
    return is_traced(value) and layout_of(value) is None


def is_traced(*values: Any) -> bool:
    """Whether any of the values is traced."""
    return any(isinstance(jaxprs.underlying(x), jax.core.Tracer) for x in values)


def region_mesh(mesh: Mesh, *, explicit: bool = False) -> JaxMesh | AbstractMesh:
    """The mesh for a ``shard_map`` while tracing: abstract where devices do not exist.

    Args:
      mesh: The mesh.
      explicit: Whether the operands of the region already have its layouts, so that
        axes may be Explicit: over these JAX does not reshard by itself.

    Raises:
      LayoutMismatchError: [T205] an axis is Explicit.
    """
    if mesh.explicit_axes and not explicit:
        raise LayoutMismatchError(
            "an operation has to reshard its operands, and over Explicit axes JAX does "
            "not reshard by itself",
            got=f"{mesh!r}",
            fix=AUTO_AXES,
        )
    return mesh.abstract if mesh.is_abstract else mesh.jax


def in_types_of(mesh: Mesh | None) -> AbstractContextManager[Any]:
    """A context in which the types of arrays over a mesh's Explicit axes are JAX's.

    JAX compares the mesh in a type with the abstract mesh around, which may be one
    like it of no devices (``jax.sharding.use_abstract_mesh``).
    """
    around = jax.sharding.get_abstract_mesh()
    if mesh is None or not mesh.explicit_axes or around.empty:
        return nullcontext()
    own = mesh.compile_mesh.abstract_mesh
    axes, types = dict(around.shape), around.axis_types
    if around == own or (axes, types) != (mesh.shape, mesh.axis_types):
        return nullcontext()
    return jax.sharding.use_abstract_mesh(own)


def map_free_axes(
    function: Callable[..., Any], mesh: Any, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """``jax.shard_map`` over all axes but those of the region that it is called in.

    Where the region is over all axes, that is the function itself.

    Args:
      function: What each device runs.
      mesh: A JAX mesh; inside a region, the mesh of that region is used.
      in_specs: Layouts of the operands over the other axes.
      out_specs: Layouts of the results.
    """
    manual = set(manual_axes())
    region = jax.sharding.get_abstract_mesh() if manual else mesh
    if not (free := set(region.axis_names) - manual):
        return function
    return jax.shard_map(
        function,
        mesh=region,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=free,
        check_vma=False,
    )


def placed(value: jax.Array, sharding: NamedSharding) -> jax.Array:
    """A value with a sharding; unchanged if it has that sharding already.

    A value that every process has as its own may differ between them: each process
    provides the shards of its own devices.
    """
    if isinstance(value, jax.core.Tracer):
        return jax.device_put(value, sharding)
    if value.sharding == sharding:
        return value
    if value.is_fully_addressable and not sharding.is_fully_addressable:
        own = np.asarray(value)
        return jax.make_array_from_callback(own.shape, sharding, own.__getitem__)
    return jax.device_put(value, sharding)


def map_blocks(
    function: Callable[..., jax.Array],
    static: tuple[Any, ...],
    operands: tuple[Any, ...],
    mesh: Mesh,
    in_specs: tuple[PartitionSpec, ...],
    out_spec: PartitionSpec,
    *,
    check_vma: bool = True,
) -> jax.Array:
    """``function(*blocks, *static)`` on every device of a mesh.

    In a trace it becomes a part of the traced program, otherwise a program of its own,
    which calls with equal static arguments share.

    Args:
      function: What each device runs.
      static: Its further arguments; hashable.
      operands: Global arrays, or None.
      mesh: The mesh.
      in_specs: The layout of each operand.
      out_spec: The layout of the result.
      check_vma: As in ``jax.shard_map``.
    """
    options = in_specs, out_spec, check_vma
    if is_traced(*operands):
        region = region_mesh(mesh, explicit=True)
        result = _mapped(function, static, region, *options)(*operands)
        scope.record_layout(result, mesh, out_spec)
        return result
    arrays = (
        x if x is None else placed(x, NamedSharding(mesh.jax, spec))
        for x, spec in zip(operands, in_specs, strict=True)
    )
    return _compiled(function, static, mesh.jax, *options)(*arrays)


def _mapped(
    function: Callable[..., jax.Array],
    static: tuple[Any, ...],
    mesh: JaxMesh | AbstractMesh,
    in_specs: tuple[PartitionSpec, ...],
    out_spec: PartitionSpec,
    check_vma: bool,
) -> Callable[..., jax.Array]:
    def on_device(*blocks: Any) -> jax.Array:
        return function(*blocks, *static)

    return jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_spec,
        check_vma=check_vma,
    )


@functools.lru_cache(maxsize=512)
def _compiled(*key: Any) -> Callable[..., jax.Array]:
    return CorrectJit(_mapped(*key))


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
            "an operation takes arrays, not a dict",
            got=f"{type(value).__name__} of {names or 'nothing'}",
            fix="pass one of its arrays, such as "
            f"batch[{next(iter(value), 'input')!r}]",
        )
    return jnp.asarray(value)


def gathered(block: jax.Array, layout: PartitionSpec) -> jax.Array:
    """The whole array of which a device has a block, inside of a region."""
    for dim, axes in enumerate(axes_of_dims(layout, block.ndim)):
        if axes:
            block = device_collectives.all_gather(block, axes, dim)
    return block
