# SPDX-License-Identifier: Apache-2.0
"""Declared layouts, the arrays' own and the rule for batches, for each value."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera.errors import (
    LayoutMismatchError,
    NoMeshError,
    ShardDivisibilityError,
    SpecFormError,
)
from tessera.mesh import Mesh
from tessera.shard import ShardSpec, tensor

X = jnp.ones((8, 4))


def layouts(function, *args, **options):
    """The layouts of a function's inputs and outputs, by name."""
    graph = ts.function(function, **options).trace(*args).graph
    return {value.name: value.spec for value in (*graph.inputs, *graph.outputs)}


def same(x):
    return x


@pytest.mark.parametrize("spec", [P("dp"), ShardSpec((0,), ("dp",)), P("dp", None)])
def test_a_layout_is_a_spec_of_either_kind(spec, grid_mesh):
    assert layouts(same, X, mesh=grid_mesh, in_specs={"x": spec})["x"] == P("dp")


def test_one_spec_holds_for_a_whole_tree(grid_mesh):
    found = layouts(same, {"a": X, "b": X}, mesh=grid_mesh, in_specs={"x": P("tp")})
    assert found["x/a"] == found["x/b"] == P("tp")


def test_a_tree_of_specs_may_leave_branches_open(grid_mesh):
    found = layouts(
        same,
        {"a": X, "b": {"c": X, "d": X}, "n": 3},
        mesh=grid_mesh,
        in_specs={"x": {"a": P("tp"), "b": P(None, "dp"), "n": None}},
    )
    assert found["x/a"] == P("tp")
    assert found["x/b/c"] == found["x/b/d"] == P(None, "dp")


def test_layouts_of_the_result_are_declared_likewise(grid_mesh):
    found = layouts(
        lambda x: {"a": x + 1, "text": "hi", "b": (x * 2, None)},
        X,
        mesh=grid_mesh,
        out_specs={"a": P("dp"), "text": None, "b": P("tp")},
    )
    assert found["result/a"] == P("dp")
    assert found["result/b/0"] == P("tp")


def test_a_declared_layout_is_what_runs(grid_mesh):
    step = ts.function(
        lambda x: x * 2.0,
        mesh=grid_mesh,
        in_specs={"x": P("dp", "tp")},
        out_specs=P(None, "tp"),
    )
    result = step(X)
    assert result.sharding.is_equivalent_to(
        NamedSharding(grid_mesh.jax, P(None, "tp")), 2
    )
    assert step.last.jax.input_shardings[0][0][0].spec == P("dp", "tp")


def test_an_array_keeps_the_layout_it_comes_with(grid_mesh):
    x = jax.device_put(X, NamedSharding(grid_mesh.jax, P("tp", "dp")))
    assert layouts(same, x) == {"x": P("tp", "dp"), "result": P("tp", "dp")}


# --- batches


@pytest.mark.parametrize(
    ("axes", "spec"),
    [
        (["dp"], P("dp")),
        (["tp", "dp"], P("dp")),
        (["fsdp", "dp"], P(("dp", "fsdp"))),
        (["tp"], P()),
    ],
)
def test_a_steps_batch_is_split_over_the_data_axes(axes, spec):
    mesh = Mesh(axes, devices=range(8))
    step = ts.graph.training_step(mesh=mesh)(lambda batch: batch["x"])
    graph = step.trace({"x": X, "scale": jnp.float32(1)}).graph
    assert {v.name: v.spec for v in graph.inputs} == {
        "batch/x": spec,
        "batch/scale": P(),
    }


def test_a_declared_layout_goes_before_the_rule_for_batches(grid_mesh):
    step = ts.graph.training_step(mesh=grid_mesh, in_specs={"table": P(None, "tp")})(
        lambda batch, table: batch + table
    )
    graph = step.trace(X, X).graph
    assert [v.spec for v in graph.inputs] == [P("dp"), P(None, "tp")]


def test_a_batch_that_the_data_axes_do_not_divide_is_refused(dp_mesh):
    step = ts.graph.training_step(mesh=dp_mesh)(lambda batch: batch["x"])
    with pytest.raises(ShardDivisibilityError) as caught:
        step({"x": jnp.ones((12, 4))})
    assert str(caught.value) == (
        "[T201] 'batch/x' cannot be split evenly over mesh axes ('dp',)\n"
        "  got: shape (12, 4), dim 0 = 12, axis size 8\n"
        "  fix: use 8 or 16, or drop 'dp' from the spec\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T201.html"
    )
    assert step.num_programs() == 0


# --- what cannot be


def test_a_layout_for_no_argument_is_refused_when_it_is_declared():
    with pytest.raises(SpecFormError) as caught:
        ts.function(lambda tokens, scale: tokens, in_specs={"token": P("dp")})
    assert str(caught.value) == (
        "[T204] '<lambda>' has no argument 'token' to lay out or donate\n"
        "  fix: did you mean 'tokens'? Known: 'tokens', 'scale'\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T204.html"
    )
    with pytest.raises(SpecFormError, match="no argument 'y' to be donated"):
        ts.function(same, donate=["y"])


def test_a_layout_for_free_positional_arguments_is_refused():
    with pytest.raises(SpecFormError, match="no argument 'rest' to lay out"):
        ts.function(lambda x, *rest: x, in_specs={"rest": P("dp")})


def test_a_layout_may_be_declared_for_an_argument_that_is_left_out(grid_mesh):
    def optional(x, mask=None):
        return x if mask is None else x * mask

    step = ts.function(optional, mesh=grid_mesh, in_specs={"mask": P("dp")})
    assert step(X).shape == X.shape
    assert step(X, X).shape == X.shape


def test_a_layout_may_be_declared_for_a_free_keyword(grid_mesh):
    step = ts.function(
        lambda **arrays: arrays["a"], mesh=grid_mesh, in_specs={"a": P("dp")}
    )
    assert step(a=X).sharding.spec == P("dp")


def test_a_tree_of_specs_that_does_not_fit_is_refused(grid_mesh):
    with pytest.raises(SpecFormError) as caught:
        layouts(same, {"v": X}, mesh=grid_mesh, in_specs={"x": {"u": P("dp")}})
    assert str(caught.value) == (
        "[T204] in_specs['x'] is not a spec, nor a tree of specs that fits the arrays\n"
        "  got: no spec for 'v'; no array at 'u'\n"
        "  fix: give one spec for all of them, or a tree with a spec or None for each "
        "branch\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T204.html"
    )
    with pytest.raises(SpecFormError, match="out_specs is not a spec, nor a tree"):
        layouts(same, X, mesh=grid_mesh, out_specs=(P(), P()))
    with pytest.raises(
        SpecFormError, match=r"specs .*\(\[\*\]\), arrays .*\(\(\*,\)\)"
    ):
        layouts(same, (X,), mesh=grid_mesh, in_specs={"x": [P()]})


def test_a_layout_that_does_not_divide_its_array_is_refused(grid_mesh):
    with pytest.raises(ShardDivisibilityError, match=r"'x/a' cannot be split evenly"):
        layouts(same, {"a": X[:, :3]}, mesh=grid_mesh, in_specs={"x": P(None, "tp")})
    with pytest.raises(ShardDivisibilityError, match="'result' cannot be split"):
        layouts(lambda x: x[:7], X, mesh=grid_mesh, out_specs=P("dp"))


def test_a_type_with_a_layout_that_does_not_divide_it_is_refused(dp_mesh):
    rows = NamedSharding(dp_mesh.jax, P("dp"))
    with pytest.raises(ShardDivisibilityError) as caught:
        ts.function(lambda x: x * 2).trace(
            jax.ShapeDtypeStruct((10, 3), "f4", sharding=rows)
        )
    assert str(caught.value) == (
        "[T201] 'x' has a layout that does not divide it\n"
        "  got: shape (10, 3), dim 0 = 10, axis size 8\n"
        "  fix: use 8 or 16, or drop 'dp' from the spec\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T201.html"
    )


def test_arrays_that_are_laid_out_otherwise_are_all_listed(grid_mesh):
    x = jax.device_put(X, NamedSharding(grid_mesh.jax, P("tp")))
    table = tensor((8, 4), ShardSpec((1,), ("dp",)), grid_mesh)
    step = ts.function(
        lambda x, y, z: (x, y, z),
        mesh=grid_mesh,
        in_specs={"x": P("dp"), "y": P(), "z": P("tp")},
    )
    with pytest.raises(LayoutMismatchError) as caught:
        step(x, table, x)
    assert str(caught.value) == (
        "[T205] '<lambda>' is given arrays that are not laid out as declared\n"
        "  got: x: declared P('dp',), given P('tp',)\n"
        "  got: y: declared P(), given P(None, 'dp')\n"
        "  fix: move them first: jax.device_put(x, NamedSharding(mesh.jax, P(...)))\n"
        "  fix: or leave them out of in_specs, and they keep their own layout\n"
        "  fix: or declare the layout of those that a call returns in out_specs\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T205.html"
    )


def test_layouts_over_axes_of_one_device_are_alike():
    mesh = Mesh(["dp", "tp"], devices=range(8), shape=(8, 1))
    x = jax.device_put(X, NamedSharding(mesh.jax, P("dp", "tp")))
    assert layouts(same, x, in_specs={"x": P("dp")})["x"] == P("dp")


def test_a_layout_needs_a_mesh():
    with pytest.raises(NoMeshError) as caught:
        ts.function(same, in_specs={"x": P("dp")})(X)
    assert str(caught.value) == (
        "[T106] 'same' has in_specs or out_specs, and no mesh\n"
        "  fix: pass mesh=, call it inside 'with mesh:', or give it arrays that live "
        "on a mesh\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T106.html"
    )
    with pytest.raises(NoMeshError, match="T106"):
        ts.function(same, out_specs=P("dp"))(X)


def test_a_layout_may_wait_for_the_mesh_of_a_captured_tensor(grid_mesh):
    table = tensor((8, 4), mesh=grid_mesh)
    found = layouts(lambda x: x + table, X, in_specs={"x": P("dp")})
    assert found["x"] == P("dp")
