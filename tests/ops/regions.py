# SPDX-License-Identifier: Apache-2.0
"""Arrays for tests of collectives: on a mesh, and in an SPMD region of it."""

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

P = PartitionSpec


def on(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh.jax, P(*spec)))


def in_region(mesh, body, in_spec, out_spec):
    mapped = jax.shard_map(body, mesh=mesh.jax, in_specs=in_spec, out_specs=out_spec)
    return jax.jit(mapped)


def numbers(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
