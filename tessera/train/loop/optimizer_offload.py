# SPDX-License-Identifier: Apache-2.0
"""``training.offload_optimizer``: the optimizer's state in the memory of the host.

Between steps, and until the gradients are there, the moments lie in pinned host memory;
the step copies each to the device for its update, and back. It is a memory kind of JAX
on the layout of each array, so it composes with every mesh and every stage of ZeRO.

Source: Ren et al., ZeRO-Offload, arXiv 2101.06840, which also updates on the host.
"""

from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec

from tessera.errors import HostMemoryError
from tessera.foundations.tree import Tree
from tessera.jax_compat.jaxprs import HOST_MEMORY
from tessera.mesh import Mesh


def shardings(mesh: JaxMesh, specs: Tree, shapes: Tree, *, on_host: bool) -> Tree:
    """The sharding of every array of an optimizer's state.

    Scalars, such as counters, stay on the device: nothing is gained by moving them.
    """

    def sharding(spec: PartitionSpec, leaf: Any) -> NamedSharding:
        kind = HOST_MEMORY if on_host and leaf.shape else None
        return NamedSharding(mesh, spec, memory_kind=kind)

    return jax.tree.map(sharding, specs, shapes)


def placed_struct(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array that lies somewhere."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def to_device(state: Tree) -> Tree:
    """A traced optimizer state on the device, where it can be computed with."""
    return jax.tree.map(partial(_moved, space=jax.memory.Space.Device), state)


def to_host(state: Tree) -> Tree:
    """A traced optimizer state in the memory of the host."""
    return jax.tree.map(partial(_moved, space=jax.memory.Space.Host), state)


def _moved(array: jax.Array, space: jax.memory.Space) -> jax.Array:
    return jax.device_put(array, space) if array.shape else array


def check_host_memory(mesh: Mesh) -> None:
    """Check that the devices of a mesh reach the memory of their host.

    Raises:
      HostMemoryError: [T703] they do not.
    """
    device = mesh.compile_mesh.devices.flat[0]
    if mesh.target is not None and device.platform != "cpu":
        return  # GPUs and TPUs have it, though devices that are not here list none
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST_MEMORY not in kinds:
        raise HostMemoryError(
            f"devices of {device.device_kind!r} have no {HOST_MEMORY} memory to hold "
            "the optimizer's state",
            got=f"training.offload_optimizer=true, memories {', '.join(kinds)}",
            fix="use training.offload_optimizer=false; training.zero_stage=1 splits "
            "the state over dp instead",
        )


def notes(mesh: Mesh) -> list[str]:
    """What a reader of the setting would not expect, one sentence each."""
    if mesh.compile_mesh.devices.flat[0].platform != "cpu":
        return []
    return ["offload_optimizer saves nothing on cpu: its devices' memory is the host's"]
