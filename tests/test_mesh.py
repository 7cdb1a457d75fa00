# SPDX-License-Identifier: Apache-2.0
import itertools
import logging
import math
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tessera import mesh as meshes
from tessera.device_grid import MAX_DEVICES, even_sizes
from tessera.errors import (
    AbstractMeshError,
    DeviceIdError,
    DuplicateAxisError,
    MeshShapeError,
    NoMeshError,
    TesseraError,
    UnknownAxisError,
)
from tessera.mesh import Mesh


def message_of(kind: type[TesseraError], **arguments: object) -> str:
    with pytest.raises(kind) as caught:
        Mesh(**arguments)
    return str(caught.value)


# --- forms


def test_a_nested_list_gives_the_shape_by_its_nesting():
    mesh = Mesh(axes=["tp", "dp"], devices=[[0, 1, 2, 3], [4, 5, 6, 7]])
    assert mesh.shape == {"tp": 2, "dp": 4}
    assert mesh.device_ids == (0, 1, 2, 3, 4, 5, 6, 7)


def test_a_nested_list_may_be_three_deep_and_in_any_order():
    mesh = Mesh(["a", "b", "c"], devices=[[[7, 6], [5, 4]], [[3, 2], [1, 0]]])
    assert mesh.shape == {"a": 2, "b": 2, "c": 2}
    assert [d.id for d in mesh.jax.devices.flat] == [7, 6, 5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize(
    ("count", "axes", "shape"),
    [
        (16, ["tp", "dp"], (4, 4)),
        (16, ["x", "y"], (4, 4)),
        (8, ["tp", "dp"], (4, 2)),
        (8, ["dp", "tp"], (4, 2)),
        (72, ["x", "y", "z"], (6, 4, 3)),
        (7, ["x", "y"], (7, 1)),
        (1, ["a", "b", "c"], (1, 1, 1)),
        (12, ["dp"], (12,)),
    ],
)
def test_a_flat_range_is_factored_as_evenly_as_possible(count, axes, shape):
    mesh = Mesh(axes, devices=range(count))
    assert tuple(mesh.shape.values()) == shape


@pytest.mark.parametrize(
    ("count", "axes", "shape"),
    [
        (72, ["tp", "pp", "dp"], (4, 2, 9)),
        (72, ["dp", "tp", "pp"], (9, 4, 2)),
        (72, ["tp", "dp"], (8, 9)),
        (72, ["tp", "dp", "fsdp"], (4, 6, 3)),
        (12, ["cp", "sp", "ep", "dp"], (2, 2, 1, 3)),
        (24, ["tp", "dp"], (4, 6)),
        (7, ["tp", "dp"], (1, 7)),
        (9, ["dp", "pp", "fsdp"], (3, 1, 3)),
        (96, ["tp", "pp", "dp"], (4, 4, 6)),
        (6, ["tp", "node"], (2, 3)),
    ],
)
def test_axes_that_split_models_get_powers_of_two_and_the_others_the_rest(
    count, axes, shape
):
    assert tuple(Mesh(axes, devices=range(count)).shape.values()) == shape


@pytest.mark.parametrize(
    ("count", "axes", "shape"),
    [
        (72, ["tp"], (72,)),
        (72, ["tp", "pp"], (9, 8)),
        (7, ["pp", "tp"], (7, 1)),
        (16, ["tp", "pp"], (4, 4)),
    ],
)
def test_where_all_axes_split_the_model_the_first_takes_what_is_no_power_of_two(
    count, axes, shape
):
    assert tuple(Mesh(axes, devices=range(count)).shape.values()) == shape


def test_a_mesh_of_all_devices_is_factored_by_the_same_rule():
    assert Mesh(["pp", "tp", "dp"]).shape == {"pp": 2, "tp": 2, "dp": 2}


AXES = st.permutations(["tp", "pp", "dp", "fsdp", "node"])


@given(st.integers(1, 200), AXES, st.integers(1, 3))
def test_no_sizes_that_an_axis_may_have_are_more_even(number, names, count):
    axes = tuple(names[:count])
    whole = [axis in ("tp", "pp") for axis in axes]
    powers = [1 << n for n in range(8)]
    others = [d for d in range(1, number + 1) if number % d == 0]
    if all(whole):
        whole[0] = False
    legal = [
        sizes
        for sizes in itertools.product(*(powers if w else others for w in whole))
        if math.prod(sizes) == number
    ]
    wanted = min(
        legal, key=lambda sizes: (sorted(sizes)[::-1], [-size for size in sizes])
    )
    assert even_sizes(axes, number) == wanted


def test_a_flat_sequence_is_folded_into_a_shape():
    assert Mesh(["tp", "dp"], devices=range(8), shape=(2, 4)).shape == {
        "tp": 2,
        "dp": 4,
    }


def test_one_size_is_inferred():
    assert Mesh(["tp", "dp"], devices=range(12), shape=(3, -1)).shape["dp"] == 4


def test_without_devices_a_mesh_takes_all_there_are():
    assert Mesh(["dp"]).device_ids == tuple(range(8))
    assert Mesh(["dp", "tp"], shape=(-1, 2)).shape == {"dp": 4, "tp": 2}


def test_without_devices_a_smaller_shape_takes_the_first_ones():
    assert Mesh(["dp"], shape=(3,)).device_ids == (0, 1, 2)


def test_without_devices_a_larger_shape_is_abstract():
    assert Mesh(["dp", "tp"], shape=(16, 8)).is_abstract


def test_arrays_and_jax_devices_stand_for_ids():
    grid = np.arange(8).reshape(2, 4)
    assert Mesh(["a", "b"], devices=grid) == Mesh(["a", "b"], range(8), (2, 4))
    assert Mesh(["a"], devices=jax.devices()) == Mesh(["a"], range(8))


def test_one_axis_may_be_named_by_a_string():
    assert Mesh("dp", devices=range(4)).axes == ("dp",)


def test_a_configuration_gives_sizes_and_names():
    mesh = Mesh.from_shape([[4, 1], ["fsdp", "tp"]])
    assert mesh.shape == {"fsdp": 4, "tp": 1}
    assert Mesh.from_shape([[-1, 2], ["fsdp", "tp"]]).shape == {"fsdp": 4, "tp": 2}
    assert Mesh.from_shape([[-1], ["dp"]], num_devices=3).size == 3


# --- properties


def test_topology_reads_like_the_grid():
    mesh = Mesh(axes=["tp", "dp"], devices=range(16))
    assert mesh.topology == "tp × dp mesh, 4 × 4"


def test_meshes_of_the_same_devices_and_axes_are_equal_and_hash_alike():
    one, two = (Mesh(["tp", "dp"], devices=range(16)) for _ in range(2))
    assert one == two
    assert len({one, two}) == 1
    assert one != Mesh(["dp", "tp"], devices=range(16))
    assert one != Mesh(["tp", "dp"], devices=range(16), shape=(8, 2))
    assert one != Mesh(["tp", "dp"], devices=range(1, 17))


def test_jax_gets_auto_axes_and_the_devices_in_order(grid_mesh):
    assert grid_mesh.jax.axis_names == ("dp", "tp")
    assert grid_mesh.jax.axis_types == (AxisType.Auto,) * 2
    assert [d.id for d in grid_mesh.jax.devices.flat] == list(range(8))
    assert grid_mesh.abstract.axis_types == (AxisType.Auto,) * 2
    assert dict(grid_mesh.abstract.shape) == {"dp": 2, "tp": 4}


def test_a_mesh_of_jax_and_back_is_the_same(grid_mesh):
    assert Mesh.of(grid_mesh.jax) == grid_mesh


def test_axis_sizes_of_tuples_multiply(grid_mesh):
    assert grid_mesh.axis_size("tp") == 4
    assert grid_mesh.axis_size(("dp", "tp")) == 8
    assert grid_mesh.axis_size(()) == 1


def test_repr_shows_axes_devices_and_what_is_idle():
    assert repr(Mesh(["dp"], range(8))) == "Mesh(dp=8; devices 0..7)"
    assert repr(Mesh(["dp"], range(6))) == "Mesh(dp=6; devices 0..5; idle 6, 7)"
    assert repr(Mesh(["a", "b"], range(72))) == (
        "Mesh(a=9, b=8; devices 0..71; abstract: 8 devices here)"
    )


def test_idle_devices_are_listed_and_logged(caplog):
    mesh = Mesh(["tp", "dp"], devices=[[0, 2], [4, 6]])
    assert mesh.idle_device_ids == (1, 3, 5, 7)
    with caplog.at_level(logging.INFO, logger="tessera"):
        assert mesh.jax.size == 4
    assert caplog.messages == [
        "tp × dp mesh, 2 × 2 leaves 4 of 8 devices idle: 1, 3, 5, 7"
    ]


# --- abstract meshes


def test_a_large_mesh_is_abstract_and_still_has_axes(large_mesh):
    assert large_mesh.is_abstract
    assert large_mesh.size == 72
    sharding = NamedSharding(large_mesh.abstract, PartitionSpec("tp", "pp"))
    assert sharding.shard_shape((12, 8)) == (3, 4)


def test_an_abstract_mesh_says_how_to_get_its_devices(large_mesh):
    with pytest.raises(AbstractMeshError) as caught:
        large_mesh.jax  # noqa: B018
    assert str(caught.value) == (
        "[T105] this mesh is abstract: it has devices that this machine lacks\n"
        "  got: tp × pp × dp mesh, 4 × 2 × 9, devices 0..71; "
        "this machine has 8: 0..7\n"
        "  fix: run it where there are 72 devices, or simulate them: "
        'jax.config.update("jax_num_cpu_devices", 72) before JAX is used\n'
        "  fix: specs, traces and compile-only analysis work on it as it is\n"
        "  docs: docs/errors/T105.md"
    )


def test_devices_beyond_those_here_make_a_mesh_abstract():
    assert Mesh(["dp"], devices=[6, 7, 8, 9]).is_abstract
    assert not Mesh(["dp"], devices=[6, 7]).is_abstract


def test_programs_compile_for_an_abstract_mesh(large_mesh):
    rows = NamedSharding(large_mesh.compile_mesh, PartitionSpec("tp"))
    x = jax.ShapeDtypeStruct((12, 4), jnp.float32, sharding=rows)
    compiled = jax.jit(lambda x: x.sum(axis=0)).lower(x).compile()
    assert "all-reduce" in compiled.as_text()
    assert len(jax.devices()) == 8


def test_a_mesh_whose_devices_exist_compiles_for_them(grid_mesh):
    assert grid_mesh.compile_mesh is grid_mesh.jax


# --- scopes


def test_without_a_mesh_there_is_no_current_one():
    assert meshes.current_or_none() is None
    with pytest.raises(NoMeshError) as caught:
        meshes.current()
    assert str(caught.value) == (
        "[T106] there is no mesh here\n"
        "  fix: open one with 'with mesh:', or 'with ts.mesh.auto():' "
        "for all devices\n"
        "  docs: docs/errors/T106.md"
    )


def test_the_innermost_mesh_is_current(dp_mesh, grid_mesh):
    with dp_mesh:
        with grid_mesh as entered:
            assert entered is grid_mesh
            assert meshes.current() is grid_mesh
        assert meshes.current() is dp_mesh
    assert meshes.current_or_none() is None


def test_one_mesh_may_be_entered_twice(dp_mesh):
    with dp_mesh, dp_mesh:
        assert meshes.current() is dp_mesh
    assert meshes.current_or_none() is None


def test_an_error_inside_closes_the_mesh(dp_mesh):
    with pytest.raises(KeyError), dp_mesh:
        raise KeyError
    assert meshes.current_or_none() is None


def test_a_mesh_is_open_in_its_own_thread_only(dp_mesh):
    seen = []
    with dp_mesh:
        thread = threading.Thread(target=lambda: seen.append(meshes.current_or_none()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_auto_takes_every_device_along_dp():
    mesh = meshes.auto()
    assert (mesh.axes, mesh.size) == (("dp",), 8)
    assert mesh.device_ids == tuple(range(8))


def test_outside_a_region_the_rank_is_the_process(grid_mesh):
    assert grid_mesh.rank == 0


def test_in_a_manual_region_size_and_rank_speak_of_its_axes(grid_mesh):
    def body(x):
        inside = meshes.current()
        assert (inside.size, inside.shape) == (8, {"dp": 2, "tp": 4})
        return x + inside.rank

    axes = PartitionSpec(("dp", "tp"))
    with grid_mesh:
        mapped = jax.shard_map(body, mesh=grid_mesh.jax, in_specs=axes, out_specs=axes)
        ranks = mapped(jnp.zeros(8, jnp.int32))
    assert ranks.tolist() == list(range(8))


def test_in_a_partly_manual_region_only_the_manual_axes_count(grid_mesh):
    def body(x):
        inside = meshes.current()
        assert inside.shape == {"tp": 4}
        with pytest.raises(AbstractMeshError, match="no mesh to place arrays on"):
            inside.jax  # noqa: B018
        return x + inside.rank

    mapped = jax.jit(
        jax.shard_map(
            body,
            mesh=grid_mesh.jax,
            in_specs=PartitionSpec("tp"),
            out_specs=PartitionSpec("tp"),
            axis_names={"tp"},
        )
    )
    with grid_mesh:
        assert mapped(jnp.zeros(8, jnp.int32)).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


# --- mistakes


def test_a_ragged_nesting_names_its_rows():
    assert message_of(MeshShapeError, axes=["a", "b"], devices=[[0, 1], [2]]) == (
        "[T101] the nested device list is not a full grid\n"
        "  got: [[0, 1], [2]]: rows of 1 and 2 devices\n"
        "  fix: give every row the same number of devices\n"
        "  docs: docs/errors/T101.md"
    )


def test_a_nesting_of_another_depth_than_the_axes():
    assert message_of(MeshShapeError, axes=["tp", "dp"], devices=[[[0, 1]]]) == (
        "[T101] the nesting of devices has one level per axis\n"
        "  got: 2 axes ('tp', 'dp'), devices nested 1 × 1 × 2\n"
        "  fix: name 3 axes, or give devices as a flat sequence\n"
        "  docs: docs/errors/T101.md"
    )


def test_a_nesting_that_contradicts_the_shape():
    message = message_of(
        MeshShapeError, axes=["a", "b"], devices=[[0, 1], [2, 3]], shape=(4, 1)
    )
    assert "got: devices nested 2 × 2, shape 4 × 1" in message


def test_a_product_that_does_not_match_shows_the_arithmetic():
    assert message_of(
        MeshShapeError, axes=["tp", "dp"], devices=range(16), shape=(4, 3)
    ) == (
        "[T101] the shape does not hold the devices\n"
        "  got: tp 4 × dp 3 = 12, and 16 devices\n"
        "  fix: list 12 devices, or use a shape such as 4 × 4\n"
        "  docs: docs/errors/T101.md"
    )


def test_a_size_that_cannot_be_inferred_names_the_nearest_device_counts():
    assert message_of(
        MeshShapeError, axes=["tp", "dp"], devices=range(10), shape=(4, -1)
    ) == (
        "[T101] the shape does not hold the devices\n"
        "  got: tp 4 × dp -1: 4 does not divide 10 devices\n"
        "  fix: use 8 or 12 devices, or sizes whose product divides 10\n"
        "  docs: docs/errors/T101.md"
    )


@pytest.mark.parametrize("shape", [(0, 8), (-2, 4), (-1, -1), (2.0, 4), (True, 8)])
def test_sizes_are_positive_whole_numbers(shape):
    message = message_of(MeshShapeError, axes=["a", "b"], shape=shape)
    assert f"got: shape {shape!r}" in message


def test_there_is_one_size_per_axis():
    message = message_of(MeshShapeError, axes=["a"], devices=range(8), shape=(2, 4))
    assert "got: 1 axes ('a',), 2 sizes (2, 4)" in message


def test_a_mesh_of_a_million_devices_is_declared():
    """Work that grew with the square of their number would not end."""
    count = 10**6
    mesh = Mesh(["tp", "dp"], devices=range(count))
    assert mesh.shape == {"tp": 1 << 6, "dp": count >> 6}
    grid = np.arange(count).reshape(1000, 1000)
    assert Mesh(["a", "b"], devices=grid).shape == {"a": 1000, "b": 1000}
    twice = [*range(count), *range(9)]
    message = message_of(DeviceIdError, axes=["dp"], devices=twice)
    assert "8 repeated" in message
    assert len(message) < 500


ABSURD = {
    "shape": {"shape": (10**20, 2)},
    "NumPy sizes": {"shape": (np.int64(2) ** 40, np.int64(2) ** 40)},
    "a size of many digits": {"shape": (10**6000, 2)},
    "a negative size": {"shape": (-(10**6000), 2)},
    "range": {"devices": range(10**20)},
    "a range backwards": {"devices": range(10**20, 0, -1)},
    "rows": {"devices": [range(10**9), range(10**9, 2 * 10**9)]},
    "just one more": {"shape": (MAX_DEVICES + 1, 1)},
}


@pytest.mark.parametrize("arguments", ABSURD.values(), ids=ABSURD)
def test_more_devices_than_any_machine_has_are_refused_before_anything_is_made(
    arguments,
):
    message = message_of(MeshShapeError, axes=["a", "b"], **arguments)
    assert message.startswith("[T101] a mesh has at most 1,048,576 devices\n")
    assert len(message) < 500


def test_what_is_said_of_too_many_devices():
    assert message_of(MeshShapeError, axes=["dp", "tp"], shape=(10**20, 2)) == (
        "[T101] a mesh has at most 1,048,576 devices\n"
        "  got: shape of 200,000,000,000,000,000,000 devices\n"
        "  fix: check the sizes: they multiply to the number of devices\n"
        "  docs: docs/errors/T101.md"
    )


def test_a_configured_shape_that_is_inferred_from_too_many_devices_is_refused():
    with pytest.raises(MeshShapeError, match="at most 1,048,576 devices"):
        Mesh.from_shape([[-1, 2], ["fsdp", "tp"]], num_devices=10**20)


def test_the_largest_mesh_is_declared():
    assert Mesh(["dp"], shape=(MAX_DEVICES,)).size == MAX_DEVICES


def test_more_axes_than_a_grid_can_have_are_refused():
    names = [f"a{i}" for i in range(100_000)]
    message = message_of(MeshShapeError, axes=names)
    assert message.startswith("[T101] a mesh has at most 32 axes\n")
    assert len(message) < 500
    nested: list = [0]
    for _ in range(100_000):
        nested = [nested]
    assert "nested deeper" in message_of(MeshShapeError, axes=["dp"], devices=nested)


def test_device_ids_have_31_bits():
    message = message_of(DeviceIdError, axes=["dp"], devices=[0, 10**6000])
    assert "got: a number of more than 31 bits" in message


@pytest.mark.parametrize("form", [[4, 2], "fsdp", [[4, 2]], ["42", "ab"], 8])
def test_a_configured_shape_is_a_pair(form):
    with pytest.raises(MeshShapeError, match="a pair of sizes and axis names"):
        Mesh.from_shape(form)


def test_a_mesh_has_an_axis():
    assert "at least one axis" in message_of(MeshShapeError, axes=[])


def test_a_repeated_axis_is_named():
    assert message_of(DuplicateAxisError, axes=["tp", "dp", "tp"]) == (
        "[T102] a mesh names one axis twice\n"
        "  got: axes ('tp', 'dp', 'tp'): 'tp' is repeated\n"
        "  fix: give every axis a name of its own\n"
        "  docs: docs/errors/T102.md"
    )


@pytest.mark.parametrize("name", ["", 3, None])
def test_an_axis_is_named_by_a_string(name):
    message = message_of(DuplicateAxisError, axes=["dp", name])
    assert f"{name!r} is not a non-empty string" in message


def test_an_unknown_axis_comes_with_a_guess(grid_mesh):
    with pytest.raises(UnknownAxisError) as caught:
        grid_mesh.axis_size("tpp")
    assert str(caught.value) == (
        "[T103] the mesh has no axis 'tpp'\n"
        "  got: dp × tp mesh, 2 × 4\n"
        "  fix: did you mean 'tp'? Known: 'dp', 'tp'\n"
        "  docs: docs/errors/T103.md"
    )


def test_a_repeated_device_is_named():
    assert message_of(DeviceIdError, axes=["dp"], devices=[0, 1, 1, 3]) == (
        "[T104] a mesh holds one device twice\n"
        "  got: device ids 0, 1, 1, 3: 1 repeated\n"
        "  fix: list every device once\n"
        "  docs: docs/errors/T104.md"
    )


@pytest.mark.parametrize("devices", [[0, -1], [0, 1.5], [True, 2], ["gpu0"]])
def test_a_device_id_is_a_whole_number_from_zero(devices):
    message = message_of(DeviceIdError, axes=["dp"], devices=devices)
    assert "a device id is not a whole number from 0 up" in message


@pytest.mark.parametrize("devices", [[], [[], []]])
def test_a_mesh_has_a_device(devices):
    assert "at least one device" in message_of(
        DeviceIdError, axes=["dp"], devices=devices
    )


def test_a_number_of_devices_is_no_list_of_them():
    assert "write devices=range(8)" in message_of(DeviceIdError, axes=["dp"], devices=8)
