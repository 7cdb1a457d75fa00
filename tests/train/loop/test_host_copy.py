# SPDX-License-Identifier: Apache-2.0
"""Copies in the memory of the host: placed again, and compared by position."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tessera.mesh import Mesh
from tessera.train.loop.host_copy import HostCopy
from tessera.train.loop.step_verification import rotated

MESH = Mesh(("fsdp",), devices=range(4))


def state(spec: PartitionSpec, *, on: int | None = None, flip: int = 0) -> jax.Array:
    """Eight numbers, of which those of one device may have some bits flipped."""
    values = np.linspace(1, 2, 8, dtype=np.float32)
    sharding = NamedSharding(MESH.jax, spec)
    shards = []
    for device, index in sharding.devices_indices_map((8,)).items():
        data = values[index].copy()
        if device.id == on:
            data.view(np.uint32)[0] ^= flip
        shards.append(jax.device_put(data, device))
    return jax.make_array_from_single_device_arrays((8,), sharding, shards)


def copied(array: jax.Array) -> HostCopy:
    return HostCopy.of(({"params": array},), MESH)


SHARDED, REPLICATED = PartitionSpec("fsdp"), PartitionSpec()


@pytest.mark.parametrize("spec", [SHARDED, REPLICATED], ids=["sharded", "replicated"])
def test_one_flipped_bit_differs_at_its_position(spec):
    plain = copied(state(spec))
    assert plain.unequal(copied(state(spec))) == set()
    assert plain.unequal(copied(state(spec, on=2, flip=1))) == {2}


def test_the_copy_that_others_do_not_have_is_odd():
    assert copied(state(REPLICATED)).odd_copies() == set()
    assert copied(state(REPLICATED, on=3, flip=1)).odd_copies() == {3}
    assert copied(state(SHARDED, on=3, flip=1)).odd_copies() == set()


def test_equal_copies_take_the_memory_of_one():
    (shards,) = copied(state(REPLICATED)).shards
    assert len({id(data) for data in shards.values()}) == 1


def test_a_copy_is_placed_on_devices_in_another_order_and_outlives_donation():
    before = copied(state(SHARDED))
    mesh = rotated(MESH, 1)
    assert mesh.device_ids == (1, 2, 3, 0)
    sharding = NamedSharding(mesh.jax, SHARDED)
    struct = {"params": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)}
    for _ in range(2):
        ((placed,),) = (tree.values() for tree in before.placed((struct,)))
        assert np.asarray(placed).tolist() == np.asarray(state(SHARDED)).tolist()
        first = placed.addressable_shards
        assert {s.device.id: float(s.data[0]) for s in first}[1] == 1.0
        jax.jit(lambda x: x * 0, donate_argnums=0)(placed).block_until_ready()
