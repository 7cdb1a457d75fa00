# SPDX-License-Identifier: Apache-2.0
"""The mesh of the setting ``model.mesh_shape``: sizes, then names."""

import math
from collections.abc import Sequence
from typing import Any

import jax

from tessera.errors import MeshShapeError
from tessera.foundations.device_grid import (
    checked_axes,
    checked_shape,
    inferred,
    is_sequence,
)
from tessera.jax_compat import jaxprs
from tessera.mesh import Mesh
from tessera.targets import device_layout
from tessera.targets.target import Target


def mesh_of_shape(
    mesh_shape: Sequence[Any],
    num_devices: int | None = None,
    target: Target | None = None,
) -> Mesh:
    """A mesh from the notation of configurations.

    Args:
      mesh_shape: ``[[4, 2], ["fsdp", "tp"]]``; one size may be -1.
      num_devices: Total to infer a -1 from; None is the target's device count, or
        JAX's.
      target: The machine to compile for, where it is not this one.

    Raises:
      MeshShapeError: [T101] not a pair of sizes and names, or sizes that do not divide
        the devices.

    Example:
      >>> mesh_of_shape([[-1, 2], ["fsdp", "tp"]], num_devices=8).shape
      {'fsdp': 4, 'tp': 2}
    """
    parts = list(mesh_shape) if is_sequence(mesh_shape) else []
    if len(parts) != 2 or not all(map(is_sequence, parts)):
        raise MeshShapeError(
            "a mesh shape is a pair of sizes and axis names",
            got=f"{mesh_shape!r}",
            fix='write [[4, 2], ["fsdp", "tp"]]',
        )
    axes = checked_axes(parts[1])
    sizes = checked_shape(parts[0], axes)
    if -1 in sizes:
        if num_devices is None:
            num_devices = target.num_devices if target else jax.device_count()
        sizes = inferred(axes, sizes, num_devices)
    devices = None if target else range(math.prod(sizes))
    # Settings are checked before there is a backend.
    if devices and jaxprs.backend_started() and devices[-1] < jax.device_count():
        devices = device_layout.grid_here(sizes, tuple(devices))
    return Mesh(axes, devices=devices, shape=sizes, target=target)
