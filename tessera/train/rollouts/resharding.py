# SPDX-License-Identifier: Apache-2.0
"""Parameters in the layout of another mesh over the same devices, and what that moves.

Training may split weights by ``fsdp`` where sampling prefers ``tp``.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from tessera.foundations.tree import Tree
from tessera.mesh import Mesh
from tessera.train.models.model import Model


class MovedBytes(NamedTuple):
    """What devices receive from others.

    Attributes:
      total: Of all devices.
      most: Of the device that receives most.
    """

    total: int
    most: int


def reshard(model: Model, params: Tree, mesh: Mesh) -> Tree:
    """The parameters in ``model.layouts(mesh)``; the devices exchange them."""
    return jax.device_put(params, _shardings(model, mesh))


def moved_bytes(model: Model, source: Mesh, target: Mesh) -> MovedBytes:
    """What ``reshard`` moves from the layout of one mesh to that of another.

    A device keeps what it has of its new block, and receives the rest once.

    Example:
      >>> from tessera.train.models import DecoderModel, config_of
      >>> model = DecoderModel(config_of("tiny"))
      >>> fsdp, tp = (Mesh([axis], shape=(1,)) for axis in ("fsdp", "tp"))
      >>> moved_bytes(model, fsdp, tp)
      MovedBytes(total=0, most=0)
    """
    received = dict.fromkeys(target.jax.devices.flat, 0)
    before, after = _shardings(model, source), _shardings(model, target)

    def add(leaf: jax.ShapeDtypeStruct, old: NamedSharding, new: NamedSharding) -> None:
        own = old.devices_indices_map(leaf.shape)
        for device, index in new.devices_indices_map(leaf.shape).items():
            sizes, common = list[int](), list[int]()
            was = own.get(device, tuple(slice(0, 0) for _ in leaf.shape))
            for size, now, then in zip(leaf.shape, index, was, strict=True):
                start, end, _ = now.indices(size)
                first, last, _ = then.indices(size)
                sizes.append(end - start)
                common.append(max(min(end, last) - max(start, first), 0))
            missing = math.prod(sizes) - math.prod(common)
            received[device] += missing * np.dtype(leaf.dtype).itemsize

    jax.tree.map(add, model.abstract(), before, after)
    return MovedBytes(sum(received.values()), max(received.values()))


def _shardings(model: Model, mesh: Mesh) -> Tree:
    return jax.tree.map(partial(NamedSharding, mesh.jax), model.layouts(mesh))
