# SPDX-License-Identifier: Apache-2.0
"""No layout on a mesh is faster than the bounds of the mesh."""

import pytest

from tessera.train.planner.layout_legality import Legality
from tessera.train.planner.mesh_bounds import MeshBounds
from tessera.train.planner.search import search
from tests.train.planner.test_search import config, model, space


@pytest.fixture(scope="module")
def every():
    """All layouts that fit, with pipelines, whatever their schedule."""
    found = search(space(), model(), most=10**6).best
    assert any(each.layout.schedule for each in found)
    return found


@pytest.fixture(scope="module")
def bounds():
    machine = model().target.machine

    def fits(variants):
        return any(model().memory(e).total <= machine.memory_bytes for e in variants)

    return MeshBounds(space(), model(), Legality(config()), fits)


def test_no_layout_is_faster_than_the_bound_of_its_mesh(bounds, every):
    for each in every:
        assert bounds.of_mesh(each.layout.mesh) <= each.prediction.seconds


def test_no_layout_is_faster_than_the_bound_of_all_meshes_like_its_own(bounds, every):
    for each in every:
        assert bounds.of_group(each.layout.mesh) <= each.prediction.seconds


def test_no_layout_is_faster_than_the_bound_of_its_microbatches(bounds, every):
    for each in every:
        size = each.layout.micro_batch_size
        assert bounds.of_size(each.layout.mesh, size) <= each.prediction.seconds


def test_a_device_computes_as_long_on_all_meshes_of_a_group(every):
    """Were it not so, what was found for one mesh would be wrong for another."""
    found = dict[object, float]()
    for layout in (each.layout for each in every):
        device, _ = model().device_work(layout)
        seconds = device.compute(2, "full").total
        assert found.setdefault(device.compute_key, seconds) == seconds
    assert len(found) < len({each.layout.mesh for each in every})


def test_meshes_are_alike_whatever_dp_and_fsdp_share(bounds):
    meshes = [(("dp", 4), ("tp", 2)), (("dp", 2), ("fsdp", 2), ("tp", 2))]
    assert len({bounds.of_group(mesh) for mesh in meshes}) == 1
    assert len({bounds.of_mesh(mesh) for mesh in meshes}) == 2
