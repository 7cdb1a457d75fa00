# SPDX-License-Identifier: Apache-2.0
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from tessera.analysis.propagation import as_text, op_layouts
from tessera.mesh import Mesh


@pytest.fixture
def mesh():
    return Mesh(["dp", "tp"], devices=range(8), shape=[2, 4])


def array(mesh, shape, *spec):
    place = NamedSharding(mesh.compile_mesh, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place)


def rows(layouts, op):
    return [row for row in layouts if row.op == op]


def mlp(x, up, down):
    hidden = jnp.tanh(x @ up)
    return hidden @ down


def test_layouts_flow_from_the_arguments_to_every_operation(mesh):
    arguments = (
        array(mesh, (16, 64), "dp"),
        array(mesh, (64, 32), None, "tp"),
        array(mesh, (32, 64), "tp"),
    )
    layouts = op_layouts(jax.jit(mlp).lower(*arguments), mesh)
    assert [
        (row.op, tuple(row.spec), row.shape, row.local_shape) for row in layouts
    ] == [
        ("input", ("dp",), (16, 64), (8, 64)),
        ("input", (None, "tp"), (64, 32), (64, 8)),
        ("input", ("tp",), (32, 64), (8, 64)),
        ("dot_general", ("dp", "tp"), (16, 32), (8, 8)),
        ("tanh", ("dp", "tp"), (16, 32), (8, 8)),
        ("dot_general", ("dp",), (16, 64), (8, 64)),
        ("output", ("dp",), (16, 64), (8, 64)),
    ]
    assert [row.path for row in layouts[:4]] == [
        "x",
        "up",
        "down",
        "jit(mlp)/dot_general",
    ]
    first = inspect.getsourcelines(mlp)[1]
    lines = [row.source for row in layouts if row.op in ("dot_general", "tanh")]
    assert lines == [f"{__file__}:{first + n}" for n in (1, 1, 2)]
    assert {row.dtype for row in layouts} == {"f32"}


def test_reading_layouts_leaves_the_program_to_be_compiled_and_run(mesh):
    x = jax.device_put(np.arange(64.0, dtype=np.float32).reshape(8, 8))
    placed = jax.device_put(x, NamedSharding(mesh.jax, PartitionSpec("dp", "tp")))
    lowered = jax.jit(lambda x: x @ x).lower(placed)
    first = op_layouts(lowered, mesh)
    np.testing.assert_allclose(lowered.compile()(placed), x @ x)
    assert op_layouts(lowered, mesh) == first


def test_the_body_of_a_loop_is_listed_once_with_its_path(mesh):
    def layers(x, weights):
        return lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, weights)[0]

    weights = array(mesh, (5, 32, 32), None, None, "tp")
    layouts = op_layouts(
        jax.jit(layers).lower(array(mesh, (16, 32), "dp"), weights), mesh
    )
    (product,) = rows(layouts, "dot_general")
    assert product.shape == (16, 32)
    assert product.local_shape[0] == 8
    assert product.path.startswith("jit(layers)/while/body/")
    assert rows(layouts, "sine")[0].source == product.source


def test_a_function_is_listed_where_it_is_first_called(mesh):
    # JAX has one function for both calls, and its operations no line of this file.
    def twice(x):
        return jax.nn.silu(jax.nn.silu(x))

    layouts = op_layouts(jax.jit(twice).lower(array(mesh, (8, 4), "dp")), mesh)
    assert len(rows(layouts, "exponential")) == 1
    assert rows(layouts, "exponential")[0].path == "jit(twice)/jit(silu)/exp"
    assert rows(layouts, "exponential")[0].source.startswith(__file__)
    (again,) = rows(layouts, "call silu")
    assert tuple(again.spec) == ("dp",)


def test_both_sides_of_a_branch_are_listed(mesh):
    def branch(x):
        return lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x)

    layouts = op_layouts(jax.jit(branch).lower(array(mesh, (8, 4), "dp")), mesh)
    for op in ("sine", "cosine"):
        assert tuple(rows(layouts, op)[0].spec) == ("dp",)


def test_inside_a_manual_region_shapes_are_of_one_block(mesh):
    def region(x):
        y = lax.psum(jnp.sin(x), "tp")
        return y

    mapped = jax.shard_map(
        region,
        mesh=mesh.jax,
        in_specs=PartitionSpec(None, "tp"),
        out_specs=PartitionSpec(),
        axis_names={"tp"},
    )
    x = array(mesh, (16, 32), "dp", "tp")
    layouts = op_layouts(jax.jit(lambda x: mapped(x * 2.0)).lower(x), mesh)
    (doubled,) = rows(layouts, "multiply")
    (sine,) = rows(layouts, "sine")
    assert (doubled.shape, doubled.manual_axes) == ((16, 32), ())
    assert (sine.shape, sine.manual_axes) == ((16, 8), ("tp",))
    assert (tuple(sine.spec), sine.local_shape) == (("dp",), (8, 8))
    assert sine.path == "jit(<lambda>)/shard_map/sin"
    assert "P('dp'), manual tp" in as_text(layouts)


def test_a_constraint_shows_what_it_asks_for(mesh):
    def constrained(x):
        place = NamedSharding(mesh.jax, PartitionSpec(("dp", "tp")))
        return lax.with_sharding_constraint(x + 1.0, place)

    layouts = op_layouts(jax.jit(constrained).lower(array(mesh, (16, 4))), mesh)
    found = [row for row in layouts if tuple(row.spec) == (("dp", "tp"),)]
    assert found
    assert found[-1].op == "output"
    assert found[-1].local_shape == (2, 4)


def test_gradients_have_the_layout_of_their_weights(mesh):
    def loss(w, x):
        return jnp.sum((x @ w) ** 2)

    w, x = array(mesh, (64, 32), None, "tp"), array(mesh, (16, 64), "dp")
    layouts = op_layouts(jax.jit(jax.grad(loss)).lower(w, x), mesh)
    backward = [row for row in layouts if "transpose(jvp" in row.path]
    assert {row.op for row in backward} >= {"dot_general"}
    assert tuple(layouts[-1].spec) == (None, "tp")


def test_a_mesh_of_devices_that_do_not_exist_is_as_good():
    mesh = Mesh(["dp", "tp"], devices=range(72), shape=[8, 9])
    arguments = (array(mesh, (16, 36), "dp"), array(mesh, (36, 18), None, "tp"))
    layouts = op_layouts(jax.jit(jnp.matmul).lower(*arguments), mesh)
    (product,) = rows(layouts, "dot_general")
    assert (tuple(product.spec), product.local_shape) == (("dp", "tp"), (2, 2))


def test_one_device_has_everything():
    mesh = Mesh(["dp"], devices=[0])
    layouts = op_layouts(jax.jit(jnp.sin).lower(array(mesh, (4, 4), "dp")), mesh)
    assert all(row.local_shape == row.shape for row in layouts)


def test_the_table_is_aligned(mesh):
    layouts = op_layouts(jax.jit(jnp.tanh).lower(array(mesh, (16, 64), "dp")), mesh)
    header, first, *_ = as_text(layouts).splitlines()
    columns = ["operation", "result", "layout", "per device", "line", "path"]
    cells = ["input", "f32[16,64]", "P('dp')", "f32[8,64]", "?", "x"]
    for column, cell in zip(columns, cells, strict=True):
        assert header.index(column) == first.index(cell)
