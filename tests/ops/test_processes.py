# SPDX-License-Identifier: Apache-2.0
"""Collectives between processes that have values of their own."""

import pytest

from tests.two_processes import found_by_two

PROGRAM = """
from tessera import dist

# What each process has read or drawn for itself.
params = {"w": np.full(3, rank + 1.0, np.float32), "step": np.int32(rank + 5)}
with dist.Mesh(axes=["dp"]):
    first = dist.broadcast(params, axis="dp", root=0)
    last = dist.broadcast(params, axis="dp", root=3)
    mean = dist.all_reduce(params["w"], axis="dp", op="mean")
found = {
    "first": first["w"].addressable_data(1).tolist(),
    "step": int(first["step"].addressable_data(0)),
    "last": last["w"].addressable_data(0).tolist(),
    "mean": mean.addressable_data(0).tolist(),
}
print("FOUND", json.dumps(found))
"""


@pytest.mark.full
def test_every_process_gets_the_parameters_of_one():
    expected = {
        "first": [1.0] * 3,
        "step": 5,
        "last": [2.0] * 3,
        "mean": [1.5] * 3,
    }
    assert found_by_two(PROGRAM) == [expected, expected]
