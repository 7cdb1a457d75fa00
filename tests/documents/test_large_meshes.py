# SPDX-License-Identifier: Apache-2.0
"""The sections of ``distributed-step.md`` on large meshes run as written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tessera import dist, graph, op, schedule
from tessera.errors import AbstractMeshError
from tessera.mesh import Mesh
from tests.documents import guide_pages

PAGE = "distributed-step.md"
SMALL, PRODUCTS = "Declare a mesh of 16 devices", "Sum over an axis"
LARGE = "Train on 72 devices"


def run(heading, namespace):
    """Execute the blocks of a section of the page."""
    guide_pages.run(PAGE, heading, namespace)


@pytest.fixture
def names():
    """What the reader has after the first section."""
    namespace = {}
    run(SMALL, namespace)
    return namespace


def test_it_prints_the_topology(names, capsys):
    run(SMALL, {})
    assert capsys.readouterr().out == "tp × dp mesh, 4 × 4\n"
    assert names["mesh"].shape == {"tp": 4, "dp": 4}


def test_it_declares_a_mesh_of_more_devices_than_there_are(names):
    assert names["mesh"].is_abstract
    with pytest.raises(AbstractMeshError, match="T105"):
        names["mesh"].jax  # noqa: B018 - raises


def test_it_splits_rows_over_tp_and_columns_over_dp(names):
    run("Split over two axes", names)
    weight = names["W"]
    assert weight.spec == P("tp", "dp")
    assert weight.local_shape == (256, 256)
    assert weight.dtype == jnp.bfloat16
    assert "lazy" in repr(weight)
    assert "256" in str(dist.inspect(weight))


def numbers(*shape):
    count = int(np.prod(shape))
    return np.linspace(-1.0, 1.0, count, dtype=np.float32).reshape(shape)


W_LOCAL, X_LOCAL = numbers(6, 8), numbers(8, 4)


@pytest.fixture
def mesh():
    """The mesh of the first section, on the devices that there are."""
    return Mesh(axes=["tp", "dp"], devices=range(8))


def placed(array, mesh, *spec):
    return jax.device_put(array, NamedSharding(mesh.jax, P(*spec)))


def test_it_combines_the_products_of_devices(names, mesh):
    """Inside a kernel, where the operands are each device's blocks."""

    @op.kernel
    def product(w, x):
        namespace = dict(names, W_local=w, X_local=x)
        run(PRODUCTS, namespace)
        return namespace["Y_global"]

    found = product(placed(W_LOCAL, mesh, None, "dp"), placed(X_LOCAL, mesh, "dp"))
    np.testing.assert_allclose(found, W_LOCAL @ X_LOCAL, rtol=1e-5, atol=1e-6)


def test_it_combines_the_blocks_of_a_global_array(names, mesh):
    """Outside one, where the product has a layout and each block is a device's own."""
    names["W_local"] = placed(W_LOCAL, mesh)
    names["X_local"] = placed(X_LOCAL, mesh, None, "dp")
    run(PRODUCTS, names)
    product = W_LOCAL @ X_LOCAL
    np.testing.assert_allclose(names["Y_local"], product, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        names["Y_global"], product[:, :2] + product[:, 2:], rtol=1e-5, atol=1e-6
    )


@pytest.fixture
def with_transformer():
    """What the section leaves to the reader."""
    return {"dist": dist, "graph": graph, "op": op, "transformer": op.matmul}


def test_it_factors_72_devices_so_that_the_weight_divides(with_transformer):
    run(LARGE, with_transformer)
    assert with_transformer["mesh"].topology == "tp × pp × dp mesh, 4 × 2 × 9"
    assert with_transformer["W"].spec == P("tp", "pp")
    assert with_transformer["W"].local_shape == (25_000, 50_000)
    assert "lazy" in repr(with_transformer["W"])


def test_it_compiles_for_72_devices_and_allocates_nothing(with_transformer):
    before = jax.live_arrays()
    run(LARGE, with_transformer)
    batch = {
        "input": jax.ShapeDtypeStruct((36, 100_000), jnp.float32),
        "labels": jax.ShapeDtypeStruct((36,), jnp.int32),
    }
    compiled = with_transformer["step"].compile(batch)
    assert compiled.memory.arguments > 25_000 * 50_000 * 4
    assert {axis for row in compiled.collectives.rows for axis in row.axes} == {
        "tp",
        "pp",
        "dp",
    }
    made = [x for x in jax.live_arrays() if not any(x is each for each in before)]
    assert all(array.nbytes < 10**6 for array in made)


def test_it_is_recorded_and_shown():
    try:
        run("Overlap communication and computation", {"schedule": schedule})
        step = graph.training_step(lambda batch: batch * 2.0)
        text = graph.trace(step, jnp.ones(4)).as_text()
    finally:
        schedule.all_reduce_overlap(None)
        schedule.pipeline_microbatches(None)
    assert "microbatches=8 all_reduce_overlap=True" in text
