# SPDX-License-Identifier: Apache-2.0
"""``numerics="deterministic"``: every device computes all of a function.

That the bits are those of one device on every mesh, ``tests/fuzz`` shows for drawn
functions and layouts.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera import dist, graph
from tessera.errors import SettingConflictError, SettingValueError
from tessera.mesh import Mesh
from tessera.ops.collectives import all_reduce

ROWS = np.linspace(-2, 3, 32, dtype=np.float32).reshape(8, 4)


def deterministic(body, **options):
    return ts.function(body, numerics="deterministic", **options)


def softmax_slope(x):
    return jax.grad(lambda x: jnp.sum(jax.nn.softmax(x, axis=0) ** 2))(x)


@pytest.fixture
def mesh():
    return Mesh(["dp"], devices=range(4))


def test_layouts_split_what_is_stored_and_no_computation(mesh):
    step = deterministic(
        lambda x: x.T @ x, mesh=mesh, in_specs={"x": P("dp")}, out_specs=P(None, "dp")
    )
    product = step(ROWS)
    np.testing.assert_array_equal(product, deterministic(lambda x: x.T @ x)(ROWS))
    assert product.sharding.spec == P(None, "dp")
    text = step.last.as_text()
    assert "f32[8,4]" in text  # gathered
    assert "all-reduce" not in text


def test_a_result_without_a_layout_is_whole_on_every_device(mesh):
    result = deterministic(softmax_slope, mesh=mesh, in_specs={"x": P("dp")})(ROWS)
    assert result.sharding.is_fully_replicated


def test_what_is_closed_over_and_updated_in_place_takes_part(mesh):
    table = dist.tensor((8, 4), dist.ShardSpec((0,), ("dp",)), mesh, init="normal")

    def step(state):
        state["x"] = softmax_slope(state["x"] * table)

    laid_out, alone = {"x": jnp.asarray(ROWS)}, {"x": jnp.asarray(ROWS)}
    deterministic(step, mesh=mesh, in_specs={"state": P("dp")})(laid_out)
    table = np.asarray(table)
    deterministic(step)(alone)
    np.testing.assert_array_equal(laid_out["x"], alone["x"])


@pytest.mark.parametrize(
    "first",
    [
        jax.random.key(3),
        np.array([True]),
        np.array([1 + 2j], np.complex64),
        np.zeros((0, 4), np.float32),
        np.array([200], np.uint8),
        jnp.ones(2, jnp.bfloat16),
    ],
    ids=["key", "bool", "complex", "empty", "unsigned", "bf16"],
)
def test_the_first_array_may_be_of_any_type(first, mesh):
    def step(first, x):
        return first, softmax_slope(x)

    options = {"mesh": mesh, "in_specs": {"x": P("dp")}}
    same, slope = deterministic(step, **options)(first, ROWS)
    assert same.dtype == first.dtype
    np.testing.assert_array_equal(slope, deterministic(step)(first, ROWS)[1])


def test_the_text_of_a_program_says_so(mesh):
    step = deterministic(softmax_slope, mesh=mesh, in_specs={"x": P("dp")})
    assert "numerics: deterministic" in step.trace(ROWS).as_text()
    assert "+" in step.trace(ROWS).diff("compute_whole")


def test_a_function_without_an_array_is_refused():
    with pytest.raises(SettingConflictError, match="has an array to compute from"):
        deterministic(lambda: jnp.arange(3.0))()


def test_a_function_that_divides_its_computation_is_refused(mesh):
    def by_blocks(x):
        spread = jax.shard_map(
            lambda x: all_reduce(x, "dp"),
            mesh=mesh.jax,
            in_specs=P("dp"),
            out_specs=P(),
        )
        return spread(x)

    with pytest.raises(SettingConflictError, match="divide nothing") as caught:
        deterministic(by_blocks, mesh=mesh)(ROWS)
    assert "shard_map at" in str(caught.value)
    assert "test_compute_whole.py" in str(caught.value)


def test_a_constraint_inside_is_refused(mesh):
    sharding = jax.sharding.NamedSharding(mesh.jax, P("dp"))

    def constrained(x):
        return jax.lax.with_sharding_constraint(x * 2, sharding)

    with pytest.raises(SettingConflictError, match="sharding_constraint at"):
        deterministic(constrained, mesh=mesh)(ROWS)


@pytest.mark.parametrize("own", [Mesh(["pp"], devices=range(2)), None])
def test_a_pipeline_inside_is_refused(own):
    stages = [graph.stage(name)(lambda x: x * 2) for name in ("first", "second")]

    @graph.pipeline(stages, mesh=own)
    def doubled_twice(x):
        return stages[1](stages[0](x))

    outer = deterministic(
        lambda x: doubled_twice(x), mesh=Mesh(["pp"], devices=range(2))
    )
    with pytest.raises(SettingConflictError, match="pipeline 'doubled_twice'"):
        outer(ROWS)


@pytest.mark.parametrize(
    ("outer", "where"),
    [
        (ts.function, "a function with fast numerics"),
        (jax.jit, "a program that JAX compiles"),
        (jax.grad, "a program that JAX compiles"),
    ],
)
def test_inside_a_program_that_rounds_otherwise_it_is_refused(outer, where):
    inner = deterministic(lambda x: jnp.sum(softmax_slope(x)))
    with pytest.raises(SettingConflictError, match=f"called inside {where}"):
        outer(lambda x: inner(x))(ROWS)


@pytest.mark.full
def test_inside_another_deterministic_function_it_is_part_of_that():
    inner = deterministic(softmax_slope)
    outer = deterministic(lambda x: inner(x))
    np.testing.assert_array_equal(outer(ROWS), inner(ROWS))
    with jax.disable_jit():
        np.testing.assert_allclose(outer(ROWS), inner(ROWS), rtol=1e-5)


def test_other_options_do_not_make_it_fast(mesh):
    inner = deterministic(softmax_slope)
    layouts = {"in_specs": {"x": P("dp")}, "out_specs": P("dp")}
    laid_out = ts.function(inner, mesh=mesh, **layouts)
    np.testing.assert_array_equal(laid_out(ROWS), inner(ROWS))
    data_parallel = ts.distribute("data_parallel", batch="x")(inner)
    with mesh:
        np.testing.assert_array_equal(data_parallel(ROWS), inner(ROWS))


def test_other_numerics_are_refused():
    with pytest.raises(SettingValueError, match="fast or deterministic"):
        ts.function(softmax_slope, numerics="exact")


def test_the_pass_cannot_be_skipped():
    with pytest.raises(SettingConflictError, match="without the pass"):
        deterministic(softmax_slope, skip_passes=["compute_whole"])
