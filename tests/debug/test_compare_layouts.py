# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F821 - dims are strings, which ruff takes for names
"""The first operation of a step that differs between meshes."""

import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera import dist, graph, op
from tessera.debug import compare_layouts
from tessera.debug.mesh_runs import MeshRun
from tessera.errors import AbstractMeshError, NoMeshError

DRAW = np.random.default_rng(0)
X, UP, DOWN = (
    jnp.asarray(DRAW.normal(size=shape).astype("f4"))
    for shape in [(4, 8), (8, 16), (16, 8)]
)


TP = dist.Mesh(["tp"], devices=range(4))
ONE = dist.Mesh(["tp"], devices=[5])


@pytest.fixture
def tp_mesh():
    return TP


def line_of(function, text):
    """``test_compare_layouts.py:12``: the line of a function with some text."""
    lines, start = inspect.getsourcelines(function)
    (index,) = [i for i, line in enumerate(lines) if text in line]
    return f"{Path(__file__).name}:{start + index}"


def tensor_parallel_mlp(reduce):
    """An MLP whose hidden units are split over tp, as one writes it by hand."""

    def blocks(x, up, down):
        hidden = jnp.tanh(x @ up)
        partial = hidden @ down  # a part of the sum on each device
        return jax.lax.psum(partial, "tp") if reduce else partial

    def mlp(x, up, down):
        return jax.shard_map(
            blocks,
            mesh=ts.mesh.current().jax,
            in_specs=(P(), P(None, "tp"), P("tp")),
            out_specs=P(),
            check_vma=False,  # with the check, JAX itself refuses the missing sum
        )(x, up, down)

    @ts.function(in_specs={"up": P(None, "tp"), "down": P("tp")})
    def step(x, up, down):
        with jax.named_scope("embed"):
            x = jnp.sin(x)
        with jax.named_scope("mlp"):
            y = mlp(x, up, down)
        loss = jnp.mean(jax.nn.log_softmax(y) ** 2)
        return loss, ts.grad(loss, (up, down))

    return step, blocks


@pytest.fixture(scope="module")
def forgotten():
    """The report of a step whose partial sums nothing adds up, and its body."""
    step, blocks = tensor_parallel_mlp(reduce=False)
    return ts.compare_layouts(step, (X, UP, DOWN), TP, ONE), blocks


@pytest.mark.full
def test_a_forgotten_sum_over_an_axis_is_named_with_its_line(forgotten):
    report, blocks = forgotten
    assert not report.agrees
    first = report.first
    assert (first.site.operation, first.site.path) == ("shard_map", "jvp(mlp)")
    line = line_of(blocks, "partial = hidden @ down")
    assert first.site.inside.startswith("dot_general at ")
    assert first.site.inside.endswith(line)
    expected = np.tanh(np.sin(X) @ UP) @ DOWN
    actual = np.tanh(np.sin(X) @ UP[:, :4]) @ DOWN[:4]
    np.testing.assert_allclose(first.error, np.abs(actual - expected).max(), rtol=1e-4)
    np.testing.assert_allclose(first.expected, expected[first.index], rtol=1e-4)
    np.testing.assert_allclose(first.value, actual[first.index], rtol=1e-4)
    assert line in report.as_text()


def test_the_report_begins_with_the_first_difference(forgotten):
    lines = forgotten[0].as_text().splitlines()
    assert lines[0] == "step step, compared with tp mesh, 1"
    assert lines[1] == "tp mesh, 4: the first difference"
    assert lines[2] == "  operation  shard_map: float32[4,8] in jvp(mlp)"


def test_the_body_of_a_strategy_is_one_operation(tp_mesh):
    @ts.distribute(strategy="tensor_parallel", mesh_axes=("tp",))
    def mlp(
        x: ts.Tensor["B", "D"],
        up: ts.Tensor["D", "F"],
        down: ts.Tensor["F", "D"],
    ):
        hidden = jnp.tanh(x @ up)
        wrong = jnp.sin(hidden @ down)
        return dist.all_reduce(wrong, axis="tp")

    first = ts.compare_layouts(mlp, (X, UP, DOWN), tp_mesh).first
    assert first.site.operation == "shard_map"
    assert first.site.inside.endswith(line_of(mlp.body, "dist.all_reduce"))


def test_wrong_out_specs_show_in_what_reads_the_result(tp_mesh):
    @ts.function(in_specs={"up": P(None, "tp")})
    def step(x, up):
        columns = jax.shard_map(
            lambda x, up: jnp.tanh(x @ up),
            mesh=ts.mesh.current().jax,
            in_specs=(P(), P(None, "tp")),
            out_specs=P("tp"),
            check_vma=False,
        )(x, up)
        return jnp.sin(columns).sum()

    first = ts.compare_layouts(step, (X, UP), tp_mesh).first
    assert (first.site.operation, first.shape) == ("sin", (16, 4))


def test_ordinary_rounding_is_no_difference(tp_mesh):
    step, _ = tensor_parallel_mlp(reduce=True)
    report = ts.compare_layouts(step, (X, UP, DOWN), tp_mesh)
    assert report.agrees
    assert report.first is None
    assert report.compared > 20
    assert "tp mesh, 4: no difference in " in report.as_text()


def test_no_rounding_is_allowed_with_a_tolerance_of_zero(tp_mesh):
    step, _ = tensor_parallel_mlp(reduce=True)
    report = ts.compare_layouts(step, (X, UP, DOWN), tp_mesh, rtol=0, atol=0)
    assert not report.agrees
    assert report.first.error < 1e-5


def test_a_comparison_leaves_arguments_and_the_step_unchanged(tp_mesh):
    @ts.function(donate=("w",), in_specs={"w": P("tp")})
    def update(w):
        return w - 0.5 * jnp.cos(w)

    w = jax.device_put(UP, NamedSharding(tp_mesh.jax, P("tp")))
    assert ts.compare_layouts(update, w, tp_mesh).agrees
    assert not w.is_deleted()
    assert update.num_programs() == 0


def test_arguments_keep_their_layout_as_far_as_a_mesh_has_its_axes(grid_mesh):
    seen = []

    @ts.function
    def step(x):
        seen.append(dist.inspect(x).leaves[0].spec)
        return jnp.sum(jnp.exp(x))

    x = jax.device_put(X, NamedSharding(grid_mesh.jax, P("dp", "tp")))
    assert ts.compare_layouts(step, x, dist.Mesh(["tp"], range(2)), grid_mesh).agrees
    assert set(seen) == {P("dp", "tp"), P(None, "tp")}


# --- steps with parameters, loops and dtypes


@graph.training_step
def with_parameters(x):
    loss = jnp.sum(op.matmul(x, dist.tensor((8, 2), init="normal", name="w")) ** 2)
    return loss, graph.backward(loss)


def test_parameters_that_were_never_initialized_are_the_same_on_every_mesh(dp_mesh):
    assert ts.compare_layouts(with_parameters, jnp.ones((8, 8)), dp_mesh).agrees


@pytest.mark.full
def test_a_block_with_many_parameters_is_the_same_on_every_mesh(grid_mesh):
    @graph.training_step
    def step(x):
        loss = jnp.mean(op.transformer_block(x, depth=1, num_heads=4) ** 2)
        return loss, graph.backward(loss)

    x = jnp.asarray(DRAW.normal(size=(4, 2, 8)).astype("f4"))
    step.init(jax.random.key(7), x)
    assert ts.compare_layouts(step, x, grid_mesh).agrees


def test_a_training_step_is_compared_with_the_values_of_its_parameters(dp_mesh):
    x = jnp.ones((8, 8))
    with_parameters.init(jax.random.key(7), x)
    weights = with_parameters.params["w"]
    for mesh in (dist.Mesh(["dp"], devices=[0]), dp_mesh):
        run = MeshRun.on(mesh, with_parameters, (x,))
        (number,) = [i for i, site in enumerate(run.sites) if site.path == "w"]
        np.testing.assert_array_equal(run.values([number])[0], weights)
    assert ts.compare_layouts(with_parameters, x, dp_mesh).agrees
    assert with_parameters.params["w"] is weights


def test_a_function_may_make_the_step_for_each_mesh(tp_mesh):
    def make(mesh):
        layout = dist.ShardSpec(("row",), ("tp",))
        size = 2.0 if mesh.size > 1 else 1.0  # the mistake
        table = dist.tensor((8, 8), layout, mesh, init="normal", name="table")

        @ts.function
        def step(x):
            h = jnp.tanh(op.matmul(x, table))
            return jnp.sum(h * size)

        return step

    first = ts.compare_layouts(make, X, tp_mesh).first
    assert first.site.operation == "mul"
    assert first.site.source.endswith(line_of(make, "h * size"))


def test_in_a_loop_the_first_iteration_that_differs_is_named(tp_mesh):
    @ts.function
    def step(x):
        wrong = 1 if ts.mesh.current().size > 1 else 5

        def layer(x, number):
            h = jnp.sin(x)  # it differs too, an iteration later
            h = h + jnp.float32(0.5) * jnp.float32(number == wrong)
            return jnp.tanh(h), None

        with jax.named_scope("layers"):
            x, _ = jax.lax.scan(layer, x, jnp.arange(3))
        return x

    first = ts.compare_layouts(step, X, tp_mesh).first
    assert (first.site.operation, first.iterations) == ("eq", (1,))
    assert "layers" in first.site.path


def test_the_operation_that_differs_in_an_earlier_iteration_comes_first(tp_mesh):
    @ts.function
    def step(x):
        size = 1.0 if ts.mesh.current().size > 1 else 0.0

        def layer(h, _):
            h = jnp.sin(h)  # from the second iteration on
            return jnp.float32(size) + h, None

        return jax.lax.scan(layer, x, None, length=3)[0]

    first = ts.compare_layouts(step, X, tp_mesh).first
    assert (first.site.operation, first.iterations) == ("add", (0,))


def test_in_a_reversed_loop_the_last_index_comes_first(tp_mesh):
    @ts.function
    def step(x):
        size = 1.0 if ts.mesh.current().size > 1 else 0.0

        def layer(carry, item):
            return carry + jnp.float32(size), jnp.exp(carry * 0.1 + item)

        _, y = jax.lax.scan(layer, x.sum() * 0, jnp.arange(3.0), reverse=True)
        return y

    first = ts.compare_layouts(step, X, tp_mesh).first
    assert (first.site.operation, first.iterations) == ("add", (2,))


def test_values_computed_in_bf16_may_differ_by_half_of_its_digits(tp_mesh):
    @ts.function(in_specs={"up": P(None, "tp"), "down": P("tp")})
    def step(x, up, down):
        with ts.autocast(dtype="bf16"):
            y = jnp.tanh(x @ up) @ down
        loss = jnp.sum(y**2)
        return loss, ts.grad(loss, (up, down))

    report = ts.compare_layouts(step, (X, UP, DOWN), tp_mesh)
    assert report.agrees


def test_a_nan_on_one_mesh_is_a_difference_and_on_both_is_none(tp_mesh):
    def make(bad):
        @ts.function
        def step(x):
            scale = jnp.nan if bad(ts.mesh.current().size) else 1.0
            return x * scale

        return step

    assert ts.compare_layouts(make(lambda size: True), X, tp_mesh).agrees
    first = ts.compare_layouts(make(lambda size: size > 1), X, tp_mesh).first
    assert first.error == np.inf
    assert np.isnan(first.value)


@pytest.mark.slow(reason="it compiles several programs")
def test_values_are_fetched_in_chunks(tp_mesh, monkeypatch):
    monkeypatch.setattr(compare_layouts, "MAX_BYTES", 600)
    fetched = []
    values = MeshRun.values

    def recorded(run, numbers):
        fetched.append(sum(run.sites[number].nbytes for number in numbers))
        return values(run, numbers)

    monkeypatch.setattr(MeshRun, "values", recorded)
    step, _ = tensor_parallel_mlp(reduce=False)
    report = ts.compare_layouts(step, (X, UP, DOWN), tp_mesh)
    assert len(fetched) > 4
    assert max(fetched) <= 600 + UP.nbytes
    assert report.first.site.operation == "shard_map"


def test_random_keys_may_be_arguments(dp_mesh):
    @ts.function(in_specs={"x": P("dp")})
    def step(x, key):
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        return jnp.where(keep, x * 2, 0.0)

    x = jnp.ones((8, 4))
    assert ts.compare_layouts(step, (x, jax.random.key(3)), dp_mesh).agrees


def test_what_is_no_mesh_is_refused(tp_mesh):
    step, _ = tensor_parallel_mlp(reduce=True)
    for mesh in (None, [tp_mesh], [None, tp_mesh]):
        with pytest.raises(NoMeshError, match="given as a mesh is none"):
            ts.compare_layouts(step, (X, UP, DOWN), mesh)


def test_a_mesh_of_missing_devices_is_refused(large_mesh):
    with pytest.raises(AbstractMeshError, match="T105"):
        ts.compare_layouts(ts.function(jnp.sin), X, large_mesh)
