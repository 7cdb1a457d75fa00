# SPDX-License-Identifier: Apache-2.0
"""Meshes of JAX, given or set, wherever Tessera takes a mesh."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera import dist, graph, op
from tessera.errors import (
    ArgumentError,
    KernelError,
    MeshConflictError,
    NoMeshError,
    SpecFormError,
)

X = np.linspace(-1.0, 1.0, 32, dtype=np.float32).reshape(8, 4)
W = np.linspace(-0.5, 0.5, 8, dtype=np.float32).reshape(4, 2)
SIZES, AXES = (4, 2), ("dp", "tp")
AUTO, EXPLICIT = ((kind, kind) for kind in (AxisType.Auto, AxisType.Explicit))
KINDS = {
    "auto": lambda: jax.make_mesh(SIZES, AXES, axis_types=AUTO),
    "explicit": lambda: jax.make_mesh(SIZES, AXES, axis_types=EXPLICIT),
    "mixed": lambda: jax.make_mesh(SIZES, AXES, axis_types=(EXPLICIT[0], AUTO[0])),
    "constructor": lambda: jax.sharding.Mesh(
        np.array(jax.devices()).reshape(SIZES), AXES
    ),
    "abstract": lambda: AbstractMesh(SIZES, AXES),
}


@pytest.fixture(params=KINDS)
def mesh(request):
    return KINDS[request.param]()


@pytest.fixture(params=[kind for kind in KINDS if kind != "abstract"])
def set_mesh(request):
    mesh = KINDS[request.param]()
    with jax.set_mesh(mesh):
        yield mesh


def affine(w, x):
    return jnp.tanh(x @ w)


def expected():
    return np.tanh(X @ W)


def is_laid_out(array, mesh, *spec):
    found = array.sharding
    assert found.mesh.axis_names == mesh.axis_names
    assert found.mesh.axis_types == mesh.axis_types
    assert found.is_equivalent_to(NamedSharding(found.mesh, P(*spec)), array.ndim)
    if not isinstance(mesh, AbstractMesh):
        assert found.mesh == mesh


# --- given


def test_a_function_runs_on_it(mesh):
    step = ts.function(affine, mesh=mesh, in_specs=(P(None, "tp"), P("dp")))
    found = step(W, X)
    np.testing.assert_allclose(found, expected(), rtol=1e-5)
    is_laid_out(found, mesh, "dp", "tp")
    assert step.compile(W, X).collectives.rows == ()


def test_a_tensor_is_declared_on_it(mesh):
    tensor = dist.tensor((8, 4), P("dp"), mesh, init="ones")
    is_laid_out(tensor.materialize(), mesh, "dp")
    rows = dist.ShardSpec(partition=("row",), mesh_axes=("dp",))
    assert rows.resolve((8, 4), mesh) == P("dp")
    assert rows.named((8, 4), mesh).spec == P("dp")


def test_a_strategy_splits_over_it(mesh):
    def step(weights, batch):
        loss = jnp.mean(jnp.sin(batch) * weights)
        return weights - ts.grad(loss, weights)

    for split in (
        ts.function(mesh=mesh)(ts.distribute("data_parallel")(step)),
        ts.distribute("data_parallel", mesh=mesh)(step),
    ):
        found = split(np.float32(1.0), X)
        np.testing.assert_allclose(found, 1 - np.sin(X).mean(), rtol=1e-5)
        assert found.sharding.mesh.axis_names == AXES
        assert split.trace(np.float32(1.0), X).graph.inputs[1].spec == P("dp")


def test_a_training_step_splits_its_batch_over_it(mesh):
    scale = dist.tensor((4,), init="ones", name="scale", mesh=mesh)

    @graph.training_step(mesh=mesh)
    def step(batch):
        loss = jnp.mean(jnp.cos(batch) * scale[:])
        return graph.backward(loss), loss

    assert step.trace(X).graph.inputs[0].spec == P("dp")
    np.testing.assert_allclose(step(X)[1], np.cos(X).mean(), rtol=1e-5)


def test_a_pipeline_is_checked_against_it():
    one, other = (graph.stage(name)(lambda x: x * 2) for name in ("one", "other"))
    stages = jax.make_mesh(
        (2,), ("pp",), devices=jax.devices()[:2], axis_types=AUTO[:1]
    )

    @graph.pipeline([one, other], mesh=stages)
    def piped(x):
        return other(one(x))

    np.testing.assert_allclose(piped(X), X * 4)


def test_layouts_are_compared_on_it():
    step = ts.function(lambda x: jnp.sum(jnp.sin(x)))
    assert ts.compare_layouts(step, X, KINDS["auto"]()).agrees
    with pytest.raises(NoMeshError, match="a mesh is none"):
        ts.compare_layouts(step, X, "dp")


@pytest.mark.parametrize("given", ["dp", 8, ["dp"], P("dp")], ids=repr)
def test_what_is_no_mesh_is_refused(given):
    for declare in (
        lambda: ts.function(affine, mesh=given),
        lambda: graph.training_step(affine, mesh=given),
        lambda: graph.pipeline([], mesh=given),
        lambda: dist.tensor((8,), mesh=given),
        lambda: ts.distribute("fsdp", mesh=given)(affine),
    ):
        with pytest.raises(NoMeshError, match="what is given as a mesh is none"):
            declare()


# --- set


def test_it_is_the_current_one(set_mesh):
    assert ts.mesh.current().jax == set_mesh
    is_laid_out(dist.tensor((8, 4), P("dp")).materialize(), set_mesh, "dp")


def test_a_kernel_runs_over_it(set_mesh):
    @op.kernel(layouts={"x": P("dp", "tp")})
    def total(x):
        return dist.all_reduce(jnp.sum(x**2), axis=AXES), x * 2

    for call in (total, ts.function(lambda x: total(x))):
        squares, doubled = call(X)
        np.testing.assert_allclose(squares, (X**2).sum(), rtol=1e-5)
        is_laid_out(doubled, set_mesh, AXES)


def test_a_collective_is_over_it(set_mesh):
    np.testing.assert_allclose(dist.all_reduce(jnp.asarray(X), axis="tp"), X * 2)


def test_strategies_and_steps_split_over_it(set_mesh):
    """Without one, a strategy takes all devices along one axis."""

    @ts.distribute("data_parallel")
    def step(weights, batch):
        loss = jnp.mean(jnp.sin(batch) * weights)
        return weights - ts.grad(loss, weights)

    found = step(np.float32(1.0), X)
    is_laid_out(found, set_mesh)
    assert step.trace(np.float32(1.0), X).graph.inputs[1].spec == P("dp")
    trained = graph.training_step(lambda batch: jnp.sum(batch))
    assert trained.trace(X).graph.inputs[0].spec == P("dp")


def test_the_innermost_mesh_counts_whoever_opened_it(grid_mesh, dp_mesh):
    with jax.set_mesh(grid_mesh.jax):
        assert ts.mesh.current() == grid_mesh
        with dp_mesh:
            assert ts.mesh.current() == dp_mesh
            with jax.set_mesh(grid_mesh.jax):
                pass
            with jax.set_mesh(dist.Mesh(["x"]).jax):
                assert ts.mesh.current().axes == ("x",)
            assert ts.mesh.current() == dp_mesh
        assert ts.mesh.current() == grid_mesh


def test_programs_know_which_mesh_was_innermost(grid_mesh, dp_mesh):
    step = ts.function(lambda x: x * len(ts.mesh.current().axes), out_specs=P("dp"))
    for _ in range(2):
        with dp_mesh, jax.set_mesh(grid_mesh.jax):
            np.testing.assert_array_equal(step(X), X * 2)
        with jax.set_mesh(grid_mesh.jax), dp_mesh:
            np.testing.assert_array_equal(step(X), X)


def test_a_mesh_that_jit_cannot_use_beside_the_one_that_is_set_is_refused(grid_mesh):
    step = ts.function(lambda x: x * 2, mesh=grid_mesh, in_specs=P("dp"))
    half = dist.Mesh(["x"], devices=range(4)).jax
    for mesh in (KINDS["explicit"](), KINDS["mixed"](), half):
        with jax.set_mesh(mesh):
            with pytest.raises(MeshConflictError, match="another mesh open"):
                step(X)
            with grid_mesh, pytest.raises(MeshConflictError, match="another mesh open"):
                ts.function(lambda x: x * 2, out_specs=P("dp"))(X)
    with jax.set_mesh(grid_mesh.jax):
        assert step(X).sharding.spec == P("dp")


def test_a_function_without_layouts_is_left_to_jax(set_mesh):
    """A mesh that is set says nothing of arrays that are committed elsewhere."""
    elsewhere = jax.device_put(X, jax.devices()[3])
    for x in (X, elsewhere):
        found = []
        for compiled in (jax.jit, ts.jit):
            try:
                found.append(compiled(jnp.sin)(x).sharding)
            except ValueError as error:
                found.append(type(error))
        assert found[0] == found[1] or found[0].is_equivalent_to(found[1], 2)


# --- constraints inside


def constrained(x):
    return jax.lax.with_sharding_constraint(x * 2, P(None, "tp"))


@jax.custom_vjp
def with_rule(x):
    return x * 2


def backward_rule(_, gradient):
    return (jax.lax.with_sharding_constraint(gradient * 2, P(None, "tp")),)


with_rule.defvjp(lambda x: (x * 2, None), backward_rule)


def slope(x):
    return ts.grad(jnp.sum(with_rule(x)), x) * x


def in_a_loop(x):
    return jax.lax.scan(lambda c, _: (constrained(c), None), x, None, length=1)[0]


def in_a_branch(x):
    if x[0, 0] < 0:
        x = constrained(x)
    return x


@pytest.mark.parametrize(
    "body", [constrained, jax.jit(constrained), slope, in_a_loop, in_a_branch]
)
def test_a_partition_spec_in_a_constraint_is_on_the_mesh_of_the_function(
    body, grid_mesh, dp_mesh
):
    split = jax.device_put(X, NamedSharding(grid_mesh.jax, P("dp")))
    with grid_mesh:
        opened = ts.function(body)(X)
    for found in (
        ts.function(body, mesh=grid_mesh)(X),
        ts.function(body)(split),
        jax.jit(ts.function(body, mesh=grid_mesh))(X),
        opened,
    ):
        np.testing.assert_array_equal(found, X * 2)
        if body is not slope:
            assert found.sharding.mesh == grid_mesh.jax
            assert found.sharding.spec[1:] == P("tp")[:]
    other = dist.Mesh(["dp", "tp"], devices=range(8), shape=(4, 2))
    again = ts.function(body, mesh=other)(X)  # another mesh is another program
    assert again.sharding.mesh == other.jax


def test_such_a_constraint_is_on_a_mesh_that_is_not_here_too(large_mesh):
    struct = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    compiled = ts.function(constrained, mesh=large_mesh).compile(struct)
    (layout,) = compiled.jax.output_shardings
    assert layout.spec == P(None, "tp")


def reshards(x):
    return jax.sharding.reshard(x, P("dp"))


def maps(x):
    return jax.shard_map(lambda x: x, in_specs=P("dp"), out_specs=P("dp"))(x)


def multiplies(x):
    return x @ x.T


@pytest.mark.parametrize(
    ("body", "kind", "note"),
    [
        (reshards, "auto", r"\[T106\].*jax\.set_mesh"),
        (maps, "auto", r"\[T106\].*jax\.set_mesh"),
        (
            lambda x: jax.shard_map(
                lambda x: x, mesh=dist.Mesh(["dp"]), in_specs=P(), out_specs=P()
            )(x),
            "auto",
            r"\[T209\].*mesh\.jax",
        ),
        (multiplies, "explicit", r"\[T205\].*AxisType\.Auto"),
        (
            lambda x: jax.sharding.reshard(x, NamedSharding(KINDS["auto"](), P("dp"))),
            "auto",
            r"\[T205\].*with_sharding_constraint",
        ),
    ],
)
def test_what_jax_refuses_says_what_to_write(body, kind, note):
    mesh = KINDS[kind]()
    step = ts.function(body, mesh=mesh, in_specs=P(None, "tp"))
    with pytest.raises(Exception, match=r"mesh|shard") as caught:
        step(X)
    notes = " ".join(caught.value.__notes__).replace("\n", " ")
    assert re.search(note, notes)


def test_what_needs_the_mesh_of_jax_works_where_it_is_set(set_mesh):
    bodies = [reshards] if "dp" in set_mesh.explicit_axes else [maps, constrained]
    for body in bodies:
        for step in (ts.function(body), ts.function(body, mesh=set_mesh)):
            found, wanted = step(X), jax.jit(body)(X)
            assert found.sharding.is_equivalent_to(wanted.sharding, 2)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"mesh": 1}, ArgumentError, "call the kernel in 'with mesh:'"),
        ({"in_specs": (P("dp"),)}, ArgumentError, "declare layouts by name"),
        ({"out_specs": (P("dp"),)}, ArgumentError, "leave it out"),
        ({"layouts": (P("dp"),)}, KernelError, "layouts by the names of arguments"),
        ({"layouts": {"x": "dp"}}, SpecFormError, "no ShardSpec and no PartitionSpec"),
    ],
)
def test_a_kernel_is_declared_in_its_own_way(options, kind, text):
    with pytest.raises(kind, match=text):
        op.kernel(**options)(lambda x: x)
