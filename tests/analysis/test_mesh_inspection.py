# SPDX-License-Identifier: Apache-2.0
"""Where the axes of a mesh lie on hosts, on a torus, and among plain devices."""

import pytest

from tessera.analysis.inspection import inspect
from tessera.mesh import Mesh


def test_a_mesh_over_hosts_has_a_row_for_each():
    mesh = Mesh(["dp", "fsdp", "tp"], shape=(2, 2, 4), target="h100:2x8")
    assert inspect(mesh).as_text() == (
        "dp × fsdp × tp mesh, 2 × 2 × 4, on h100:2x8; each cell: dp, fsdp, tp\n"
        "\n"
        "host / device  0      1      2      3      4      5      6      7\n"
        "0              0,0,0  0,0,1  0,0,2  0,0,3  0,1,0  0,1,1  0,1,2  0,1,3\n"
        "1              1,0,0  1,0,1  1,0,2  1,0,3  1,1,0  1,1,1  1,1,2  1,1,3\n"
        "\n"
        "axis  size  connected by\n"
        "dp       2  InfiniBand, between 2 hosts\n"
        "fsdp     2  NVLink\n"
        "tp       4  NVLink"
    )


def test_a_mesh_on_a_torus_has_a_grid_for_each_plane():
    mesh = Mesh(["fsdp", "tp"], shape=(8, 2), target="v5p:2x2x4")
    text = inspect(mesh).as_text()
    assert "z = 3\ny / x  0    1\n0      3,0  3,1\n1      7,0  7,1\n" in text
    assert text.endswith(
        "fsdp     8  ICI: a line of 2 along y and a ring of 4 along z\n"
        "tp       2  ICI: a line of 2 along x"
    )


@pytest.mark.parametrize(
    ("axes", "shape", "target", "line"),
    [
        (["fsdp"], (16,), "h100:2x8", "2 hosts; NVLink for 8 devices in each"),
        (["fsdp"], (72,), "gb200_nvl72:18x4", "fsdp    72  NVLink"),
        (["fsdp"], (144,), "gb200_nvl72:36x4", "InfiniBand, between 2 domains"),
        (["fsdp", "tp"], (8, 2), "7x:2x2x2", "tp       2  ICI, on one chip"),
        (["dp", "tp"], (1, 8), "h100:1x8", "dp       1  one device"),
    ],
)
def test_each_axis_has_the_links_between_its_devices(axes, shape, target, line):
    assert line in inspect(Mesh(axes, shape=shape, target=target)).as_text()


def test_devices_that_the_mesh_leaves_out_have_no_indices():
    text = inspect(Mesh(["dp"], devices=[3, 1], target="h100:1x4")).as_text()
    assert "0              -  1  -  0" in text


def test_of_many_hosts_the_first_and_the_last_are_drawn():
    text = inspect(Mesh(["dp"], shape=(256,), target="h100:32x8")).as_text()
    hosts = [line.split()[0] for line in text.splitlines() if line[:1].isdigit()]
    assert hosts == [*map(str, range(8)), *map(str, range(24, 32))]
    assert "\n…" in text


def test_a_mesh_without_a_target_has_the_ids_of_its_devices():
    assert repr(inspect(Mesh(["dp", "tp"], devices=[[4, 5], [6, 7]]))) == (
        "dp × tp mesh, 2 × 2; each cell: the id of a device\n"
        "\n"
        "dp / tp  0  1\n"
        "0        4  5\n"
        "1        6  7"
    )


def test_a_notebook_shows_tables():
    html = inspect(Mesh(["tp"], shape=(8,), target="h100:1x8"))._repr_html_()
    assert html.count("<table>") == 2
    assert "NVLink" in html
