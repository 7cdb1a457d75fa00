# SPDX-License-Identifier: Apache-2.0
"""Infers the mesh of a call from its arrays and from what the function declares."""

from collections.abc import Sequence
from typing import TypeAlias

from tessera.errors import AUTO_AXES, MeshConflictError
from tessera.graph import rewriting
from tessera.graph.ir import Graph, Role
from tessera.graph.tracer.argument_leaves import ONE_DEVICE, Leaf, mesh_here
from tessera.graph.tracer.declared_layouts import Options
from tessera.jax_compat import jaxprs, primitives, traces
from tessera.jax_compat.traces import manual_axes
from tessera.mesh import Mesh, mesh_of_jax, opened_or_none

# The name of its owner for messages, and the mesh.
Owned: TypeAlias = tuple[str, Mesh | None]


def common_mesh(leaves: Sequence[Leaf], declared: Sequence[Owned]) -> Mesh | None:
    """The mesh that a call runs on: a declared one, else the one its arrays live on.

    Arrays may live on several meshes of the same devices, if one of them, or the
    declared one, has axes for all of their layouts.

    Args:
      leaves: The arrays.
      declared: Meshes that functions declare, with what messages call them.

    Raises:
      MeshConflictError: [T308] there is more than one.
    """
    found: dict[Mesh, list[str]] = {}
    of_leaves = ((leaf.name, leaf.layout and leaf.layout[0]) for leaf in leaves)
    for name, mesh in (*declared, *of_leaves):
        if mesh is not None:
            found.setdefault(mesh, []).append(name)
    places = {mesh.device_ids for mesh in found if mesh.axes != (ONE_DEVICE,)}
    found = {
        mesh: names
        for mesh, names in found.items()
        if mesh.axes != (ONE_DEVICE,) or mesh.device_ids not in places
    }
    if len(found) > 1:
        owned = {mesh for _, mesh in declared if mesh is not None}
        for mesh in found if not owned else owned if len(owned) == 1 else ():
            if all(leaf.is_on(mesh) for leaf in leaves):
                return mesh
        raise MeshConflictError(
            "the inputs of one step live on different meshes",
            got="\n".join(
                f"{mesh.topology} of devices {mesh.device_ids}"
                + (", Explicit axes" if mesh.explicit_axes else "")
                + f": {', '.join(names)}"
                for mesh, names in found.items()
            ),
            fix="put them on one: jax.device_put(x, NamedSharding(mesh.jax, P(...)))"
            + (f"\n{AUTO_AXES}" if any(m.explicit_axes for m in found) else ""),
        )
    return next(iter(found), None)


def captured_leaves(graph: Graph) -> list[Leaf]:
    """The arrays that the function closes over."""
    names = [value.name for value in graph.inputs if value.role is Role.CAPTURED]
    return list(map(Leaf, names, graph.captured))


def meshes_used(graph: Graph, inner: Sequence[Owned]) -> list[Owned]:
    """Meshes used in a trace, with names for messages.

    Args:
      graph: The function, as it was traced: its SPMD regions.
      inner: Meshes of the functions that it calls.
    """
    used = list(inner)
    if graph.mesh or used or any(leaf.layout for leaf in captured_leaves(graph)):
        return used
    regions = {
        mesh
        for program in rewriting.programs_from(graph.program, jaxprs.inner_programs)
        for equation in jaxprs.equations(program)
        for mesh in primitives.meshes(equation)
    }
    # Several grids of the same devices are the user's business; none is the step's.
    if len(regions) == 1:
        used.append(("a shard_map", Mesh.of(regions.pop())))
    return used


def mesh_of(options: Options) -> Mesh | None:
    """The mesh that is declared, or the one that is open around a call.

    One of JAX is for those that lay arrays out: others run as under ``jax.jit``. The
    mesh that is open around an SPMD region is none for the blocks inside it.
    """
    if options.mesh is not None:
        return _beside_jaxs(mesh_here(options.mesh))
    if manual_axes():
        return None
    mesh = opened_or_none(takes_jaxs=options.needs_mesh)
    return None if mesh is None else _beside_jaxs(mesh)


def _beside_jaxs(mesh: Mesh) -> Mesh:
    """The mesh, where ``jax.jit`` can use it beside that of ``jax.set_mesh``.

    Raises:
      MeshConflictError: [T308] that one has other devices, or Explicit axes, so that
        types would be of it.
    """
    around = traces.mesh_of_jit()
    if around is None or (other := mesh_of_jax(around)) == mesh:
        return mesh
    if {*other.device_ids} == {*mesh.device_ids} and not other.explicit_axes:
        return mesh
    raise MeshConflictError(
        "JAX has another mesh open than the one that a function runs on",
        got=f"the function's: {mesh}\njax.set_mesh: {other}",
        fix="call it outside of jax.set_mesh, or open one mesh for both",
    )
