# SPDX-License-Identifier: Apache-2.0
"""What the facade promises, written as its users write it."""

from importlib import import_module

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import tessera as ts
from tessera import dist
from tessera.graph.kernel import kernel
from tessera.ops.matmul import matmul


@pytest.mark.parametrize("name", ["dist", "op", "nn", "schedule", "graph", "amp"])
def test_what_the_package_names_is_a_module_to_import(name):
    assert import_module(f"tessera.{name}") is getattr(ts, name)


def test_distributed_is_another_name_of_dist():
    from tessera.distributed import Mesh, all_reduce

    assert Mesh is dist.Mesh
    assert all_reduce is dist.all_reduce
    assert set(dir(ts.distributed)) >= set(dist.__all__)


def test_a_mesh_is_declared_by_nesting():
    mesh = dist.Mesh(axes=["tp", "dp"], devices=[[0, 1, 2, 3], [4, 5, 6, 7]])
    assert mesh.shape == {"tp": 2, "dp": 4}


def test_a_mesh_is_declared_once_and_prints_its_topology(capsys):
    mesh = dist.Mesh(axes=["tp", "dp"], devices=range(16))
    print(mesh.topology)  # noqa: T201
    assert capsys.readouterr().out == "tp × dp mesh, 4 × 4\n"


def test_an_embedding_table_is_split_over_rows_and_inspected():
    mesh = dist.Mesh(axes=["tp", "dp"], devices=[[0, 1, 2, 3], [4, 5, 6, 7]])
    table = dist.tensor(
        shape=(10_000_000, 4096),
        layout=dist.ShardSpec(partition=("row",), mesh_axes=("tp",)),
        mesh=mesh,
        dtype="bf16",
    )
    assert "bfloat16[5000000, 4096]" in str(dist.inspect(table))


def test_partial_products_are_combined_across_the_data_axis():
    mesh = dist.Mesh(axes=["tp", "dp"], devices=range(8), shape=(2, 4))
    w = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    x = np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)

    @kernel
    def product(w_local, x_local):
        y_local = matmul(w_local, x_local)
        return dist.all_reduce(y_local, axis="dp")

    y_global = product(
        jax.device_put(w, NamedSharding(mesh.jax, PartitionSpec(None, "dp"))),
        jax.device_put(x, NamedSharding(mesh.jax, PartitionSpec("dp"))),
    )
    np.testing.assert_allclose(y_global, w @ x, rtol=1e-5, atol=1e-5)


def test_a_product_on_global_arrays_is_combined_across_the_data_axis():
    mesh = dist.Mesh(axes=["tp", "dp"], devices=range(8), shape=(2, 4))
    rows = dist.ShardSpec(("row",), ("dp",))
    w_local = dist.tensor((8, 4), rows, mesh, init="normal", name="w")
    x_local = dist.tensor((4, 4), mesh=mesh, init="normal", name="x")

    y_local = matmul(w_local, x_local)
    y_global = dist.all_reduce(y_local, axis="dp")

    blocks = np.asarray(y_local).reshape(4, 2, 4)
    np.testing.assert_allclose(y_global, blocks.sum(axis=0), rtol=1e-5, atol=1e-5)


def test_the_facade_has_every_name_of_its_page():
    names = (
        *("Mesh", "ShardSpec", "DistTensor", "tensor", "inspect"),
        *("all_reduce", "allreduce", "reduce_scatter", "all_gather", "all_to_all"),
        *("broadcast", "scatter", "gather", "send", "recv"),
    )
    assert [name for name in names if not hasattr(dist, name)] == []
