# SPDX-License-Identifier: Apache-2.0
"""A step for two slices of TPU v5e: fsdp inside of each, dp across."""

from functools import cache

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tessera.analysis.ledger import Ledger, collectives
from tessera.analysis.timeline.prediction import timeline
from tessera.mesh import Mesh
from tessera.targets.target import Target
from tests.targets.compiled.programs import only_in_test_targets

pytestmark = only_in_test_targets

WIDTH = 1024
MATRIX = 4 * WIDTH * WIDTH  # bytes in f32


def step(w, x):
    def loss(w):
        return jnp.mean(jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]) ** 2)

    value, gradients = jax.value_and_grad(loss)(w)
    return value, jax.tree.map(lambda w, g: w - 0.1 * g, w, gradients)


@cache
def program(*sizes: int) -> tuple[Mesh, str, Ledger]:
    """The compiled step on dp × fsdp, its mesh and its ledger."""
    mesh = Mesh(["dp", "fsdp"], shape=sizes, target="v5e:2x4*2")

    def array(*spec, shape):
        sharding = NamedSharding(mesh.compile_mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    w = [array("fsdp", shape=(WIDTH, WIDTH)) for _ in range(2)]
    x = array(("dp", "fsdp"), shape=(WIDTH, WIDTH))
    whole = NamedSharding(mesh.compile_mesh, PartitionSpec())
    shardings = whole, [each.sharding for each in w]
    compiled = jax.jit(step, out_shardings=shardings).lower(w, x).compile()
    return mesh, compiled.as_text(), collectives(compiled, mesh)


def test_the_devices_are_those_of_two_slices():
    mesh, _, _ = program(2, 8)
    devices = mesh.compile_mesh.devices
    assert [{d.slice_index for d in row} for row in devices] == [{0}, {1}]
    assert Mesh.of(mesh.compile_mesh) == mesh


@pytest.mark.parametrize("sizes", [(2, 8), (4, 4)])  # dp: 2 slices, or 2 × 2
def test_gradients_are_summed_in_a_slice_and_then_across(sizes):
    _, _, ledger = program(*sizes)
    matrices = [row for row in ledger.rows if row.nbytes > 4096]
    crossing = [row for row in matrices if dict(row.sent)["DCN"]]
    # libtpu sends what a device has of the sum, and may send both matrices at once.
    assert {(row.kind, row.axes) for row in crossing} == {("all-reduce", ("dp",))}
    assert all(row.group_size == 2 for row in crossing)
    assert sum(row.nbytes for row in crossing) == 2 * MATRIX // 8
    assert ledger.by_link()["DCN"] == pytest.approx(2 * MATRIX // 8, rel=0.01)
    assert ledger.unplanned == ()


def test_weights_are_gathered_in_each_slice():
    _, _, ledger = program(2, 8)
    gathers = [row for row in ledger.rows if row.kind == "all-gather"]
    assert {(row.axes, row.group_size) for row in gathers} == {(("fsdp",), 8)}


def test_the_timeline_has_the_times_of_both_levels():
    mesh, text, ledger = program(2, 8)
    found = timeline(text, mesh)
    assert {("dp",), ("fsdp",)} <= {*found.communication}
    least = ledger.by_link()["DCN"] / mesh.target.machine.links[1].rate
    assert found.communication["dp",].seconds >= least
    assert found.unknown_collectives == 0


def test_slices_have_devices_in_order():
    found = Target.parse("v5p:2x2x1*3")
    assert [d.slice_index for d in found.devices] == [0] * 4 + [1] * 4 + [2] * 4


def test_racks_of_gpus_have_devices():
    assert len(Target.parse("gb200:2x4*2").devices) == 16
