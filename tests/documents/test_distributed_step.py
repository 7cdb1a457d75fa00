# SPDX-License-Identifier: Apache-2.0
"""The building blocks of the guide ``distributed-step.md`` run as written."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera import dist, graph, op
from tessera.errors import UnknownAxisError
from tests.documents import guide_pages

PAGE = "distributed-step.md"


def run(heading, namespace):
    """Execute the blocks of a section of the page."""
    guide_pages.run(PAGE, heading, namespace)


@pytest.fixture
def names():
    """What the reader has after the first section."""
    namespace = {"op": op, "graph": graph}
    run("Define a mesh", namespace)
    return namespace


def test_it_defines_a_mesh(names):
    mesh = names["mesh"]
    assert names["ts"] is ts
    assert mesh.topology == "tp × dp mesh, 2 × 4"
    assert mesh.device_ids == tuple(range(8))


def test_it_declares_a_table_that_nobody_allocates(names):
    run("Shard a tensor", names)
    table = names["E"]
    assert (table.shape, table.dtype) == ((10_000_000, 4096), jnp.bfloat16)
    assert table.spec == P("tp")
    assert table.local_shape == (5_000_000, 4096)
    assert table.nbytes == 81_920_000_000
    rows = ts.function(lambda i: table[i]).trace(jnp.zeros(3, jnp.int32))
    assert [v.spec for v in rows.graph.inputs] == [P(), P("tp")]
    assert "lazy" in repr(table)
    assert all(array.nbytes < 10**9 for array in jax.live_arrays())


def test_it_sums_over_the_data_axis(names):
    run("Call a collective", names)
    x = np.linspace(-1.0, 1.0, 8 * 3, dtype=np.float32).reshape(8, 3)
    placed = jax.device_put(x, NamedSharding(names["mesh"].jax, P("dp")))
    blocks = x.reshape(4, 2, 3)
    expected = sum(block @ block.T for block in blocks)
    np.testing.assert_allclose(names["dp_step"](placed), expected, rtol=1e-6)


def model_on(mesh):
    """A model of one captured weight, split over tp; and the same in plain JAX."""
    weight = dist.tensor(
        shape=(16, 6),
        layout=dist.ShardSpec(partition=("row",), mesh_axes=("tp",)),
        mesh=mesh,
        init="normal",
        name="weight",
    )

    def model(x):
        return jnp.tanh(op.matmul(x, weight))

    return model, weight


BATCH = {
    "input": jax.random.normal(jax.random.key(0), (8, 16)),
    "labels": jnp.arange(8) % 6,
}


def plain_loss(weight, batch):
    logits = jnp.tanh(batch["input"] @ weight)
    log_p = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_p, batch["labels"][:, None], 1).mean()


SHAPES = {
    "input": jax.ShapeDtypeStruct((8, 4, 8), jnp.float32),
    "labels": jax.ShapeDtypeStruct((8, 4), jnp.int32),
}


def test_it_names_the_axis_that_the_mesh_of_the_chapter_lacks(names):
    with pytest.raises(UnknownAxisError, match="the mesh has no axis 'pp'"):
        run("Build a pipeline", names)


@pytest.mark.full
def test_it_runs_the_stages_on_different_devices(names):
    names["mesh"] = dist.Mesh(["pp", "dp"], devices=range(8), shape=(2, 4))
    run("Build a pipeline", names)
    run("Write the training step", names)
    compiled = names["step"].compile(SHAPES)
    assert sorted(names["step"].params) == ["decoder", "encoder"]
    sent = {(row.kind, row.axes) for row in compiled.collectives.rows}
    assert ("collective-permute", ("pp",)) in sent
    for leaf in jax.tree.leaves(names["step"].params):
        assert "pp" in leaf.spec, "stored in parts over the stages"


@pytest.mark.slow(reason="it compiles several programs")
def test_it_trains_like_one_device(names):
    names["model"], weight = model_on(names["mesh"])
    run("Write the training step", names)
    step = names["step"]
    value = jnp.asarray(np.asarray(weight))
    for _ in range(3):
        grads, metrics = step(BATCH)
        loss, slope = jax.value_and_grad(plain_loss)(value, BATCH)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
        np.testing.assert_allclose(grads["weight"], slope, rtol=1e-4, atol=1e-6)
        assert grads["weight"].sharding.spec == P("tp")
        step.params = jax.tree.map(lambda p, g: p - 0.5 * g, step.params, grads)
        value = value - 0.5 * slope
    assert step.trace(BATCH).as_text().startswith("step DistTransformer on tp × dp")
    assert step.num_programs() == 1


@pytest.mark.full
def test_it_trains_a_transformer_too(names):
    def model(x):
        return op.transformer_block(x, depth=2, num_heads=4)

    names["model"] = model
    with names["mesh"]:
        run("Write the training step", names)
        compiled = names["step"].compile(SHAPES)
    axes = {row.axes for row in compiled.collectives.rows}
    assert axes >= {("tp",), ("dp",)}


def test_it_traces_the_pipeline_with_the_batch_of_the_step(names):
    names["mesh"] = dist.Mesh(["pp", "dp"], devices=range(8), shape=(2, 4))
    run("Build a pipeline", names)
    run("Write the training step", names)
    (call,) = re.findall(
        r"`(graph\.trace\([^`]*\))`", guide_pages.section(PAGE, "Inspect it")
    )
    explanation = eval(call, names | {"batch": SHAPES})
    text = explanation.traced.as_text()
    assert "encoder/block" in text
    assert "float32[8,4,8] over P('dp',)" in text
    assert explanation.field == "input"


def test_it_shows_what_runs(names):
    run("Shard a tensor", names)
    names["model"], _ = model_on(names["mesh"])
    run("Write the training step", names)
    names["step"](BATCH)
    names |= {"batch": BATCH, "tensor": names["E"]}
    calls = re.findall(r"`([a-z.]+\([^`]*\))`", guide_pages.section(PAGE, "Inspect it"))
    assert len(calls) == 3
    shown = [eval(call, names) for call in calls]

    inspection, _, profile = map(str, shown)
    explanation = shown[1]
    assert "10000000" in inspection.replace(",", "").replace("_", "")
    assert "lazy" in repr(names["E"])
    phases = re.findall(r"^(trace|lower|compile) ", str(explanation), re.MULTILINE)
    assert phases == ["trace", "lower", "compile"]
    traced = explanation.traced.as_text()
    assert "weight: float32[16,6] over P('tp',) (parameter)" in traced
    assert "all-reduce" in str(explanation)
    assert "all-reduce" in profile
