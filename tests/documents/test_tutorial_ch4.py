# SPDX-License-Identifier: Apache-2.0
"""Sections 4.1 to 4.6 of the tutorial run as written."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera import dist, graph, op
from tessera.errors import UnknownAxisError

SEED = Path(__file__).parents[2] / "../shared/seeds/1-tutorial-ch4.md"
pytestmark = pytest.mark.skipif(not SEED.exists(), reason="the seeds are not here")


def section(number):
    """The text of one section of the document."""
    heading = rf"^### {re.escape(number)} .*?$(.*?)(?=^### |\Z)"
    (text,) = re.findall(heading, SEED.read_text(), re.DOTALL | re.MULTILINE)
    return text


def run(number, namespace):
    """Execute the blocks of a section, unchanged."""
    blocks = re.findall(r"^```python\n(.*?)^```", section(number), re.DOTALL | re.M)
    assert blocks, number
    for block in blocks:
        exec(compile(block, f"{SEED.name} {number}", "exec"), namespace)


@pytest.fixture
def names():
    """What the reader has after section 4.1."""
    namespace = {"op": op, "graph": graph}
    run("4.1", namespace)
    return namespace


def test_4_1_defines_a_mesh(names):
    mesh = names["mesh"]
    assert names["ts"] is ts
    assert mesh.topology == "tp × dp mesh, 2 × 4"
    assert mesh.device_ids == tuple(range(8))


def test_4_2_declares_a_table_that_nobody_allocates(names):
    run("4.2", names)
    table = names["E"]
    assert (table.shape, table.dtype) == ((10_000_000, 4096), jnp.bfloat16)
    assert table.spec == P("tp")
    assert table.local_shape == (5_000_000, 4096)
    assert table.nbytes == 81_920_000_000
    rows = ts.function(lambda i: table[i]).trace(jnp.zeros(3, jnp.int32))
    assert [v.spec for v in rows.graph.inputs] == [P(), P("tp")]
    assert "lazy" in repr(table)
    assert all(array.nbytes < 10**9 for array in jax.live_arrays())


def test_4_3_sums_over_the_data_axis(names):
    run("4.3", names)
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


def test_4_4_names_the_axis_that_the_mesh_of_the_chapter_lacks(names):
    with pytest.raises(UnknownAxisError, match="the mesh has no axis 'pp'"):
        run("4.4", names)


def test_4_4_runs_the_stages_on_different_devices(names):
    names["mesh"] = dist.Mesh(["pp", "dp"], devices=range(8), shape=(2, 4))
    run("4.4", names)
    run("4.5", names)
    compiled = names["step"].compile(SHAPES)
    assert sorted(names["step"].params) == ["decoder", "encoder"]
    sent = {(row.kind, row.axes) for row in compiled.collectives.rows}
    assert ("collective-permute", ("pp",)) in sent
    for leaf in jax.tree.leaves(names["step"].params):
        assert "pp" in leaf.spec, "stored in parts over the stages"


def test_4_5_trains_like_one_device(names):
    names["model"], weight = model_on(names["mesh"])
    run("4.5", names)
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


def test_4_5_trains_a_transformer_too(names):
    def model(x):
        return op.transformer_block(x, depth=2, num_heads=4)

    names["model"] = model
    with names["mesh"]:
        run("4.5", names)
        compiled = names["step"].compile(SHAPES)
    axes = {row.axes for row in compiled.collectives.rows}
    assert axes >= {("tp",), ("dp",)}


def test_4_6_traces_the_pipeline_of_4_4_with_the_batch_of_4_5(names):
    names["mesh"] = dist.Mesh(["pp", "dp"], devices=range(8), shape=(2, 4))
    run("4.4", names)
    run("4.5", names)
    (call,) = re.findall(r"`(graph\.trace\([^`]*\))`", section("4.6"))
    text = eval(call, names | {"batch": SHAPES}).stage("trace").as_text()
    assert "encoder/block" in text
    assert "float32[8,4,8] over P('dp',)" in text
    assert text.startswith("=== 1 trace of batch['input'] ===")


def test_4_6_shows_what_runs(names):
    run("4.2", names)
    names["model"], _ = model_on(names["mesh"])
    run("4.5", names)
    names["step"](BATCH)
    names |= {"batch": BATCH, "tensor": names["E"]}
    calls = re.findall(r"`([a-z.]+\([^`]*\))`", section("4.6"))
    assert len(calls) == 3
    shown = [eval(call, names) for call in calls]

    inspection, explanation, profile = map(str, shown)
    assert "10000000" in inspection.replace(",", "").replace("_", "")
    assert "lazy" in repr(names["E"])
    assert explanation.index("trace") < explanation.index("passes")
    assert explanation.index("passes") < explanation.index("compile")
    assert "weight: float32[16,6] over P('tp',) (parameter)" in explanation
    assert "all-reduce" in explanation
    assert "all-reduce" in profile
