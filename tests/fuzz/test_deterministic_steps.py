# SPDX-License-Identifier: Apache-2.0
"""Deterministic steps on drawn meshes, in drawn microbatches: one device's bits."""

from random import Random

import pytest

from tests.train.loop.test_deterministic_numerics import run

MOST = {"pp": 2, "dp": 8, "fsdp": 8, "cp": 8, "tp": 2}
DEVICES = 8


def random_mesh(draw: Random) -> str:
    """Axes in any order, of one to eight devices together."""
    free, parts = DEVICES, []
    for axis in draw.sample([*MOST], len(MOST)):
        sizes = [n for n in (1, 2, 4, 8) if n <= min(free, MOST[axis])]
        size = draw.choice(sizes)
        if size > 1 or draw.random() < 0.2:
            parts.append(f"{axis}{size}")
            free //= size
    return "_".join(parts) or "fsdp1"


@pytest.mark.full
@pytest.mark.fuzz(sample=1, whole=60)
def test_a_step_has_the_bits_of_one_device(seed):
    draw = Random(seed)
    mesh, microbatches = random_mesh(draw), draw.choice([1, 2, 4])
    options = {"dtype": draw.choice([None, "bfloat16"])}
    if any(axis.startswith("dp") for axis in mesh.split("_")):
        options["zero_stage"] = draw.choice([0, 1, 2, 3])
    found = run(mesh, 8, microbatches, **options)
    assert found == run("dp1", 8, 2, dtype=options["dtype"]), (mesh, options)
