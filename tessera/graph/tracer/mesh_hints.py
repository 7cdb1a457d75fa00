# SPDX-License-Identifier: Apache-2.0
"""Adds to JAX's errors about meshes and layouts what to write in a Tessera function."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final

from tessera.errors import (
    AUTO_AXES,
    LayoutMismatchError,
    MeshAttributeError,
    NoMeshError,
    TesseraError,
)
from tessera.mesh import Mesh

_SET_MESH: Final = NoMeshError(
    "JAX has no mesh open here, which this call of it needs",
    fix="call the function in 'with jax.set_mesh(mesh):', or name the mesh: "
    "NamedSharding(mesh, spec), jax.shard_map(..., mesh=mesh)\n"
    "of a dist.Mesh that is mesh.jax",
)
# By what JAX says.
_HINTS: Final[Mapping[str, TesseraError]] = MappingProxyType(
    {
        "not under a mesh context": _SET_MESH,
        "The context mesh cannot be empty": _SET_MESH,
        "requires a non-empty mesh in context": _SET_MESH,
        "shard_map requires a `jax.sharding.Mesh`": MeshAttributeError(
            "a dist.Mesh is no mesh of JAX",
            fix="write jax.shard_map(..., mesh=mesh.jax)",
        ),
        "passed to reshard cannot contain axis names that are of type Auto": (
            LayoutMismatchError(
                "jax.sharding.reshard is for Explicit axes, and these are Auto",
                fix="write jax.lax.with_sharding_constraint(x, spec)",
            )
        ),
    }
)
_EXPLICIT: Final = LayoutMismatchError(
    "over Explicit axes, the default of jax.make_mesh, layouts are part of types",
    fix=f"reshard an operand, or say out_sharding=, as under jax.jit\n{AUTO_AXES}",
)


@contextmanager
def hints(mesh: Mesh | None) -> Iterator[None]:
    """In this context errors of JAX about meshes and layouts have a note, with a code.

    Args:
      mesh: The mesh of the function that is traced.
    """
    try:
        yield
    except Exception as error:
        text = str(error)
        hint = next((hint for part, hint in _HINTS.items() if part in text), None)
        if type(error).__name__ == "ShardingTypeError" and mesh is not None:
            hint = _EXPLICIT
        if hint is not None and not isinstance(error, TesseraError):
            error.add_note(str(hint))
        raise
