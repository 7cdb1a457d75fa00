# SPDX-License-Identifier: Apache-2.0
"""Which rows of a batch a process reads, and where they end up."""

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tessera.errors import BatchSizeError
from tessera.mesh import Mesh
from tessera.train.data.batches import Share
from tessera.train.loop.host_data_sharding import HostShard, _part, _position


def test_a_single_process_reads_everything(grid_mesh):
    shard = HostShard.of(grid_mesh, ("dp",))
    assert (shard.index, shard.count) == (0, 1)
    batch = {"tokens": np.arange(32, dtype=np.int32).reshape(1, 4, 8)}
    placed = shard.to_global(batch, P(None, "dp"), dim=1)["tokens"]
    assert np.array_equal(placed, batch["tokens"])
    assert placed.sharding.spec == P(None, "dp")


def part_of(mesh: Mesh, axes: tuple[str, ...], places: range) -> tuple[int, int]:
    """The part of a process that has the devices at some places of a mesh."""
    positions = {_position(mesh.coordinates(at), axes, mesh.shape) for at in places}
    return _part(positions, mesh.axis_size(axes))


@pytest.mark.parametrize(
    ("axes", "sizes", "first", "second"),
    [
        (("fsdp", "tp"), (4, 1), (0, 2), (1, 2)),
        (("fsdp", "tp"), (2, 2), (0, 2), (1, 2)),
        # Sequences lie on devices of both processes: both read all rows.
        (("fsdp", "tp"), (1, 4), (0, 1), (0, 1)),
        (("tp", "fsdp"), (2, 2), (0, 1), (0, 1)),
    ],
)
def test_two_processes_of_two_devices_each(axes, sizes, first, second):
    mesh = Mesh(axes, devices=range(4), shape=sizes)
    assert part_of(mesh, ("fsdp",), range(2)) == first
    assert part_of(mesh, ("fsdp",), range(2, 4)) == second


def test_several_axes_count_outer_first():
    mesh = Mesh(("dp", "tp", "fsdp"), devices=range(8), shape=(2, 2, 2))
    parts = [part_of(mesh, ("dp", "fsdp"), range(n, n + 2)) for n in (0, 2, 4, 6)]
    assert parts == [(0, 2), (0, 2), (1, 2), (1, 2)]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_processes_divide_each_microbatch_among_themselves(count):
    shares = [Share(24, process, count, microbatches=3) for process in range(count)]
    rows = [[share.row(i) for i in range(share.local_size)] for share in shares]
    folded = np.concatenate([np.reshape(each, (3, -1)) for each in rows], axis=1)
    assert np.array_equal(folded, np.arange(24).reshape(3, 8))


def test_rows_that_do_not_divide_are_refused_with_the_nearest():
    with pytest.raises(BatchSizeError) as error:
        Share(20, 0, 2, microbatches=3)
    assert error.value.got == "20 rows / 3 microbatches / 2 processes"
    assert error.value.fix == "use 18 or 24 rows"
