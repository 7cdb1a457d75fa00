# SPDX-License-Identifier: Apache-2.0
"""``from tessera import dist``: meshes, layouts, collectives and their inspection.

A facade: every name is defined elsewhere, and nothing in the package imports it.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from tessera._lazy import no_attribute as _no_attribute
from tessera.analysis.inspection import Inspection, inspect
from tessera.debug.profile import profile
from tessera.errors.torch_names import DISTRIBUTED as _DISTRIBUTED
from tessera.foundations.simulated_devices import simulate_devices
from tessera.mesh import Mesh
from tessera.ops.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    recv,
    recv_from,
    reduce_scatter,
    scatter,
    send,
)
from tessera.ops.gradient_averaging import average_gradients, per_device
from tessera.shard import DistTensor, ShardSpec, tensor

allreduce = all_reduce

# fmt: off
__all__ = [
    "DistTensor", "Inspection", "Mesh", "ShardSpec", "all_gather", "all_reduce",
    "all_to_all", "allreduce", "average_gradients", "broadcast", "gather", "inspect",
    "per_device", "profile", "recv", "recv_from", "reduce_scatter", "scatter", "send",
    "simulate_devices", "tensor",
]
# fmt: on

if not _TYPE_CHECKING:  # to type checkers, a name that it lacks stays an error

    def __getattr__(name: str) -> object:
        raise _no_attribute("tessera.dist", name, _DISTRIBUTED)
