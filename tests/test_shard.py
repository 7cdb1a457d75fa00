# SPDX-License-Identifier: Apache-2.0
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
    AbstractMeshError,
    AxisReusedError,
    DimError,
    NoMeshError,
    ShardDivisibilityError,
    SpecFormError,
    TensorFormError,
    TesseraError,
    UnknownAxisError,
)
from tessera.mesh import Mesh
from tessera.shard import ShardSpec, as_dtype, capturing, local_shape, tensor
from tessera.spec import axes_of_dims, spec_of_axes

P = PartitionSpec


def fan_out(key, shape, dtype):
    return jax.random.normal(key, shape, dtype) / shape[-1]


# --- ShardSpec: what it means


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


# --- ShardSpec: mistakes


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
        "  docs: docs/errors/T201.md"
    )


def test_an_indivisible_dim_over_several_axes_shows_their_product(grid_mesh):
    with pytest.raises(ShardDivisibilityError) as caught:
        ShardSpec((0,), (("dp", "tp"),)).resolve((6,), grid_mesh)
    assert str(caught.value) == (
        "[T201] tensor cannot be split evenly over mesh axes ('dp', 'tp')\n"
        "  got: shape (6,), dim 0 = 6, axis size 8 (dp 2 × tp 4)\n"
        "  fix: use 8, or drop 'dp' or 'tp' from the spec\n"
        "  docs: docs/errors/T201.md"
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
        "  docs: docs/errors/T201.md"
    )


def test_an_axis_splits_one_dim_only():
    with pytest.raises(AxisReusedError) as caught:
        ShardSpec(("row", "col"), ("tp", ("dp", "tp")))
    assert str(caught.value) == (
        "[T202] mesh axis 'tp' is used twice in one ShardSpec\n"
        "  got: mesh_axes ('tp', ('dp', 'tp'))\n"
        "  fix: an axis splits one dim only: drop one of its uses\n"
        "  docs: docs/errors/T202.md"
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
        "  docs: docs/errors/T203.md"
    )


def test_dims_and_axes_are_paired():
    with pytest.raises(SpecFormError) as caught:
        ShardSpec(("row", "col"), ("tp",))
    assert str(caught.value) == (
        "[T204] a ShardSpec pairs every dim with mesh axes\n"
        "  got: 2 dims ('row', 'col'), 1 mesh axes ('tp',)\n"
        "  fix: give as many mesh axes as dims; None leaves a dim whole\n"
        "  docs: docs/errors/T204.md"
    )


def test_one_dim_under_two_names(grid_mesh):
    with pytest.raises(SpecFormError) as caught:
        ShardSpec(("row", 0), ("tp", "dp")).resolve((8, 8), grid_mesh)
    assert str(caught.value) == (
        "[T204] the spec of tensor names dim 0 twice\n"
        "  got: 'row' and 0 are the same dim\n"
        "  fix: join their mesh axes into one tuple, or drop one of them\n"
        "  docs: docs/errors/T204.md"
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


# --- lazy tensors


def test_a_table_larger_than_the_machine_is_declared_and_planned():
    mesh = Mesh(axes=["tp", "dp"], devices=[[0, 1, 2, 3], [4, 5, 6, 7]])
    table = tensor(
        shape=(10_000_000, 4096),
        layout=ShardSpec(partition=("row",), mesh_axes=("tp",)),
        mesh=mesh,
        dtype="bf16",
    )
    assert table.spec == P("tp")
    assert table.local_shape == (5_000_000, 4096)
    assert table.nbytes == 10_000_000 * 4096 * 2
    assert table.local_nbytes == table.nbytes // 2
    assert not table.is_materialized


def test_a_tensor_on_a_mesh_of_many_devices_is_planned(large_mesh):
    spec = ShardSpec(("row", "col"), ("tp", "pp"))
    planned = tensor((96, 8), spec, large_mesh)
    assert planned.local_shape == (16, 2)
    with pytest.raises(AbstractMeshError, match="T105"):
        planned.materialize()


def test_rows_and_columns_go_to_the_declared_axes():
    mesh = Mesh(axes=["tp", "dp"], devices=range(16))
    split = tensor(
        (1024, 1024), ShardSpec(("row", "col"), ("tp", "dp")), mesh, dtype="bf16"
    )
    assert (split.spec, split.local_shape) == (P("tp", "dp"), (256, 256))


def test_each_shard_is_created_on_its_own_device(grid_mesh):
    spec = ShardSpec(("row", "col"), ("dp", "tp"))
    made = tensor((4, 8), spec, grid_mesh, init="normal").materialize()
    assert made.sharding == NamedSharding(grid_mesh.jax, P("dp", "tp"))
    assert {shard.data.shape for shard in made.addressable_shards} == {(2, 2)}


def test_the_values_do_not_depend_on_the_layout(grid_mesh):
    split = tensor((4, 8), ShardSpec((0,), ("dp",)), grid_mesh, init="normal")
    whole = tensor((4, 8), init="normal")
    np.testing.assert_array_equal(np.asarray(split), np.asarray(whole))


def test_a_tensor_is_created_once():
    lazy = tensor((3,), init="ones")
    assert lazy.materialize() is lazy.materialize()
    assert lazy.is_materialized


def test_a_key_fills_it_anew():
    lazy = tensor((3,), init="normal")
    first = lazy.materialize(jax.random.key(1))
    assert (first != lazy.materialize(jax.random.key(2))).all()


def test_without_a_key_the_name_decides():
    one, two, same = (
        np.asarray(tensor((4,), init="normal", name=name)) for name in ("a", "b", "a")
    )
    assert (one != two).all()
    np.testing.assert_array_equal(one, same)


def test_tensors_are_filled_as_declared():
    assert np.asarray(tensor((2,))).tolist() == [0, 0]
    assert np.asarray(tensor((2,), init="ones", dtype="i32")).tolist() == [1, 1]
    normal = np.asarray(tensor((100, 400), init="normal"))
    assert normal.std() == pytest.approx(0.1, rel=0.02)
    made = tensor((2, 5), init=fan_out).materialize(jax.random.key(3))
    np.testing.assert_allclose(
        made, fan_out(jax.random.key(3), (2, 5), jnp.float32), rtol=1e-6
    )


def test_the_open_mesh_is_taken(grid_mesh):
    with grid_mesh:
        lazy = tensor((8,), ShardSpec((0,), ("tp",)))
    assert lazy.mesh is grid_mesh
    assert lazy.local_shape == (2,)


def test_without_a_mesh_a_tensor_is_on_one_device():
    lazy = tensor(5)
    assert (lazy.mesh, lazy.shape, lazy.local_shape) == (None, (5,), (5,))
    assert len(lazy.materialize().sharding.device_set) == 1


def test_without_a_layout_every_device_has_it_all(grid_mesh):
    assert tensor((3, 5), mesh=grid_mesh).materialize().sharding.is_fully_replicated


def test_integers_are_never_trainable():
    assert tensor((2,)).trainable
    assert not tensor((2,), trainable=False).trainable
    assert not tensor((2,), dtype="i32").trainable


def test_repr_says_what_and_whether(grid_mesh):
    lazy = tensor((4, 8), ShardSpec((0,), ("dp",)), grid_mesh, "bf16", name="E")
    assert repr(lazy) == (
        f"DistTensor('E', bfloat16[4, 8], {P('dp')}, dp × tp mesh, 2 × 4, lazy)"
    )


# --- standing for an array

USES = {
    "x @ W": lambda x, w: x @ w,
    "W @ x": lambda x, w: w @ x,
    "W + 1": lambda x, w: w + 1.0,
    "1 - W": lambda x, w: 1.0 - w,
    "-W": lambda x, w: -w,
    "W.T": lambda x, w: w.T,
    "W[0]": lambda x, w: w[0],
    "W > 0": lambda x, w: w > 0,
    "W.sum()": lambda x, w: w.sum(),
    "W.at[0].set(1)": lambda x, w: w.at[0].set(1.0),
    "numpy @ W": lambda x, w: np.ones((4, 4), np.float32) @ w,
    "iter(W)": lambda x, w: sum(row.sum() for row in w),
    "jnp.sin": lambda x, w: jnp.sin(w),
    "jnp.matmul": lambda x, w: jnp.matmul(w, x),
    "jnp.einsum": lambda x, w: jnp.einsum("ij,jk->ik", w, x),
    "jnp.concatenate": lambda x, w: jnp.concatenate([w, x]),
    "jnp.where": lambda x, w: jnp.where(w > 0, w, x),
    "jnp.take": lambda x, w: jnp.take(w, jnp.array([1]), axis=0),
    "jax.nn.softmax": lambda x, w: jax.nn.softmax(w),
    "lax.sin": lambda x, w: jax.lax.sin(w),
    "jax.jit": lambda x, w: jax.jit(lambda a: a * 2)(w),
    "jax.vmap": lambda x, w: jax.vmap(lambda a: a @ w)(x),
    "jax.grad": lambda x, w: jax.grad(lambda a: jnp.sum(jnp.sin(w) @ a))(x),
    "jax.grad by W": lambda x, w: jax.grad(lambda a: jnp.sum(jnp.sin(a)))(w),
    "jax.checkpoint": lambda x, w: jax.checkpoint(lambda a: jnp.sin(a @ w))(x),
    "lax.scan": lambda x, w: jax.lax.scan(lambda c, _: (c @ w, None), x, length=2)[0],
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_a_tensor_stands_for_its_array(grid_mesh, use):
    spec = ShardSpec(("row", "col"), ("dp", "tp"))
    x = jnp.arange(16.0).reshape(4, 4)
    lazy = tensor((4, 4), spec, grid_mesh, init="normal")
    np.testing.assert_allclose(
        use(x, lazy), use(x, lazy.materialize()), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_while_captured_a_tensor_stands_for_what_the_trace_gives(use):
    x = jnp.arange(16.0).reshape(4, 4)
    lazy = tensor((4, 4), init="normal", name="W")
    value = jax.random.normal(jax.random.key(1), (4, 4))

    def body(x, captured):
        with capturing(lambda used: captured if used is lazy else None):
            return use(x, lazy)

    program = jax.make_jaxpr(body)(x, value)
    assert not lazy.is_materialized
    assert all(constant is not lazy for constant in program.consts)
    np.testing.assert_allclose(
        jax.jit(body)(x, value), use(x, value), rtol=1e-5, atol=1e-5
    )


def test_a_use_inside_jit_still_makes_a_real_array(grid_mesh):
    lazy = tensor((8, 8), ShardSpec((0,), ("dp",)), grid_mesh, init="ones")
    assert jax.jit(lambda x: (x @ lazy).sum())(jnp.ones((8, 8))) == 512
    assert not isinstance(lazy.materialize(), jax.core.Tracer)
    assert lazy.materialize().sharding.spec == P("dp")


def test_captured_tensors_cannot_leave_for_numpy():
    lazy = tensor((2,))

    def body(value):
        with capturing(lambda _: value):
            return jnp.asarray(np.asarray(lazy))

    with pytest.raises(jax.errors.TracerArrayConversionError):
        jax.jit(body)(jnp.ones(2))


def test_tensors_are_leaves_of_trees():
    lazy = tensor((2,))
    assert jax.tree.leaves({"w": lazy}) == [lazy]
    assert not lazy.is_materialized


def test_what_an_array_lacks_a_tensor_lacks():
    with pytest.raises(AttributeError, match="has no attribute 'sharpe'"):
        tensor((2,)).sharpe  # noqa: B018


# --- dtypes


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("f32", jnp.float32),
        ("bf16", jnp.bfloat16),
        ("f16", jnp.float16),
        ("f64", np.float64),
        ("i32", jnp.int32),
        ("u8", jnp.uint8),
        ("bool", np.bool_),
        (jnp.bfloat16, jnp.bfloat16),
        (np.dtype("int8"), np.int8),
        ("float32", np.float32),
    ],
)
def test_dtypes_have_short_names(name, dtype):
    assert as_dtype(name) == np.dtype(dtype)


def test_an_unknown_dtype_comes_with_a_guess():
    with pytest.raises(TensorFormError) as caught:
        as_dtype("bf61")
    assert str(caught.value) == (
        "[T207] there is no dtype 'bf61'\n"
        "  fix: did you mean 'bf16'? Known: 'f32', 'bf16', 'f16', 'f64', 'f8_e4m3', "
        "'f8_e5m2', 'i8', 'i16', 'i32', 'i64', 'u8', 'u16', 'u32', 'u64', 'bool'\n"
        "  docs: docs/errors/T207.md"
    )


# --- mistakes of declarations


def refusal(kind, *args, **kwargs):
    with pytest.raises(kind) as caught:
        tensor(*args, **kwargs)
    return str(caught.value)


def test_a_layout_needs_a_mesh():
    message = refusal(NoMeshError, (8,), ShardSpec((0,), ("tp",)), name="E")
    assert message == (
        "[T106] tensor 'E' has a layout and no mesh\n"
        "  got: ShardSpec(partition=(0,), mesh_axes=('tp',))\n"
        "  fix: pass mesh=, or declare it inside 'with mesh:'\n"
        "  docs: docs/errors/T106.md"
    )


def test_a_layout_is_checked_when_it_is_declared(grid_mesh):
    message = refusal(
        ShardDivisibilityError, (6, 4), ShardSpec((0,), ("tp",)), grid_mesh, name="up"
    )
    assert message.startswith("[T201] tensor 'up' cannot be split evenly")
    refusal(UnknownAxisError, (8,), ShardSpec((0,), ("pp",)), grid_mesh)
    refusal(DimError, (8,), ShardSpec((1,), ("tp",)), grid_mesh)


def test_a_layout_is_a_shard_spec(grid_mesh):
    message = refusal(SpecFormError, (8,), P("dp"), grid_mesh)
    assert message.startswith("[T204] the layout of tensor is no ShardSpec")


@pytest.mark.parametrize("shape", [(2, -1), (2.5,), (True,), ("a",)])
def test_a_shape_is_made_of_sizes(shape):
    assert "is not a whole number from 0 up" in refusal(TensorFormError, shape)


def test_an_unknown_init_comes_with_a_guess():
    assert refusal(TensorFormError, (2,), init="zeroes", name="b") == (
        "[T207] tensor 'b' has an init that does not exist\n"
        "  got: init 'zeroes'\n"
        "  fix: did you mean 'zeros'? Known: 'zeros', 'ones', 'normal', "
        "or a callable of (key, shape, dtype)\n"
        "  docs: docs/errors/T207.md"
    )


def test_integers_are_not_normal():
    message = refusal(TensorFormError, (2,), init="normal", dtype="i32")
    assert "got: init 'normal', dtype int32" in message


def test_an_init_gives_what_is_declared():
    message = refusal(
        TensorFormError, (2, 3), init=lambda key, shape, dtype: jnp.ones(3, dtype)
    )
    assert "declared float32[2, 3], init gives" in message
    assert "wrong kind" in refusal(TensorFormError, (2,), init=3)


def test_64_bits_need_the_setting_of_jax():
    message = refusal(TensorFormError, (2,), dtype="f64")
    assert "got: dtype float64, jax_enable_x64 off" in message
    assert "fix: use float32, or" in message
