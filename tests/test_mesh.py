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
from tessera.errors import (
    AbstractMeshError,
    MeshShapeError,
    NoMeshError,
)
from tessera.foundations.device_grid import even_sizes, nearest_shapes
from tessera.mesh import Mesh

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


@pytest.mark.parametrize(
    ("axes", "sizes", "number", "shapes"),
    [
        (("fsdp", "tp"), (3, 2), 64, [(32, 2), (8, 8)]),
        (("fsdp", "tp"), (3, -1), 64, [(4, 16), (2, 32)]),
        (("dp", "tp"), (4, 3), 12, [(3, 4), (6, 2)]),
        (("tp", "dp"), (4, -1), 10, [(2, 5), (1, 10)]),
        (("tp",), (4,), 6, [(6,)]),
        (("a", "b", "c", "d", "e"), (1, 1, 1, 1, 3), 8, [(2, 2, 2, 1, 1)]),
    ],
)
def test_the_nearest_shapes_keep_sizes_and_give_models_powers_of_two(
    axes, sizes, number, shapes
):
    assert nearest_shapes(axes, sizes, number) == shapes


def test_a_shape_for_another_number_of_devices_is_refused_with_those_that_fit():
    with pytest.raises(MeshShapeError, match="use the shape 32 × 2 or 8 × 8, or list"):
        Mesh(["fsdp", "tp"], devices=range(64), shape=(3, 2))


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
        "  docs: https://tessera-spmd.github.io/tessera/errors/T105.html"
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
        "  docs: https://tessera-spmd.github.io/tessera/errors/T106.html"
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
