# SPDX-License-Identifier: Apache-2.0
"""No layout on a mesh is faster than the bounds of the mesh."""

import pytest

from tessera.targets.target import Target
from tessera.train.planner.layout import Layout
from tessera.train.planner.layout_legality import Legality
from tessera.train.planner.mesh_bounds import MeshBounds
from tessera.train.planner.search import search
from tessera.train.planner.search_space import AXES, Space
from tessera.train.planner.step_time import StepModel
from tests.train.planner import test_ragged_matmuls
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


def of_dense(target: str) -> StepModel:
    return StepModel(config(), model().work, Target.parse(target))


def of_experts(target: str) -> StepModel:
    settings, work = test_ragged_matmuls.config(), test_ragged_matmuls.model().work
    return StepModel(settings, work, Target.parse(target))


@pytest.mark.parametrize("target", ["cpu:8", "h100:1x8", "v5p:2x2x2"])
@pytest.mark.parametrize("stepper", [of_dense, of_experts])
def test_a_device_computes_as_long_on_all_meshes_of_a_group(stepper, target):
    """Were it not so, what was found for one mesh would be wrong for another.

    On TPUs windowed matmuls depend on ``fsdp``, too.
    """
    found, stepper = dict[object, float](), stepper(target)
    meshes = [*Space(stepper.config, frozenset(), AXES, 16).meshes(8)]
    for mesh in meshes:
        layout = Layout(mesh, 1, 1)
        if Legality(stepper.config).model_problem(layout) is None:
            device, _ = stepper.device_work(layout)
            seconds = device.compute(2, "full").total
            assert found.setdefault(device.compute_key, seconds) == seconds
    assert 4 <= len(found) < len(meshes) / 2


def test_meshes_are_alike_whatever_dp_and_fsdp_share(bounds):
    meshes = [(("dp", 4), ("tp", 2)), (("dp", 2), ("fsdp", 2), ("tp", 2))]
    assert len({bounds.of_group(mesh) for mesh in meshes}) == 1
    assert len({bounds.of_mesh(mesh) for mesh in meshes}) == 2
