# SPDX-License-Identifier: Apache-2.0
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tessera.analysis.inspection import inspect
from tessera.errors import OperandError
from tessera.mesh import Mesh
from tessera.shard import ShardSpec, tensor
from tessera.tracing import scope

P = PartitionSpec


def on(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh.jax, P(*spec)))


def test_a_lazy_tensor_shows_shapes_bytes_copies_and_slices():
    mesh = Mesh(axes=["tp", "dp"], devices=[[0, 1, 2, 3], [4, 5, 6, 7]])
    table = tensor(
        (10_000_000, 4096), ShardSpec(("row",), ("tp",)), mesh, "bf16", name="E"
    )
    assert inspect(table).as_text() == (
        "lazy tensor 'E': bfloat16[10000000, 4096]\n"
        f"  layout      {P('tp')} on Mesh(tp=2, dp=4; devices 0..7)\n"
        "  per device  bfloat16[5000000, 4096]\n"
        "  bytes       76.3 GiB global, 38.1 GiB per device\n"
        "  replicated  over dp: 4 copies of every element\n"
        "              devices 0..3 hold the same block\n"
        "\n"
        "device  tp  dp  slice\n"
        "0       0   0   [0:5000000, 0:4096]\n"
        "1       0   1   [0:5000000, 0:4096]\n"
        "2       0   2   [0:5000000, 0:4096]\n"
        "3       0   3   [0:5000000, 0:4096]\n"
        "4       1   0   [5000000:10000000, 0:4096]\n"
        "5       1   1   [5000000:10000000, 0:4096]\n"
        "6       1   2   [5000000:10000000, 0:4096]\n"
        "7       1   3   [5000000:10000000, 0:4096]"
    )
    assert not table.is_materialized


def test_of_many_devices_the_middle_is_left_out_and_counted(large_mesh):
    spec = ShardSpec(("row", "col"), ("tp", "pp"))
    lines = str(inspect(tensor((96, 8), spec, large_mesh))).splitlines()
    table = lines[-18:]
    assert table[0].startswith("device  tp  pp  dp  slice")
    assert len(table) == 1 + 16 + 1
    assert table[9] == "…       …   …   …   56 more devices"
    assert table[-1] == "71      3   1   8   [72:96, 4:8]"


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((8,), ("tp",)),
        ((8, 4), (("dp", "tp"), None)),
        ((8, 4), (("tp", "dp"),)),
        ((4, 2, 6), ("tp", "dp")),
        ((4, 2, 6), (None, "dp")),
        ((), ()),
    ],
)
def test_slices_are_those_that_jax_gives_the_devices(grid_mesh, shape, spec):
    x = on(grid_mesh, np.zeros(shape, np.float32), *spec)
    (leaf,) = inspect(x).leaves
    for position, device in enumerate(grid_mesh.jax.devices.flat):
        slices = x.sharding.devices_indices_map(shape)[device]
        bounds = [s.indices(n)[:2] for s, n in zip(slices, shape, strict=True)]
        assert leaf.blocks[position][0] == device.id
        assert leaf.block_at(position) == tuple(bounds)
    assert leaf.local_shape == x.sharding.shard_shape(shape)
    assert leaf.copies * leaf.nbytes == 8 * leaf.local_nbytes


def test_devices_are_named_by_their_ids():
    mesh = Mesh(["dp"], devices=[6, 4])
    (leaf,) = inspect(on(mesh, np.zeros(4, np.float32), "dp")).leaves
    assert [device for device, _ in leaf.blocks[:2]] == [6, 4]


def test_a_tree_has_a_row_per_leaf_and_totals(grid_mesh):
    tree = {
        "up": tensor((8, 4), ShardSpec((0,), (("dp", "tp"),)), grid_mesh),
        "norm": on(grid_mesh, np.ones(4, np.float32)),
        "rest": [
            on(grid_mesh, np.ones((4, 4), np.float32), "tp"),
            np.ones(2, np.int32),
        ],
    }
    found = inspect(tree)
    assert (found.nbytes, found.local_nbytes, found.replicated_nbytes) == (
        16 + 64 + 8 + 128,
        16 + 16 + 8 + 16,
        16,
    )
    assert re.sub(r"  +", " | ", str(found)).splitlines() == [
        "array | global | spec | per device | bytes | local bytes | copies",
        f"['norm'] | float32[4] | {P()} | [4] | 16 B | 16 B | dp, tp",
        f"['rest'][0] | float32[4, 4] | {P('tp')} | [1, 4] | 64 B | 16 B | dp",
        "NumPy array ['rest'][1] | int32[2] | - | [2] | 8 B | 8 B | -",
        f"lazy tensor ['up'] | float32[8, 4] | {P(('dp', 'tp'))} | [1, 4] | 128 B | "
        "16 B | -",
        "",
        "4 arrays: 216 B global, 56 B per device, of which 16 B whole on every device",
        "on Mesh(dp=2, tp=4; devices 0..7)",
    ]


def test_arrays_on_one_device_say_which():
    x = jax.device_put(jnp.ones((2, 3)), jax.devices()[5])
    assert inspect(x).as_text() == (
        "array: float32[2, 3]\n"
        "  per device  float32[2, 3]\n"
        "  bytes       24 B global, 24 B per device\n"
        "\n"
        "device  slice\n"
        "5       [0:2, 0:3]"
    )


def test_numpy_arrays_and_numbers_are_on_no_device():
    assert str(inspect(np.zeros((2,), np.float32))) == (
        "NumPy array: float32[2]\n"
        "  per device  float32[2]\n"
        "  bytes       8 B global, 8 B per device"
    )
    assert inspect([1.0]).leaves[0].shape == ()


def test_abstract_arrays_show_their_sharding(grid_mesh):
    sharding = NamedSharding(grid_mesh.jax, P("dp"))
    struct = jax.ShapeDtypeStruct((4, 2), jnp.float32, sharding=sharding)
    (leaf,) = inspect(struct).leaves
    assert (leaf.kind, leaf.local_shape) == ("abstract array", (2, 2))
    assert inspect(jax.ShapeDtypeStruct((4,), jnp.float32)).leaves[0].num_devices == 0


def test_traced_arrays_show_what_is_recorded_of_them(grid_mesh):
    seen = []

    def body(x):
        seen.append(inspect(x).leaves[0])
        with scope.opened(scope.Scope(mesh=grid_mesh)):
            scope.record_layout(x, grid_mesh, P("tp"))
            seen.append(inspect(x).leaves[0])
        return x

    jax.eval_shape(body, jnp.ones((8, 2)))
    assert seen[0].kind == "traced array of unknown layout"
    assert (seen[1].kind, seen[1].local_shape) == ("traced array", (2, 2))


def test_a_materialized_tensor_is_not_called_lazy(grid_mesh):
    made = tensor((8,), ShardSpec((0,), ("tp",)), grid_mesh, name="b")
    made.materialize()
    assert inspect(made).leaves[0].kind == "tensor 'b'"


def test_an_empty_tree_has_no_arrays():
    assert str(inspect({})).endswith(
        "0 arrays: 0 B global, 0 B per device, of which 0 B whole on every device"
    )


def test_idle_devices_are_seen():
    mesh = Mesh(["dp"], devices=range(4))
    text = str(inspect(tensor((8,), ShardSpec((0,), ("dp",)), mesh)))
    assert "Mesh(dp=4; devices 0..3; idle 4..7)" in text


def test_what_is_no_array_is_refused(grid_mesh):
    with pytest.raises(OperandError, match=r"got: Mesh\n"):
        inspect(grid_mesh)
    with pytest.raises(OperandError, match=r"got: object \['model'\]"):
        inspect({"model": object()})


def test_long_paths_are_whole(grid_mesh):
    name = "a_rather_long_name_of_a_part_of_a_model"
    weights = tensor((262_144, 5_376), ShardSpec((0,), (("dp", "tp"),)), grid_mesh)
    found = inspect({name: {name: weights}})
    _, row, *_ = str(found).splitlines()
    path = f"['{name}']['{name}']"
    assert row.startswith(f"lazy tensor {path}  float32[262144, 5376]  P(('dp'")
    assert found.leaves[0].path == path
