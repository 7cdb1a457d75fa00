# SPDX-License-Identifier: Apache-2.0
"""``from tessera import dist``: meshes, layouts, collectives, and looking at them.

A facade: every name is defined elsewhere, and nothing in the package imports it.
"""

from tessera.analysis.inspection import Inspection as Inspection
from tessera.analysis.inspection import inspect as inspect
from tessera.debug.profile import profile as profile
from tessera.mesh import Mesh as Mesh
from tessera.ops.averaging import average_gradients as average_gradients
from tessera.ops.averaging import compressed_mean as compressed_mean
from tessera.ops.averaging import per_device as per_device
from tessera.ops.collectives import all_gather as all_gather
from tessera.ops.collectives import all_reduce as all_reduce
from tessera.ops.collectives import all_to_all as all_to_all
from tessera.ops.collectives import barrier as barrier
from tessera.ops.collectives import broadcast as broadcast
from tessera.ops.collectives import gather as gather
from tessera.ops.collectives import recv as recv
from tessera.ops.collectives import recv_from as recv_from
from tessera.ops.collectives import reduce_scatter as reduce_scatter
from tessera.ops.collectives import scatter as scatter
from tessera.ops.collectives import send as send
from tessera.shard import DistTensor as DistTensor
from tessera.shard import ShardSpec as ShardSpec
from tessera.shard import tensor as tensor

allreduce = all_reduce
