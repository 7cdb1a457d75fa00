# SPDX-License-Identifier: Apache-2.0
"""Which devices are along the axes of a mesh, and what connects them."""

import pytest

from tessera.analysis.inspection import inspect
from tessera.mesh import Mesh


def test_each_axis_of_a_mesh_over_hosts_has_its_devices_and_links():
    mesh = Mesh(["dp", "fsdp", "tp"], shape=(2, 2, 4), target="h100:2x8")
    assert inspect(mesh).as_text() == (
        "dp × fsdp × tp mesh, 2 × 2 × 4, on h100:2x8\n"
        "\n"
        "axis  size  first devices  connected by\n"
        "dp       2  0, 8           InfiniBand, between 2 hosts\n"
        "fsdp     2  0, 4           NVLink\n"
        "tp       4  0..3           NVLink"
    )


def test_each_axis_of_a_mesh_on_a_torus_has_its_rings():
    mesh = Mesh(["fsdp", "tp"], shape=(8, 2), target="v5p:2x2x4")
    first, second = inspect(mesh).as_text().splitlines()[-2:]
    assert first.endswith("ICI: a line of 2 along y and a ring of 4 along z")
    assert second.endswith("ICI: a line of 2 along x")


@pytest.mark.parametrize(
    ("axes", "shape", "target", "axis", "links"),
    [
        (["fsdp"], (16,), "h100:2x8", 0, "2 hosts; NVLink for 8 devices in each"),
        (["fsdp"], (72,), "gb200_nvl72:18x4", 0, "0..71          NVLink"),
        (["fsdp"], (144,), "gb200_nvl72:36x4", 0, "InfiniBand, between 2 domains"),
        (["fsdp", "tp"], (8, 2), "7x:2x2x2", 1, "ICI, on one chip"),
        (["dp", "tp"], (1, 8), "h100:1x8", 0, "one device"),
    ],
)
def test_each_axis_has_the_links_between_its_devices(axes, shape, target, axis, links):
    lines = inspect(Mesh(axes, shape=shape, target=target)).as_text().splitlines()
    assert links in lines[3 + axis]


def test_a_mesh_without_a_target_has_the_ids_of_its_devices():
    assert repr(inspect(Mesh(["dp", "tp"], devices=[[4, 5], [6, 7]]))) == (
        "dp × tp mesh, 2 × 2\n"
        "\n"
        "axis  size  first devices\n"
        "dp       2  4, 6\n"
        "tp       2  4, 5"
    )
