# SPDX-License-Identifier: Apache-2.0
"""Which dim of an array one more axis splits."""

import pytest
from jax.sharding import PartitionSpec as P

from tessera.graph.zero_layouts import split_further
from tessera.mesh import Mesh

MESH = Mesh(["dp", "tp", "one"], devices=range(8), shape=(4, 2, 1))


@pytest.mark.parametrize(
    ("spec", "shape", "expected"),
    [
        (P(), (8, 64), P(None, "dp")),
        (P(), (8, 8), P("dp")),  # the first of equals
        (P(), (8, 66), P("dp")),  # 4 does not divide 66
        (P(None, "tp"), (8, 64), P("dp", "tp")),  # a whole dim, if a smaller one
        (P(None, "tp"), (6, 64), P(None, ("tp", "dp"))),
        (P(None, "tp"), (6, 12), P(None, "tp")),  # blocks of 6
        (P("dp"), (8, 64), P("dp")),
        (P(("tp", "dp")), (8, 64), P(("tp", "dp"))),
        (P(), (0, 3), P()),
        (P(), (), P()),
    ],
    ids=str,
)
def test_the_largest_whole_dim_that_the_axis_divides(spec, shape, expected):
    assert split_further(spec, shape, MESH, "dp") == expected


def test_dims_that_are_kept_stay_whole():
    assert split_further(P(), (64, 8), MESH, "dp", keep=(0,)) == P(None, "dp")
    assert split_further(P(), (64, 3), MESH, "dp", keep=(0,)) == P()


def test_an_axis_of_one_device_splits_nothing():
    assert split_further(P(), (8, 64), MESH, "one") == P()
