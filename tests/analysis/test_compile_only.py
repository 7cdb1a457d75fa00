# SPDX-License-Identifier: Apache-2.0
"""Programs for meshes of more devices than there are: compiled and read, never run."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tessera.analysis.ledger import collectives
from tessera.analysis.memory import memory
from tessera.jax_compat import target_devices
from tessera.mesh import Mesh

# What was compiled elsewhere has the lines of elsewhere.
pytestmark = pytest.mark.usefixtures("compiled_here")


@pytest.fixture
def mesh():
    return Mesh(["dp", "tp"], devices=range(72), shape=[8, 9])


@pytest.fixture
def compiled(mesh):
    def place(*spec):
        return NamedSharding(mesh.compile_mesh, PartitionSpec(*spec))

    def step(x, up, down):
        return jnp.tanh(x @ up) @ down

    def array(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place(*spec))

    arguments = (array((64, 90), "dp"), array((90, 180), None, "tp"))
    last = array((180, 90), "tp")
    step = jax.jit(step, out_shardings=place("dp"))
    return step.lower(*arguments, last).compile()


def test_the_ledger_of_72_devices_names_its_axes(compiled, mesh):
    (row,) = collectives(compiled, mesh).rows
    assert (row.kind, row.axes, row.group_size) == ("all-reduce", ("tp",), 9)
    assert row.nbytes == 64 // 8 * 90 * 4
    assert row.source.startswith(__file__)


def test_the_memory_of_72_devices_is_known(compiled):
    arguments = 64 // 8 * 90 + 90 * 180 // 9 + 180 // 9 * 90
    assert memory(compiled).arguments == 4 * arguments
    assert memory(compiled).outputs == 4 * 64 // 8 * 90


def test_nothing_is_allocated(compiled, mesh):
    client = mesh.compile_mesh.devices.flat[0].client
    assert client.live_arrays() == []
    assert len(jax.devices()) == 8
    assert jax.devices()[0].client is not client


def test_the_devices_of_one_count_are_made_once():
    assert target_devices.cpu_devices(72) is target_devices.cpu_devices(72)
    assert len(target_devices.cpu_devices(72)) == 72
