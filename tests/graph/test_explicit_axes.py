# SPDX-License-Identifier: Apache-2.0
"""Arrays on a mesh with Explicit axes, whose types say how they are split."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera import dist, graph, op
from tessera.errors import LayoutMismatchError, MeshConflictError
from tessera.graph.passes import orient_matmuls

NUMBERS = np.arange(32, dtype=np.float32).reshape(8, 4)


def mesh_of(*types):
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=types)


@pytest.fixture
def mesh():
    return mesh_of(AxisType.Explicit, AxisType.Explicit)


def on(mesh, array, *spec):
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


def is_alike(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert found.sharding.is_equivalent_to(wanted.sharding, wanted.ndim)
    assert found.sharding.mesh.axis_types == wanted.sharding.mesh.axis_types


def test_a_function_sees_the_types_that_jit_sees(mesh):
    seen = []

    def body(x):
        seen.append(jax.typeof(jnp.sin(x)).sharding.spec)
        return x * 2.0

    x = on(mesh, NUMBERS, "x", "y")
    is_alike(ts.function(body)(x), jax.jit(body)(x))
    assert seen[0] == seen[1] == P("x", "y")


def resharded(x, w):
    del w
    return jax.sharding.reshard(jnp.sin(x), P(None, "y"))


def einsum(x, w):
    return jnp.einsum("ij,jk->ik", x, w, out_sharding=P("x"))


def looped(x, w):
    del w
    return jax.lax.scan(lambda c, _: (jnp.tanh(c), None), x, None, length=2)[0]


def slope(x, w):
    return jax.grad(lambda w: jnp.sum(jnp.tanh(einsum(x, w)) ** 2))(w)


@pytest.mark.parametrize("body", [resharded, einsum, looped, slope])
def test_code_with_shardings_in_types_does_what_it_does_under_jit(mesh, body):
    x, w = on(mesh, NUMBERS, "x", "y"), on(mesh, NUMBERS.T / 32, "y")
    with jax.set_mesh(mesh):
        is_alike(ts.function(body)(x, w), jax.jit(body)(x, w))


def test_what_jit_finds_ambiguous_is_ambiguous(mesh):
    x, w = on(mesh, NUMBERS, "x", "y"), on(mesh, NUMBERS.T, "y")
    for compiled in (jax.jit, ts.function):
        with pytest.raises(Exception, match="ambiguous how the output should be"):
            compiled(lambda x, w: x @ w)(x, w)


def test_declared_and_split_arguments_have_types_too(mesh):
    seen = []

    def body(x):
        seen.append(jax.typeof(x).sharding.spec)
        return x.sum()

    own = dist.Mesh.of(mesh)
    ts.function(body, mesh=own, in_specs={"x": P(None, "y")})(NUMBERS)
    explicit = jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Explicit,))
    graph.training_step(body, mesh=dist.Mesh.of(explicit))(NUMBERS)
    assert seen[0] == P(None, "y")
    assert seen[-1] == P("dp", None)  # of the last trace


@pytest.mark.parametrize(
    "types",
    [(AxisType.Explicit, AxisType.Explicit), (AxisType.Explicit, AxisType.Auto)],
)
def test_gradients_have_the_layout_of_the_weights(types):
    mesh = mesh_of(*types)
    small = NUMBERS[:4] / 64
    x, w = on(mesh, NUMBERS / 32, "x"), on(mesh, small, None, "y")

    @ts.function
    def step(x, w):
        loss = jnp.sum(jnp.tanh(jnp.sin(x) * w.sum(0)) ** 2)
        return loss, ts.grad(loss, w)

    def plain(w):
        return jnp.sum(jnp.tanh(jnp.sin(NUMBERS / 32) * w.sum(0)) ** 2)

    _, found = step(x, w)
    np.testing.assert_allclose(found, jax.grad(plain)(small), rtol=1e-5)
    assert found.sharding.is_equivalent_to(w.sharding, 2)


def test_a_gradient_by_a_value_computed_inside_has_its_layout(mesh):
    @ts.function
    def slopes(x):
        inner = x * 2
        return ts.grad(jnp.sum(inner * 3), (x, inner))

    with jax.set_mesh(mesh):
        found = slopes(on(mesh, NUMBERS, "x", "y"))
    for slope, expected in zip(found, (6, 3), strict=True):
        np.testing.assert_array_equal(slope, np.full_like(NUMBERS, expected))
        assert slope.sharding.spec == P("x", "y")


def test_a_gradient_by_a_value_to_reduce_is_that_of_jax(mesh):
    reduced = jax.shard_map(
        lambda x: jax.lax.pcast(x, "x", to="reduced"),
        mesh=mesh,
        in_specs=P(),
        out_specs=P(reduced={"x"}),
    )

    def loss(x):
        return jnp.sum(reduced(x) * 3.0)

    with jax.set_mesh(mesh):
        x = on(mesh, NUMBERS)
        found = ts.jit(lambda x: ts.grad(loss(x * 2), x))(x)
        is_alike(found, jax.jit(jax.grad(lambda x: loss(x * 2)))(x))


def test_what_jax_traces_keeps_its_layout_where_it_is_closed_over(mesh):
    """XLA cannot compile a constraint to another layout than that of the type."""
    x, w = on(mesh, NUMBERS, "x"), on(mesh, NUMBERS.T, None, "y")

    def both(jit):
        return jax.jit(lambda x, w: jit(lambda x: x @ w)(x))

    with jax.set_mesh(mesh):
        program = str(both(ts.jit).trace(x, w).jaxpr)
        assert "spec=P()" not in program
        is_alike(both(ts.jit)(x, w), both(jax.jit)(x, w))


def test_kernels_collectives_and_lazy_tensors_work(mesh):
    x = on(mesh, NUMBERS, "x", "y")
    spec = dist.ShardSpec(("row",), ("y",))
    w = dist.tensor((4, 8), spec, dist.Mesh.of(mesh), init="ones")

    @op.kernel
    def total(x):
        return dist.all_reduce(x, ("y", "x"))

    parts = NUMBERS.reshape(4, 2, 2, 2).sum((0, 2))

    def both(x):
        return total(x), dist.all_reduce(x, ("y", "x")), einsum(x, w)

    with jax.set_mesh(mesh):
        of_kernel, of_collective, product = ts.function(both)(x)
    np.testing.assert_allclose(of_kernel, parts)
    np.testing.assert_allclose(of_collective, parts)
    np.testing.assert_allclose(product, NUMBERS @ np.ones((4, 8), np.float32))


def test_a_mesh_of_jax_keeps_its_types_and_is_another_than_one_of_auto_axes(mesh):
    explicit, auto = dist.Mesh.of(mesh), dist.Mesh(["x", "y"], range(8), (4, 2))
    assert explicit.explicit_axes == ("x", "y")
    assert auto.explicit_axes == ()
    assert explicit != auto
    assert explicit.jax == mesh
    assert repr(explicit) == "Mesh(x=4, y=2; Explicit axes x, y; devices 0..7)"


FIX = (
    "  fix: make the mesh with Auto axes: dist.Mesh(axes, devices), or "
    "jax.make_mesh(shape, axes, "
    "axis_types=(jax.sharding.AxisType.Auto,) * len(axes))\n"
)


def test_arrays_of_both_types_of_axes_do_not_meet_in_one_step(mesh):
    auto = dist.Mesh(["x", "y"], range(8), (4, 2))
    with pytest.raises(MeshConflictError) as caught:
        ts.function(lambda x, y: x + y)(
            on(mesh, NUMBERS, "x"), on(auto.jax, NUMBERS, "x")
        )
    ids = tuple(range(8))
    assert str(caught.value) == (
        "[T308] the inputs of one step live on different meshes\n"
        f"  got: x × y mesh, 4 × 2 of devices {ids}, Explicit axes: x\n"
        f"  got: x × y mesh, 4 × 2 of devices {ids}: y\n"
        "  fix: put them on one: jax.device_put(x, NamedSharding(mesh.jax, P(...)))\n"
        f"{FIX}"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T308.html"
    )


def test_an_operation_with_a_layout_of_its_own_needs_auto_axes():
    mesh = jax.make_mesh((4, 2), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    x = on(mesh, np.ones((4, 2, 8), np.float32), "dp")
    with pytest.raises(LayoutMismatchError) as caught:
        graph.training_step(lambda x: op.moe(x, experts=4)[0])(x)
    assert str(caught.value) == (
        "[T205] an operation has to reshard its operands, and over Explicit axes "
        "JAX does not reshard by itself\n"
        "  got: Mesh(dp=4, tp=2; Explicit axes dp, tp; devices 0..7)\n"
        f"{FIX}"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T205.html"
    )


# --- axes over which values are partial sums


@pytest.fixture
def pair():
    return jax.make_mesh((2,), ("x",))


def test_results_may_be_partial_sums(pair):
    with jax.set_mesh(pair):
        x = on(pair, NUMBERS, "x")
        found = ts.jit(lambda x: x, out_shardings=P(unreduced={"x"}))(x)
        assert found.sharding.spec.unreduced == {"x"}
        first, second = (np.asarray(s.data) for s in found.addressable_shards)
        np.testing.assert_array_equal(first + second, NUMBERS)
        np.testing.assert_array_equal(first[4:], 0.0)


@pytest.mark.parametrize("axis", ["x", "z"])
def test_partial_sums_are_over_explicit_axes_of_the_mesh(axis):
    step = ts.jit(lambda x: x, out_shardings=P(unreduced={axis}))
    mesh = mesh_of(AxisType.Auto, AxisType.Explicit)
    wrong = pytest.raises(ValueError, match=r"T204.*Auto|T103.*no axis 'z'")
    with jax.set_mesh(mesh), wrong:
        step(NUMBERS)


def test_a_gradient_by_a_reduced_value_is_a_partial_sum(pair):
    with jax.set_mesh(pair):
        x, y = (jax.reshard(NUMBERS, P(reduced={"x"})) for _ in range(2))
        out, pullback = jax.vjp(ts.jit(lambda x, y: y), x, y)
        found = pullback(jax.reshard(jnp.asarray(NUMBERS), P(unreduced={"x"})))
        assert out.sharding.spec.reduced == {"x"}
        for slope in found:
            assert jax.typeof(slope).sharding.spec.unreduced == {"x"}


def test_the_types_of_a_lowered_program_have_the_declared_layouts(mesh):
    with jax.set_mesh(mesh), jax.enable_checks(True):
        compiled = ts.jit(lambda x: x * 2, in_shardings=P("x")).compile(NUMBERS)
        (aval,) = jax.tree.leaves(compiled.jax.in_avals)
        assert aval.sharding.spec == P("x", None)
        assert compiled(NUMBERS).sharding.spec[0] == "x"


def test_types_may_be_of_a_mesh_without_devices():
    mesh = AbstractMesh((2,), ("x",), (AxisType.Explicit,))
    split = NamedSharding(mesh, P("x"))
    traced = ts.jit(lambda x: jnp.sin(x) * 2)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = traced.trace(jax.ShapeDtypeStruct((8, 4), "f4", sharding=split))
        for lowered in (traced.lower(), traced.lower(lowering_platforms=("tpu",))):
            assert "mhlo.num_partitions = 2" in lowered.as_text()
        assert traced.lower().compile().output_shardings.spec[0] == "x"


def test_an_exported_program_has_the_types_that_it_has_under_jit(mesh):
    x = jax.ShapeDtypeStruct((8, 4), "f4", sharding=NamedSharding(mesh, P("x", None)))
    with jax.set_mesh(mesh):
        found, wanted = (
            jax.export.export(jit(lambda x: x * 2))(x) for jit in (ts.jit, jax.jit)
        )
    assert found.in_avals == wanted.in_avals
    assert found.out_avals == wanted.out_avals


def test_a_large_product_has_the_layout_that_it_is_written_with(mesh, monkeypatch):
    """On CPU it is computed the other way around, where no layout is written."""
    monkeypatch.setattr(orient_matmuls, "_WORTH_IT", 0)
    a, b = on(mesh, np.ones((8, 16), "f4"), "x"), on(mesh, np.ones((8, 3), "f4"), "x")

    layout = NamedSharding(mesh, P("x", None))

    def body(a, b):
        return jnp.einsum("bd,bf->df", a, b, out_sharding=layout)

    is_alike(ts.function(body)(a, b), jax.jit(body)(a, b))
