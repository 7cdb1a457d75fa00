# SPDX-License-Identifier: Apache-2.0
"""Looked-up rows: the same in and out of regions, whatever splits table and numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tessera.errors import OperandError
from tessera.mesh import Mesh
from tessera.ops.embedding import embedding, look_up

DRAW = np.random.default_rng(0)
TABLE = DRAW.normal(size=(16, 4)).astype(np.float32)
# Row 0 often, for its gradient is a sum; two rows that do not exist.
NUMBERS = np.array([[0, 3, 15], [0, 16, 7], [8, 0, -1], [2, 9, 4]], np.int32)
COTANGENT = DRAW.normal(size=(4, 3, 4)).astype(np.float32)


def in_region(mesh: Mesh, rows: Any, split: P) -> Any:
    """The look-up where ``pp`` is manual and the other axes are not."""

    def run(table: jax.Array, numbers: jax.Array) -> jax.Array:
        return look_up(table, numbers, rows=rows, split=split)

    mapped = jax.shard_map(
        run,
        mesh=mesh.jax,
        in_specs=(P(), P()),
        out_specs=P(),
        axis_names={"pp"},
        check_vma=False,
    )

    def placed(table: jax.Array, numbers: jax.Array) -> jax.Array:
        layout = NamedSharding(mesh.jax, P(rows or None))
        table = jax.lax.with_sharding_constraint(table, layout)
        layout = NamedSharding(mesh.jax, split)
        return mapped(table, jax.lax.with_sharding_constraint(numbers, layout))

    return placed


def checked(run: Any) -> None:
    """Rows and, where all numbers are there, the gradient of the table."""
    got = np.asarray(jax.jit(run)(TABLE, NUMBERS))
    there = (NUMBERS >= 0) & (NUMBERS < 16)
    np.testing.assert_array_equal(got[there], TABLE[NUMBERS[there]])
    assert np.isnan(got[~there]).all()

    legal = np.where(there, NUMBERS, 1)

    @jax.jit
    def gradient(table: Any) -> Any:
        return jax.grad(lambda table: (run(table, legal) * COTANGENT).sum())(table)

    want = np.zeros_like(TABLE)
    np.add.at(want, legal, COTANGENT)
    np.testing.assert_allclose(gradient(TABLE), want, rtol=1e-6, atol=1e-6)


def test_outside_of_regions_it_is_numpy_indexing_but_for_rows_that_are_not_there():
    checked(look_up)


@pytest.mark.parametrize(
    ("rows", "columns", "split"),
    [
        ((), ("fsdp",), P("fsdp")),
        (("tp",), (), P("dp")),
        (("tp",), ("fsdp",), P(("dp", "fsdp"))),
        (("tp",), ("dp", "fsdp"), P(("dp", "fsdp"))),
        (("tp",), ("dp",), P(("dp", "fsdp"))),
    ],
)
def test_devices_exchange_the_parts_of_rows_that_they_have(rows, columns, split):
    mesh = Mesh(("dp", "fsdp", "tp"), shape=(2, 2, 2))
    layouts = [NamedSharding(mesh.jax, spec) for spec in (P(rows, columns), split)]

    def run(table: jax.Array, numbers: jax.Array) -> jax.Array:
        placed = map(jax.lax.with_sharding_constraint, (table, numbers), layouts)
        out = look_up(*placed, mesh=mesh, rows=rows, columns=columns, split=split)
        return jax.lax.with_sharding_constraint(out, NamedSharding(mesh.jax, P()))

    checked(run)


@pytest.mark.parametrize(
    ("rows", "split"),
    [
        ((), P()),
        ((), P("dp")),
        (("tp",), P()),
        (("tp",), P("dp")),
        (("dp", "tp"), P()),
        (("tp", "dp"), P()),
    ],
)
def test_in_a_region_it_may_be_split_over_the_axes_that_are_left(rows, split):
    mesh = Mesh(["pp", "dp", "tp"], devices=range(8))
    checked(in_region(mesh, rows, split))


def test_in_a_region_over_all_axes_it_is_a_gather():
    mesh = Mesh(["pp", "tp"], devices=range(2), shape=(2, 1))
    checked(in_region(mesh, (), P()))


@pytest.mark.parametrize(
    ("dtype", "shape"), [(jnp.bfloat16, (3,)), (jnp.float32, ()), (jnp.float32, (2, 0))]
)
def test_rows_keep_the_dtype_of_the_table_and_the_shape_of_the_numbers(dtype, shape):
    found = look_up(jnp.asarray(TABLE, dtype), jnp.zeros(shape, jnp.int32))
    assert (found.shape, found.dtype) == ((*shape, 4), dtype)


def test_no_device_sends_more_than_the_rows_that_were_looked_up():
    from tessera.analysis.ledger import collectives

    mesh = Mesh(["pp", "dp", "tp"], devices=range(8))
    run = jax.jit(in_region(mesh, ("tp",), P("dp")))
    rows = collectives(run.lower(TABLE, NUMBERS).compile(), mesh).rows
    sums = [row for row in rows if row.kind == "all-reduce"]
    assert [(row.axes, row.nbytes) for row in sums] == [(("tp",), 2 * 3 * 4 * 4)]


def test_an_embedding_is_rows_of_its_table():
    found = embedding(NUMBERS[:1], TABLE)
    np.testing.assert_array_equal(found, TABLE[NUMBERS[:1]])
    assert np.isnan(embedding(jnp.array([16]), TABLE)).all()


def test_an_embedding_of_numbers_that_are_none_is_an_error():
    with pytest.raises(OperandError) as caught:
        embedding(TABLE, NUMBERS)
    assert str(caught.value) == (
        "[T401] embedding takes integers, and a floating-point table [R, D]\n"
        "  got: numbers float32[16, 4], table int32[4, 3]\n"
        "  fix: pass the numbers first and the table second\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T401.html"
    )
