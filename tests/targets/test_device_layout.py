# SPDX-License-Identifier: Apache-2.0
"""The inner axes of a mesh are on the fast links of its target."""

import itertools

import pytest

from tessera.errors import AbstractMeshError, TargetError
from tessera.mesh import Mesh
from tessera.targets.device_layout import device_grid
from tessera.targets.target import Target


def neighbors(target, ids):
    """Whether each device is one hop from the next."""
    places = [target.coordinates[i] for i in ids]
    hops = [
        sum(
            min(abs(a - b), size - abs(a - b))
            for a, b, size in zip(*pair, target.shape, strict=True)
        )
        for pair in itertools.pairwise(places)
    ]
    return all(hop <= 1 for hop in hops)


def test_the_inner_axis_stays_inside_the_host():
    mesh = Mesh(["fsdp", "tp"], shape=(4, 4), target="h100:2x8")
    assert mesh.device_ids == tuple(range(16))
    rows = [mesh.device_ids[i : i + 4] for i in range(0, 16, 4)]
    assert all(len({device // 8 for device in row}) == 1 for row in rows)


@pytest.mark.parametrize("shape", [(4, 4), (16, 1), (1, 16), (2, 2, 4)])
def test_axes_of_a_torus_go_along_its_dims(shape):
    target = Target.parse("v5e:4x4")
    ids = device_grid(target, shape)
    assert sorted(ids) == list(range(16))
    inner = next((size for size in reversed(shape) if size > 1), 1)
    assert neighbors(target, ids[:inner])


def test_chosen_devices_keep_their_order():
    mesh = Mesh(["fsdp"], devices=[3, 1, 2, 0], target="v5e:2x2")
    assert mesh.device_ids == (3, 1, 2, 0)
    with pytest.raises(TargetError, match="9 devices, and h100:1x8 has 8"):
        Mesh(["fsdp"], devices=range(9), target="h100:1x8")


def test_a_size_of_minus_one_takes_all_devices_of_the_target():
    target = Target.parse("h100:2x8")
    mesh = Mesh.from_shape([[-1, 2], ["fsdp", "tp"]], target=target)
    assert (mesh.shape, mesh.idle_device_ids) == ({"fsdp": 8, "tp": 2}, ())
    assert Mesh(["tp"], shape=(12,), target=target).idle_device_ids == (12, 13, 14, 15)


def test_nothing_runs_on_a_target():
    mesh = Mesh(["fsdp"], shape=(8,), target=Target.parse("h100:1x8", "cpu"))
    assert mesh.is_abstract
    assert Mesh.of(mesh.compile_mesh) == mesh
    assert mesh != Mesh(["fsdp"], devices=range(8))
    with pytest.raises(AbstractMeshError, match="fsdp mesh, 8 on h100:1x8"):
        _ = mesh.jax
