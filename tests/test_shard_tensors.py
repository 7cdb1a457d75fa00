# SPDX-License-Identifier: Apache-2.0
"""Lazy tensors: what is declared, when it is made, and how it stands for an array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tessera.errors import (
    AbstractMeshError,
    DimError,
    NoMeshError,
    ShardDivisibilityError,
    SpecFormError,
    TensorFormError,
    UnknownAxisError,
)
from tessera.mesh import Mesh
from tessera.shard import ShardSpec, as_dtype, capturing, tensor

P = PartitionSpec


def fan_out(key, shape, dtype):
    return jax.random.normal(key, shape, dtype) / shape[-1]


# --- declared and made


def test_a_tensor_is_waited_for():
    assert tensor((4,), init="ones").block_until_ready().tolist() == [1, 1, 1, 1]


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
    assert planned.local_shape == (24, 4)
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
        "  docs: https://tessera-spmd.github.io/tessera/errors/T207.html"
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
        "  docs: https://tessera-spmd.github.io/tessera/errors/T106.html"
    )


def test_a_layout_is_checked_when_it_is_declared(grid_mesh):
    message = refusal(
        ShardDivisibilityError, (6, 4), ShardSpec((0,), ("tp",)), grid_mesh, name="up"
    )
    assert message.startswith("[T201] tensor 'up' cannot be split evenly")
    refusal(UnknownAxisError, (8,), ShardSpec((0,), ("pp",)), grid_mesh)
    refusal(DimError, (8,), ShardSpec((1,), ("tp",)), grid_mesh)


def test_a_layout_may_be_a_partition_spec(grid_mesh):
    spec = P(None, ("dp", "tp"))
    assert tensor((2, 8), spec, grid_mesh).spec == spec
    refusal(ShardDivisibilityError, (2, 4), spec, grid_mesh)
    refusal(DimError, (8,), spec, grid_mesh)


@pytest.mark.parametrize("layout", ["dp", ("dp",), P(unreduced={"dp"})], ids=repr)
def test_a_layout_is_a_spec(grid_mesh, layout):
    message = refusal(SpecFormError, (8,), layout, grid_mesh)
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
        "  docs: https://tessera-spmd.github.io/tessera/errors/T207.html"
    )


def test_integers_are_not_normal():
    message = refusal(TensorFormError, (2,), init="normal", dtype="i32")
    assert "got: init 'normal', dtype int32" in message


def test_an_init_gives_what_is_declared():
    message = refusal(
        TensorFormError, (2, 3), init=lambda key, shape, dtype: jnp.ones(3, dtype)
    )
    assert "declared float32[2, 3], init returns" in message
    assert "wrong kind" in refusal(TensorFormError, (2,), init=3)


def test_64_bits_need_the_setting_of_jax():
    message = refusal(TensorFormError, (2,), dtype="f64")
    assert "got: dtype float64, jax_enable_x64 off" in message
    assert "fix: use float32, or" in message
