# SPDX-License-Identifier: Apache-2.0
"""Meshes of the setting ``model.mesh_shape``, and shapes that are none."""

import pytest

from tessera.errors import MeshShapeError
from tessera.targets.target import Target
from tessera.train.config.mesh_shape import mesh_of_shape


def test_a_configuration_gives_sizes_and_names():
    mesh = mesh_of_shape([[4, 1], ["fsdp", "tp"]])
    assert mesh.shape == {"fsdp": 4, "tp": 1}
    assert mesh_of_shape([[-1, 2], ["fsdp", "tp"]]).shape == {"fsdp": 4, "tp": 2}
    assert mesh_of_shape([[-1], ["dp"]], num_devices=3).size == 3


def test_a_size_is_inferred_from_the_devices_of_a_target():
    target = Target.parse("h100:2x8")
    mesh = mesh_of_shape([[-1, 2], ["fsdp", "tp"]], target=target)
    assert mesh.shape == {"fsdp": 8, "tp": 2}


@pytest.mark.parametrize("form", [[4, 2], "fsdp", [[4, 2]], ["42", "ab"], 8])
def test_a_shape_is_a_pair(form):
    with pytest.raises(MeshShapeError, match="a pair of sizes and axis names"):
        mesh_of_shape(form)


def test_a_shape_that_is_inferred_from_too_many_devices_is_refused():
    with pytest.raises(MeshShapeError, match="at most 1,048,576 devices"):
        mesh_of_shape([[-1, 2], ["fsdp", "tp"]], num_devices=10**20)
