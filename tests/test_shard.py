# SPDX-License-Identifier: Apache-2.0
"""``ShardSpec``: what it means, what XLA makes of it, and what it refuses."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from tessera.errors import (
    AxisReusedError,
    DimError,
    ShardDivisibilityError,
    SpecFormError,
    TesseraError,
)
from tessera.mesh import Mesh
from tessera.shard import ShardSpec, as_dtype, local_shape
from tessera.shard_spec import axes_of_dims, spec_of_axes

P = PartitionSpec


# --- what it means


def test_row_and_col_are_the_last_two_dims(grid_mesh):
    spec = ShardSpec(partition=("row", "col"), mesh_axes=("tp", "dp"))
    assert spec.resolve((4, 2), grid_mesh) == P("tp", "dp")
    assert spec.resolve((3, 4, 2), grid_mesh) == P(None, "tp", "dp")


def test_of_a_vector_row_is_its_one_dim(grid_mesh):
    assert ShardSpec(("row",), ("tp",)).resolve((8,), grid_mesh) == P("tp")


def test_dims_may_be_numbers_from_either_end(grid_mesh):
    spec = ShardSpec((0, -1), ("dp", "tp"))
    assert spec.resolve((2, 3, 4), grid_mesh) == P("dp", None, "tp")


def test_other_names_come_from_the_annotation(grid_mesh):
    spec = ShardSpec(("heads", "batch"), ("tp", "dp"))
    resolved = spec.resolve((2, 3, 4), grid_mesh, dim_names=("batch", "seq", "heads"))
    assert resolved == P("dp", None, "tp")


def test_a_dim_may_be_split_over_several_axes(grid_mesh):
    assert ShardSpec((0,), (("dp", "tp"),)).resolve((8, 3), grid_mesh) == P(
        ("dp", "tp")
    )


def test_none_leaves_a_dim_whole(grid_mesh):
    assert ShardSpec((0, 1), (None, "tp")).resolve((3, 4), grid_mesh) == P(None, "tp")
    assert ShardSpec((0, 1), ("tp", None)).resolve((4, 3), grid_mesh) == P("tp")


def test_replicated_splits_nothing(grid_mesh):
    assert ShardSpec.replicated().resolve((3, 5), grid_mesh) == P()
    assert ShardSpec.replicated().resolve((), grid_mesh) == P()


def test_specs_compare_and_hash_by_value_however_they_are_written():
    written = ShardSpec(["row"], [["dp", "tp"]])
    assert written == ShardSpec(("row",), (("dp", "tp"),))
    assert hash(written) == hash(ShardSpec(("row",), (("dp", "tp"),)))
    assert ShardSpec("row", "tp") == ShardSpec(("row",), (("tp",),))


def test_a_spec_becomes_a_sharding_on_the_devices(grid_mesh):
    sharding = ShardSpec((0,), ("dp",)).named((4, 3), grid_mesh)
    assert sharding == NamedSharding(grid_mesh.jax, P("dp"))


def test_an_empty_dim_divides(grid_mesh):
    assert ShardSpec((0,), ("tp",)).resolve((0, 3), grid_mesh) == P("tp")


def test_axes_and_specs_are_the_same_thing_twice():
    spec = P(("dp", "tp"), None, "pp")
    assert axes_of_dims(spec, 4) == (("dp", "tp"), (), ("pp",), ())
    assert spec_of_axes(axes_of_dims(spec, 4)) == spec


# --- mistakes


def test_an_indivisible_dim_shows_the_arithmetic_and_the_nearest_sizes():
    mesh = Mesh(["tp", "dp"], devices=range(16))
    with pytest.raises(ShardDivisibilityError) as caught:
        ShardSpec(("col",), ("tp",)).resolve(
            (2560, 10242), mesh, what="parameter 'decoder/mlp/up'"
        )
    assert str(caught.value) == (
        "[T201] parameter 'decoder/mlp/up' cannot be split evenly over mesh axes "
        "('tp',)\n"
        "  got: shape (2560, 10242), dim 1 = 10242, axis size 4\n"
        "  fix: use 10240 or 10244, or drop 'tp' from the spec\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T201.html"
    )


def test_an_indivisible_dim_over_several_axes_shows_their_product(grid_mesh):
    with pytest.raises(ShardDivisibilityError) as caught:
        ShardSpec((0,), (("dp", "tp"),)).resolve((6,), grid_mesh)
    assert str(caught.value) == (
        "[T201] tensor cannot be split evenly over mesh axes ('dp', 'tp')\n"
        "  got: shape (6,), dim 0 = 6, axis size 8 (dp 2 × tp 4)\n"
        "  fix: use 8, or drop 'dp' or 'tp' from the spec\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T201.html"
    )


def test_all_mismatches_are_told_at_once(grid_mesh):
    with pytest.raises(ShardDivisibilityError) as caught:
        ShardSpec((0, 1, 2), ("dp", "tpp", None)).resolve((3, 4), grid_mesh)
    assert str(caught.value) == (
        "[T201] tensor cannot be split evenly over mesh axes ('dp',)\n"
        "  got: shape (3, 4), dim 0 = 3, axis size 2\n"
        "  got: also [T103] tensor is split over 'tpp', an axis that the mesh lacks: "
        "dim 1, dp × tp mesh, 2 × 4\n"
        "  got: also [T203] tensor has no dim 2: shape (3, 4)\n"
        "  fix: use 2 or 4, or drop 'dp' from the spec\n"
        "  fix: did you mean 'tp'? Known: 'dp', 'tp'\n"
        "  fix: use a dim from -2 to 1: the array has 2 dims\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T201.html"
    )


def test_an_axis_splits_one_dim_only():
    with pytest.raises(AxisReusedError) as caught:
        ShardSpec(("row", "col"), ("tp", ("dp", "tp")))
    assert str(caught.value) == (
        "[T202] mesh axis 'tp' is used twice in one ShardSpec\n"
        "  got: mesh_axes ('tp', ('dp', 'tp'))\n"
        "  fix: an axis splits one dim only: drop one of its uses\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T202.html"
    )


@pytest.mark.parametrize(
    ("dim", "shape"), [(2, (4, 4)), (-3, (4, 4)), ("col", (4,)), ("row", ()), (0, ())]
)
def test_a_dim_that_is_not_there(grid_mesh, dim, shape):
    with pytest.raises(DimError, match=f"has no dim {dim!r}"):
        ShardSpec((dim,), ("tp",)).resolve(shape, grid_mesh)


def test_a_misspelt_dim_name_comes_with_a_guess(grid_mesh):
    with pytest.raises(DimError) as caught:
        ShardSpec(("haeds",), ("tp",)).resolve(
            (4, 4), grid_mesh, dim_names=("heads", "width")
        )
    assert str(caught.value) == (
        "[T203] tensor has no dim 'haeds'\n"
        "  got: shape (4, 4)\n"
        "  fix: did you mean 'heads'? Known: 'heads', 'width', 'row', 'col', "
        "or a dim number\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T203.html"
    )


def test_dims_and_axes_are_paired():
    with pytest.raises(SpecFormError) as caught:
        ShardSpec(("row", "col"), ("tp",))
    assert str(caught.value) == (
        "[T204] a ShardSpec pairs every dim with mesh axes\n"
        "  got: 2 dims ('row', 'col'), 1 mesh axes ('tp',)\n"
        "  fix: give as many mesh axes as dims; None leaves a dim whole\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T204.html"
    )


def test_uneven_dims_are_refused_whatever_is_asked_for(grid_mesh):
    with pytest.raises(TypeError, match="unexpected keyword argument 'uneven'"):
        ShardSpec(("row",), ("tp",), uneven="pad")
    with pytest.raises(ShardDivisibilityError, match="use 8 or 12"):
        ShardSpec((0,), ("tp",)).named((10, 3), grid_mesh)


def test_one_dim_under_two_names(grid_mesh):
    with pytest.raises(SpecFormError) as caught:
        ShardSpec(("row", 0), ("tp", "dp")).resolve((8, 8), grid_mesh)
    assert str(caught.value) == (
        "[T204] the spec of tensor names dim 0 twice\n"
        "  got: 'row' and 0 are the same dim\n"
        "  fix: join their mesh axes into one tuple, or drop one of them\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T204.html"
    )


@pytest.mark.parametrize("partition", [(1.0,), (None,), (True,)])
def test_a_partition_entry_is_a_number_or_a_name(partition):
    with pytest.raises(SpecFormError, match="a dim number or a dim name"):
        ShardSpec(partition, ("tp",))


@pytest.mark.parametrize("axes", [(3,), ((),), (("tp", 1),)])
def test_a_mesh_axes_entry_is_an_axis_or_several(axes):
    with pytest.raises(SpecFormError, match="an axis name, a tuple of them, or None"):
        ShardSpec((0,), axes)


# --- what is declared is what XLA compiles

_SHAPES = [(8, 16), (16, 6), (8, 8, 2), (8,), ()]
_GROUPS = ["dp", "tp", ("dp", "tp"), ("tp", "dp"), None]


@st.composite
def shapes_and_specs(draw):
    """A shape and a spec that mostly fits it; one draw in a few is wild."""
    shape = draw(st.sampled_from(_SHAPES))
    wild = draw(st.sampled_from([False, False, True]))
    dims = range(-len(shape), len(shape) + wild)
    names = ["row", "col"][: len(shape)] + (["col"] if wild else [])
    entries = st.sampled_from([*dims, *names, 0])
    partition = draw(st.lists(entries, min_size=len(shape) > 0, max_size=2))
    groups = _GROUPS + (["xx"] if wild else [])
    mesh_axes = [draw(st.sampled_from(groups)) for _ in partition]
    return shape, partition, mesh_axes


def expected_layout(shape, partition, mesh_axes, mesh):
    """The axes of every dim by plain arithmetic; None where a spec is illegal."""
    axes = [()] * len(shape)
    named = {"row": -2 if len(shape) > 1 else 0, "col": -1}
    for name, entry in zip(partition, mesh_axes, strict=True):
        dim = named.get(name, name)
        if (name == "col" and len(shape) == 1) or not -len(shape) <= dim < len(shape):
            return None
        group = () if entry is None else (entry,) if isinstance(entry, str) else entry
        if any(axis not in mesh.axes for axis in group):
            return None
        if shape[dim] % math.prod(mesh.shape[axis] for axis in group):
            return None
        axes[dim] += group or ("whole",)
    dims = [dim for dim in axes if dim]
    used = [axis for dim in axes for axis in dim if axis != "whole"]
    named_twice = len(dims) < len(partition)
    if named_twice or len(set(used)) < len(used):
        return None
    return [() if dim == ("whole",) else dim for dim in axes]


@functools.cache
def compiled_with(declared, shape, dtype):
    def doubled_and_summed(x):
        doubled = jax.lax.with_sharding_constraint(x * 2, declared)
        return doubled, x.sum(axis=0) if x.ndim else x

    x = jax.ShapeDtypeStruct(shape, dtype, sharding=declared)
    return jax.jit(doubled_and_summed).lower(x).compile()


@pytest.mark.full
@settings(max_examples=80)
@given(
    case=shapes_and_specs(),
    dtype=st.sampled_from(["f32", "bf16", "i32"]),
    sizes=st.sampled_from([(2, 4), (4, 2), (8, 1)]),
)
def test_a_spec_is_refused_or_runs_as_declared(case, dtype, sizes):
    shape, *spec = case
    mesh = Mesh(["dp", "tp"], devices=range(8), shape=sizes)
    axes = expected_layout(shape, *spec, mesh)
    if axes is None:
        with pytest.raises(TesseraError):
            ShardSpec(*spec).named(shape, mesh)
        return
    declared = ShardSpec(*spec).named(shape, mesh)
    # Sums of numbers below eight are exact in bf16, whatever their order.
    whole = (np.arange(math.prod(shape)) % 8).reshape(shape).astype(as_dtype(dtype))
    split = jax.device_put(whole, declared)
    compiled = compiled_with(declared, shape, as_dtype(dtype))
    assert compiled.input_shardings[0][0].is_equivalent_to(declared, len(shape))
    assert compiled.output_shardings[0].is_equivalent_to(declared, len(shape))
    blocks = tuple(
        size // math.prod(mesh.shape[axis] for axis in group)
        for size, group in zip(shape, axes, strict=True)
    )
    assert local_shape(shape, declared.spec, mesh) == blocks
    assert {shard.data.shape for shard in split.addressable_shards} == {blocks}
    doubled, summed = compiled(split)
    np.testing.assert_array_equal(np.asarray(doubled), whole * 2)
    np.testing.assert_array_equal(
        np.asarray(summed), whole.sum(axis=0, dtype=whole.dtype) if shape else whole
    )


@pytest.mark.parametrize(
    "spec",
    [
        ShardSpec.replicated(),
        ShardSpec(("row",), ("dp",)),
        ShardSpec(("row", "col"), ("tp", "dp")),
        ShardSpec(("col",), (("dp", "tp"),)),
    ],
    ids=str,
)
def test_xla_compiles_the_declared_layout(grid_mesh, spec):
    declared = spec.named((8, 16), grid_mesh)
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=declared)

    def body(x):
        return jax.lax.with_sharding_constraint(jnp.sin(x) * 2, declared)

    compiled = jax.jit(body).lower(x).compile()
    assert compiled.input_shardings[0][0].is_equivalent_to(declared, 2)
    assert compiled.output_shardings.is_equivalent_to(declared, 2)
