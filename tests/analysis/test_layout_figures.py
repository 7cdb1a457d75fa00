# SPDX-License-Identifier: Apache-2.0
"""Pictures of which device holds which block, for arrays of any rank."""

import re

import pytest

from tessera.analysis.inspection import inspect
from tessera.analysis.layout_figures import draw, listed_ids
from tessera.mesh import Mesh
from tessera.shard import ShardSpec, tensor


@pytest.fixture
def show(grid_mesh, cube_mesh):
    """The picture of an array whose dims are split over some axes of a mesh."""

    def text(shape, axes, mesh=grid_mesh):
        split = {dim: names for dim, names in enumerate(axes) if names}
        spec = ShardSpec(tuple(split), tuple(split.values()))
        (leaf,) = inspect(tensor(shape, spec, mesh)).leaves
        return leaf.picture.as_text().splitlines()

    return text


def test_a_number_and_a_replicated_array_are_one_block(show):
    assert show((), ()) == ["whole  0..7"]
    assert show((4, 4), (None, None)) == ["whole  0..7"]


def test_a_vector_goes_across(show):
    assert show((8,), ("tp",)) == [
        "dim 0 over tp  0:2   2:4   4:6   6:8",
        "               0, 4  1, 5  2, 6  3, 7",
    ]


def test_rows_go_downwards(show):
    assert show((8, 4), ("dp", None)) == [
        "dim 0 over dp",
        "0:4            0..3",
        "4:8            4..7",
    ]


def test_columns_go_across(show):
    assert show((8, 4), (None, "dp")) == [
        "dim 1 over dp  0:2   2:4",
        "               0..3  4..7",
    ]


def test_a_matrix_is_a_grid(show):
    assert show((4, 4), ("dp", "tp")) == [
        "dim 0 over dp / dim 1 over tp  0:1  1:2  2:3  3:4",
        "0:2                            0    1    2    3",
        "2:4                            4    5    6    7",
    ]


def test_dims_that_are_not_split_take_no_space(show):
    assert show((2, 3, 4, 5), ("dp", None, "tp", None)) == [
        "dim 0 over dp / dim 2 over tp  0:1  1:2  2:3  3:4",
        "0:1                            0    1    2    3",
        "1:2                            4    5    6    7",
    ]


def test_a_third_dim_that_is_split_gives_a_grid_for_each_of_its_places(show, cube_mesh):
    assert show((2, 4, 9, 2), ("dp", "pp", None, "tp"), cube_mesh) == [
        "dim 0 over dp = 0:1",
        "dim 1 over pp / dim 3 over tp  0:1  1:2",
        "0:2                            0    1",
        "2:4                            2    3",
        "",
        "dim 0 over dp = 1:2",
        "dim 1 over pp / dim 3 over tp  0:1  1:2",
        "0:2                            4    5",
        "2:4                            6    7",
    ]


def test_a_dim_over_two_axes_has_them_outer_first(show):
    assert show((8,), (("tp", "dp"),)) == [
        "dim 0 over tp×dp  0:1  1:2  2:3  3:4  4:5  5:6  6:7  7:8",
        "                  0    4    1    5    2    6    3    7",
    ]


def test_of_many_blocks_the_middle_is_left_out(show):
    mesh = Mesh(["dp"], devices=range(72))
    lines = show((144, 2), ("dp", None), mesh)
    assert len(lines) == 1 + 8 + 1 + 8
    assert lines[8:11] == ["14:16          7", "…              …", "128:130        64"]


def test_of_many_grids_the_first_are_drawn_and_the_others_counted(show):
    mesh = Mesh(["a", "b", "c"], devices=range(72), shape=(18, 2, 2))
    lines = show((18, 2, 2), ("a", "b", "c"), mesh)
    assert sum("= " in line for line in lines) == 6
    assert lines[-1] == "… 12 more such grids"


def test_blocks_that_form_no_grid_leave_places_empty():
    lines = draw([(0, ((0, 2), (0, 2))), (1, ((2, 4), (2, 4)))]).as_text()
    assert re.sub(" +", " ", lines).splitlines() == [
        "dim 0 / dim 1 0:2 2:4",
        "0:2 0",
        "2:4 1",
    ]


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([0, 1], "0, 1"),
        ([0, 1, 2], "0..2"),
        ([7, 6], "7, 6"),
        ([0, 2, 4, 6], "0, 2, 4, 6"),
        ([0, 2, 4, 6, 8], "0, 2, 4, … 8 (5 devices)"),
        (range(512), "0..511"),
    ],
)
def test_devices_are_listed_in_few_words(ids, text):
    assert listed_ids(ids) == text
