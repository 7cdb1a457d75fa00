# SPDX-License-Identifier: Apache-2.0
"""Stages and training steps: functions that own parameters, on one device or many."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera import graph, op
from tessera.errors import (
    AbstractMeshError,
    NoMeshError,
    ParameterTreeError,
    ShardDivisibilityError,
    SpecFormError,
)
from tessera.graph.tracer import tracer
from tessera.mesh import Mesh
from tessera.shard import ShardSpec, tensor
from tessera.tracing import scope

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (8, 8))
BATCH = {"input": X, "labels": jnp.arange(8)}


def mlp(x):
    """Two matmuls with parameters split over fsdp and tp, where the mesh has them."""
    mesh = scope.current().mesh
    axes = () if mesh is None else mesh.axes

    def split(*names):
        found = {dim: axis for dim, axis in enumerate(names) if axis in axes}
        return ShardSpec(tuple(found), tuple(found.values()))

    with scope.named("mlp"):
        up = scope.parameter("up", (8, 16), init="normal", layout=split("fsdp", "tp"))
        down = scope.parameter(
            "down", (16, 8), init="normal", layout=split("tp", "fsdp")
        )
        bias = scope.parameter("bias", (8,), init="zeros")
    return jnp.tanh(x @ up) @ down + bias


def make_step(**options):
    """A step of a small model, its loss and its gradients."""

    @graph.training_step(module="Small", **options)
    def step(batch):
        loss = op.cross_entropy(mlp(batch["input"]), batch["labels"])
        return graph.backward(loss), {"loss": loss}

    return step


def table_step(**options):
    """A step of one parameter, ``table``, split over tp where there is one."""

    @graph.training_step(**options)
    def step(x):
        mesh = scope.current().mesh
        split = mesh is not None and "tp" in mesh.axes
        layout = ShardSpec((0,), ("tp",)) if split else None
        table = scope.parameter("table", (8, 2), init="normal", layout=layout)
        return graph.backward(jnp.sum((x @ table) ** 2))

    return step


ROWS = jnp.linspace(-1.0, 1.0, 64, dtype=jnp.float32).reshape(8, 8)


def assert_close(found, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6),
        found,
        expected,
    )


MESHES = [
    ((8,), ("dp",)),
    ((2, 4), ("dp", "tp")),
    ((4, 2), ("fsdp", "tp")),
    ((2, 2, 2), ("dp", "fsdp", "tp")),
    ((1, 4), ("dp", "tp")),
]


def mesh_of(sizes, axes):
    count = int(np.prod(sizes))
    return Mesh(axes, devices=range(count), shape=sizes)


# --- one step on every mesh


def filled(step):
    """A step with parameters that cost no compilation: small and all different."""
    step.trace(BATCH)
    generator = np.random.default_rng(0)
    step.params = jax.tree.map(
        lambda p: generator.normal(size=p.shape, scale=0.3).astype("f4"), step.params
    )
    return step


@pytest.fixture(scope="module")
def on_one_device():
    return jax.device_get(filled(make_step())(BATCH))


@pytest.mark.parametrize(("sizes", "axes"), MESHES, ids=str)
def test_the_numbers_are_the_same_on_every_mesh(sizes, axes, on_one_device):
    step = filled(make_step(mesh=mesh_of(sizes, axes)))
    assert_close(step(BATCH), on_one_device)


@pytest.mark.parametrize(("sizes", "axes"), MESHES[:2], ids=str)
def test_initial_values_are_the_same_on_every_mesh(sizes, axes):
    step, alone = table_step(mesh=mesh_of(sizes, axes)), table_step()
    np.testing.assert_array_equal(
        step.init(KEY, ROWS)["table"], alone.init(KEY, ROWS)["table"]
    )


def test_parameters_and_gradients_are_laid_out_as_declared():
    mesh = mesh_of((2, 4), ("fsdp", "tp"))
    step = filled(make_step(mesh=mesh))
    gradients, _ = step(BATCH)
    expected = {"up": P("fsdp", "tp"), "down": P("tp", "fsdp"), "bias": P()}
    for tree in (step.params, gradients):
        specs = {name: array.sharding.spec for name, array in tree["mlp"].items()}
        assert specs == expected


def test_a_few_steps_of_descent_lower_the_loss():
    step = filled(make_step(mesh=mesh_of((2, 4), ("dp", "tp"))))
    losses = []
    for _ in range(5):
        gradients, metrics = step(BATCH)
        step.params = jax.tree.map(lambda p, g: p - 0.1 * g, step.params, gradients)
        losses.append(float(metrics["loss"]))
    assert losses == sorted(losses, reverse=True)
    assert step.num_programs() == 1


def test_the_step_is_called_by_its_module_name():
    step = make_step()
    assert step.trace(BATCH).as_text().startswith("step Small on one device")
    plain = graph.training_step(lambda x: x)
    assert plain.options.name == "<lambda>"


# --- parameters


def test_parameters_are_not_known_before_the_step_was_traced():
    step = table_step()
    text = (
        "[T306] the parameters of step 'step' are not known yet\n"
        "  fix: give init an example: step.init(key, batch)\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T306.html"
    )
    with pytest.raises(ParameterTreeError) as caught:
        step.params  # noqa: B018 - raises
    assert str(caught.value) == text
    with pytest.raises(ParameterTreeError) as caught:
        step.init(KEY)
    assert str(caught.value) == text
    with pytest.raises(ParameterTreeError, match="not known yet"):
        step.params = {}


def test_a_step_is_traced_once_to_find_its_parameters_and_once_with_them(monkeypatch):
    inputs, run = [], tracer._Tracing._run

    def recorded(tracing, values, here):
        inputs.append([value.name for value in values])
        return run(tracing, values, here)

    monkeypatch.setattr(tracer._Tracing, "_run", recorded)

    @graph.training_step
    def step(x):
        loss = jnp.sum(x * scope.parameter("scale", (3,), init="ones"))
        return graph.backward(loss)

    step.trace(jnp.ones((2, 3)))
    assert inputs == [["x"], ["x", "scale"]]


def test_parameters_are_lazy_once_the_step_was_traced():
    step = table_step()
    step.trace(ROWS)
    assert "lazy" in repr(step.params["table"])
    assert step.params["table"].shape == (8, 2)


def test_an_example_may_be_a_shape():
    step = table_step()
    params = step.init(KEY, jax.ShapeDtypeStruct((8, 8), jnp.float32))
    assert isinstance(params["table"], jax.Array)


def test_a_step_without_parameters_has_an_empty_tree():
    step = graph.training_step(lambda x: x * 2.0)
    assert step.init(KEY, X) == {}
    assert step.init(KEY) == {}


def test_initial_values_depend_on_the_key_and_the_name():
    step = table_step()
    first = step.init(jax.random.key(1), ROWS)["table"]
    again = step.init(jax.random.key(1))["table"]
    other = step.init(jax.random.key(2))["table"]
    np.testing.assert_array_equal(first, again)
    assert not jnp.array_equal(first, other)


def test_a_step_that_is_not_initialized_creates_its_parameters(caplog):
    step = table_step()
    with caplog.at_level(logging.INFO, logger="tessera.graph"):
        first = step(ROWS)
        second = step(ROWS)
    assert [record.getMessage() for record in caplog.records] == [
        "step step creates 1 parameters from their names; step.init(key) chooses"
    ]
    np.testing.assert_array_equal(first["table"], second["table"])
    assert isinstance(step.params["table"], jax.Array)


def test_assigned_parameters_are_used_in_the_next_call():
    step = table_step()
    step.init(KEY, ROWS)
    for value in (jnp.ones((8, 2)), np.full((8, 2), 2.0, np.float32)):
        step.params = {"table": value}
        expected = jax.grad(lambda t: jnp.sum((ROWS @ t) ** 2))(jnp.asarray(value))
        np.testing.assert_allclose(step(ROWS)["table"], expected, rtol=1e-5)
    assert step.num_programs() == 1


def test_assigned_parameters_are_moved_to_their_layout(grid_mesh):
    step = table_step(mesh=grid_mesh)
    step.init(KEY, ROWS)
    layout = NamedSharding(grid_mesh.jax, P("tp"))
    for place in (jax.devices()[3], NamedSharding(grid_mesh.jax, P(None, "dp"))):
        step.params = {"table": jax.device_put(jnp.ones((8, 2)), place)}
        step(ROWS)
        assert step.params["table"].sharding == layout
    assert step.num_programs() == 1


def test_the_tree_that_was_read_may_be_assigned_back():
    step = table_step()
    step.trace(ROWS)
    step.params = step.params  # still lazy
    assert step(ROWS)["table"].shape == (8, 2)


def test_a_wrong_tree_is_refused_with_every_difference():
    step = filled(make_step())
    before = step.params
    wrong = {"mlp": {"bias": 1.0, "extra": jnp.ones(2)}}
    wrong["mlp"]["down"] = before["mlp"]["down"].astype(jnp.bfloat16)
    with pytest.raises(ParameterTreeError) as caught:
        step.params = wrong
    assert str(caught.value) == (
        "[T306] these are not the parameters of step 'Small'\n"
        "  got: mlp/up: missing\n"
        "  got: mlp/extra: not a parameter\n"
        "  got: mlp/bias: float, declared float32[8]\n"
        "  got: mlp/down: bfloat16[16, 8], declared float32[16, 8]\n"
        "  fix: assign a tree like step.params\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T306.html"
    )
    assert step.params["mlp"]["up"] is before["mlp"]["up"]


def test_a_step_keeps_its_parameters_when_its_batch_changes_shape():
    step = table_step()
    step.init(KEY, ROWS)
    table = step.params["table"]
    step(ROWS)
    step(ROWS[:4])
    assert step.params["table"] is table
    assert step.num_programs() == 2


def test_a_parameter_cannot_change_its_shape():
    @graph.training_step
    def step(x):
        return x @ scope.parameter("w", (x.shape[-1], 2), init="ones")

    step(ROWS)
    with pytest.raises(ParameterTreeError) as caught:
        step(ROWS[:, :4])
    assert str(caught.value) == (
        "[T306] parameter 'w' has another shape than in earlier calls\n"
        "  got: float32[4, 2], before float32[8, 2]\n"
        "  fix: call the step with arrays of the feature sizes it was first called "
        "with\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T306.html"
    )
    step(ROWS)


def test_a_step_takes_its_parameters_along_to_a_mesh_and_back(grid_mesh):
    step = table_step()
    step.init(KEY, ROWS)
    alone = step(ROWS)["table"]
    other_mesh = mesh_of((8,), ("tp",))
    for mesh in (grid_mesh, other_mesh, grid_mesh):
        with mesh:
            np.testing.assert_allclose(step(ROWS)["table"], alone, rtol=1e-5)
        assert step.params["table"].sharding == NamedSharding(mesh.jax, P("tp"))
    assert step.num_programs() == 3


def test_two_steps_have_parameters_of_their_own():
    first, second = table_step(), table_step()
    first.init(jax.random.key(1), ROWS)
    second.init(jax.random.key(2), ROWS)
    assert not jnp.array_equal(first.params["table"], second.params["table"])


# --- captured tensors as parameters


def test_a_captured_tensor_is_a_parameter_of_the_step(grid_mesh):
    table = tensor(
        (8, 2), ShardSpec(("row",), ("tp",)), grid_mesh, init="ones", name="table"
    )
    step = graph.training_step(lambda x: graph.backward(jnp.sum((x @ table) ** 2)))
    found = step(ROWS)["table"]
    assert found.sharding.spec == P("tp")
    expected = jax.grad(lambda t: jnp.sum((ROWS @ t) ** 2))(jnp.ones((8, 2)))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert list(step.params) == ["table"]


def test_a_captured_tensor_may_be_assigned(grid_mesh):
    table = tensor((8, 2), mesh=grid_mesh, init="ones", name="table")
    step = graph.training_step(lambda x: x @ table)
    step(ROWS)
    step.params = {"table": jnp.zeros((8, 2))}
    assert not step(ROWS).any()


# --- batches


def test_a_batch_that_does_not_divide_is_refused_before_anything_compiles(dp_mesh):
    step = make_step(mesh=dp_mesh)
    with pytest.raises(ShardDivisibilityError, match="'batch/input' cannot be split"):
        step({"input": X[:6], "labels": BATCH["labels"][:6]})
    assert step.num_programs() == 0


def test_numpy_batches_are_split_over_the_data_axes(grid_mesh):
    step = table_step(mesh=grid_mesh)
    step(np.asarray(ROWS))
    assert step.last.jax.input_shardings[0][0][0].spec == P("dp")


def test_data_parallel_steps_only_sum_gradients_and_losses(dp_mesh):
    step = make_step(mesh=dp_mesh)
    rows = step.compile(BATCH).collectives.rows
    assert {(row.kind, row.axes) for row in rows} == {("all-reduce", ("dp",))}


def test_options_hold_for_a_function_that_is_passed_with_them(dp_mesh):
    step = graph.training_step(
        lambda x: x * 2.0,
        mesh=dp_mesh,
        in_specs={"x": P(None, "dp")},
        out_specs=P("dp"),
        skip_passes=["orient_matmuls"],
    )
    traced = step.trace(jnp.ones((8, 8))).graph
    assert traced.inputs[0].spec == P(None, "dp")
    assert traced.outputs[0].spec == P("dp")
    assert step.skip_passes == ("orient_matmuls",)


def test_a_declared_layout_of_a_step_needs_a_mesh():
    step = graph.training_step(in_specs={"x": P("dp")})(lambda x: x)
    with pytest.raises(NoMeshError, match="T106"):
        step(ROWS)


# --- a mesh of other machines


def test_a_step_can_be_planned_for_a_mesh_of_other_machines():
    mesh = mesh_of((9, 8), ("dp", "tp"))
    step = make_step(mesh=mesh)
    batch = {
        "input": jax.ShapeDtypeStruct((18, 8), jnp.float32),
        "labels": jax.ShapeDtypeStruct((18,), jnp.int32),
    }
    compiled = step.compile(batch)
    kinds = {(row.kind, row.axes) for row in compiled.collectives.rows}
    assert {("all-reduce", ("tp",)), ("all-reduce", ("dp",))} <= kinds
    assert "lazy" in repr(step.params["mlp"]["up"])
    with pytest.raises(AbstractMeshError, match="T105"):
        step.init(KEY)
    with pytest.raises(AbstractMeshError, match="T105"):
        step({"input": jnp.ones((18, 8)), "labels": jnp.zeros(18, jnp.int32)})


# --- mixed precision


def test_a_step_under_autocast_has_f32_parameters_and_gradients():
    def step(batch):
        loss = op.cross_entropy(mlp(batch["input"]), batch["labels"])
        return graph.backward(loss), loss

    def cast_step(batch):
        with ts.autocast("bf16"):
            return step(batch)

    wide = filled(graph.training_step(step))(BATCH)
    narrow = filled(graph.training_step(cast_step))(BATCH)
    assert {a.dtype for a in jax.tree.leaves(narrow)} == {jnp.dtype("f4")}
    errors = jax.tree.map(
        lambda a, b: float(jnp.abs(a - b).max() / jnp.abs(b).max()), narrow, wide
    )
    assert 0 < max(jax.tree.leaves(errors)) < 0.1


def test_options_hold_where_the_step_is_given_at_once(dp_mesh):
    def total(x, table):
        return jnp.sum(x) + jnp.sum(table)

    for step in (
        graph.training_step(total, mesh=dp_mesh, batch="x"),
        graph.training_step(mesh=dp_mesh, batch="x")(total),
        graph.training_step(total, mesh=dp_mesh, in_specs=(P("dp"), P())),
    ):
        inputs = step.trace(X, X).graph.inputs
        assert [value.spec for value in inputs] == [P("dp"), P()]
    with pytest.raises(SpecFormError, match="not one layout for each argument"):
        graph.training_step(total, mesh=dp_mesh, in_specs=(P("dp"),))
