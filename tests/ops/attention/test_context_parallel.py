# SPDX-License-Identifier: Apache-2.0
"""Context-parallel attention against plain attention on one device."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import tessera as ts
from tessera import dist, op
from tessera.mesh import Mesh
from tessera.ops.attention import tiling as tiling_module
from tessera.ops.attention.context_parallel_variants import (
    LayerVariants,
    attend_in_region,
)
from tessera.ops.attention.halo import Halo
from tessera.ops.attention.tiling import Tiling
from tessera.ops.attention.zigzag import Arrangement, ContextSharding
from tests.ops.attention.spreading import (
    LENGTH,
    METHODS,
    SEQUENCES,
    WIDTH,
    P,
    drawn,
    gathered,
    mesh_of,
    operands,
    plain,
    segments,
    spread,
)


def with_gradients(
    mesh: Mesh, method: str, given: list[np.ndarray], **options: Any
) -> list[np.ndarray]:
    """What is read and the gradients of queries, keys and values."""
    ids = options.pop("segment_ids", None)
    placed = [spread(x, mesh, method) for x in given]
    rows = None if ids is None else spread(ids, mesh, method)

    @jax.jit
    def run(q: Any, k: Any, v: Any, gradient: Any, rows: Any) -> Any:
        def on_device(q: Any, k: Any, v: Any, gradient: Any, rows: Any) -> Any:
            def read(q: Any, k: Any, v: Any) -> Any:
                return op.context_attention(
                    q, k, v, method=method, segment_ids=rows, **options
                )

            out, pull_back = jax.vjp(read, q, k, v)
            return out, *pull_back(gradient)

        return jax.shard_map(
            on_device, mesh=mesh.jax, in_specs=SEQUENCES, out_specs=SEQUENCES
        )(q, k, v, gradient, rows)

    return [gathered(x, mesh, method) for x in run(*placed, rows)]


def assert_as_plain(
    mesh: Mesh, method: str, given: list[np.ndarray], **options: Any
) -> None:
    def read(q: Any, k: Any, v: Any) -> Any:
        return plain(q, k, v, **options)

    out, pull_back = jax.vjp(read, *given[:3])
    wanted = [out, *pull_back(given[3])]
    got = with_gradients(mesh, method, given, **options)
    for name, there, here in zip(("read", "q", "k", "v"), got, wanted, strict=True):
        np.testing.assert_allclose(there, here, rtol=1e-5, atol=1e-5, err_msg=name)


KINDS = {
    "causal": {},
    "full": {"causal": False},
    "packed": {"segment_ids": segments()},
    "halo": {"window": 3},
    "packed_halo": {"window": 4, "segment_ids": segments()},
    "own_token": {"window": 1},
    "long_window": {"window": 30},
}


def of_rows(kind: str, batch: int) -> dict[str, Any]:
    """The options of a kind for another number of rows."""
    given = KINDS[kind]
    return (
        {**given, "segment_ids": segments(batch)} if "segment_ids" in given else given
    )


FAST = [
    ("causal", "ring"),
    ("full", "all_to_all"),
    ("packed_halo", "zigzag"),
]
# A window no longer than a chunk takes the halo, whatever the method.
THOROUGH = [
    *((kind, method) for kind in ("causal", "full", "packed") for method in METHODS),
    ("packed_halo", "all_to_all"),
    ("halo", "ring"),
    ("own_token", "zigzag"),
    *(("long_window", method) for method in METHODS),
]


@pytest.mark.slow(reason="its first case compiles what the others share")
@pytest.mark.parametrize(
    ("kind", "method"),
    FAST
    + [
        pytest.param(*case, marks=pytest.mark.full)
        for case in THOROUGH
        if case not in FAST
    ],
)
def test_outputs_and_gradients_are_those_of_one_device(method, kind):
    assert_as_plain(mesh_of(4), method, operands(), **KINDS[kind])


@pytest.mark.full
@pytest.mark.parametrize(
    ("size", "kind", "method"),
    [
        (1, "packed", "all_to_all"),
        (2, "packed_halo", "zigzag"),
        (8, "packed", "zigzag"),
        (8, "packed", "all_to_all"),
    ],
)
def test_so_they_are_over_any_number_of_devices(method, size, kind):
    assert_as_plain(mesh_of(size), method, operands(batch=8), **of_rows(kind, 8))


@pytest.mark.full
@pytest.mark.parametrize(
    ("kv_heads", "method"), [(1, "ring"), (1, "all_to_all"), (8, "all_to_all")]
)
def test_so_they_are_with_any_number_of_key_value_heads(method, kv_heads):
    assert_as_plain(mesh_of(4), method, operands(kv_heads=kv_heads))


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "method"),
    [("packed", "zigzag"), ("packed", "all_to_all"), ("packed_halo", "zigzag")],
)
def test_blocks_that_do_not_divide_the_rows_are_padded(method, kind, monkeypatch):
    monkeypatch.setattr(tiling_module, "MAX_ROWS", 5)
    assert_as_plain(mesh_of(2), method, operands(batch=4), **of_rows(kind, 4))


@pytest.mark.full
def test_half_precision_is_accumulated_in_f32():
    mesh, given = mesh_of(4), operands()
    q, k, v = (x.astype(jnp.bfloat16) for x in given[:3])
    want = plain(*(x.astype(jnp.float32) for x in (q, k, v)))
    got = op.context_attention(
        *(spread(x, mesh, "zigzag") for x in (q, k, v)), method="zigzag"
    )
    assert got.dtype == jnp.bfloat16
    got = gathered(got.astype(jnp.float32), mesh, "zigzag")
    np.testing.assert_allclose(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("runs", "length", "most"), [(1, 7, 9), (2, 8, 4), (2, 10, 4), (4, 1, 1), (1, 9, 2)]
)
def test_tiling_is_undone(runs, length, most, monkeypatch):
    monkeypatch.setattr(tiling_module, "MAX_ROWS", most)
    tiling = Tiling(runs, runs * length)
    x = jnp.asarray(drawn(2, runs * length, 4, 3))
    blocks = tiling.heads(x, 2)
    assert blocks.shape == (tiling.count, 2, 2, 2 * tiling.rows, 3)
    assert tiling.rows <= most
    np.testing.assert_array_equal(tiling.unheads(blocks), x)


# --- where it is called


def test_global_arrays_are_taken_apart_by_the_layout_of_the_queries():
    mesh, given = mesh_of(4), operands()
    placed = [spread(x, mesh, "zigzag") for x in given[:3]]
    ids = segments()
    got = op.context_attention(
        *placed, method="zigzag", segment_ids=op.zigzag(ids, 4), window=20
    )
    assert got.sharding == NamedSharding(mesh.jax, SEQUENCES)
    want = plain(*given[:3], segment_ids=ids, window=20)
    np.testing.assert_allclose(op.unzigzag(got, 4), want, rtol=1e-5, atol=1e-5)


@pytest.mark.full
def test_it_works_in_a_kernel_and_in_a_step():
    mesh, given = mesh_of(4), operands()
    placed = [spread(x, mesh, "ring") for x in given[:3]]
    want = plain(*given[:3])

    @op.kernel
    def total(q: Any, k: Any, v: Any) -> Any:
        read = op.context_attention(q, k, v)
        return dist.all_reduce(read.sum(), axis=("dp", "cp"))

    @ts.function
    def slope(q: Any, k: Any, v: Any) -> Any:
        read = op.context_attention(q, k, v)
        return read, ts.grad(jnp.sum(read**2), q)

    np.testing.assert_allclose(total(*placed), want.sum(), rtol=1e-4)
    read, gradient = slope(*placed)
    np.testing.assert_allclose(read, want, rtol=1e-5, atol=1e-5)
    by_jax = jax.grad(lambda q: jnp.sum(plain(q, *given[1:3]) ** 2))(given[0])
    np.testing.assert_allclose(gradient, by_jax, rtol=1e-5, atol=1e-5)


@pytest.mark.full
def test_sequences_may_be_split_along_with_heads():
    mesh = Mesh(["cp", "tp"], devices=range(8), shape=(4, 2))
    given = operands(heads=8, kv_heads=4)
    layout = P(None, "cp", "tp")
    for method in ("zigzag", "all_to_all"):
        placed = [spread(x, mesh, method, layout) for x in given[:3]]
        got = op.context_attention(*placed, method=method)
        assert got.sharding.spec == layout
        np.testing.assert_allclose(
            gathered(got, mesh, method), plain(*given[:3]), rtol=1e-5, atol=1e-5
        )


@pytest.mark.full
@pytest.mark.parametrize("divergent", [False, True])
def test_a_flag_chooses_between_the_whole_sequence_and_the_window(divergent):
    mesh, given, window, cap = mesh_of(4), operands(), 4, 2.0
    arrangement = Arrangement("zigzag", 4)
    ids = segments()

    @jax.jit
    def read(q: Any, k: Any, v: Any, gradient: Any, sees_all: Any) -> Any:
        sharding = ContextSharding("cp", arrangement, divergent=divergent, soft_cap=cap)
        plan = LayerVariants.of(sharding, LENGTH, window)
        assert isinstance(plan.windowed, Halo)
        rows = arrangement.apply(ids, 1)

        def attend(*operands: Any) -> Any:
            return attend_in_region(plan, mesh.jax, SEQUENCES, operands, rows, sees_all)

        out, pull_back = jax.vjp(attend, q, k, v)
        return out, *pull_back(gradient)

    def plainly(q: Any, k: Any, v: Any, *, sees_all: bool) -> Any:
        q = q * np.float32(WIDTH**0.5)
        seen = {"window": None if sees_all else window, "segment_ids": ids}
        return plain(q, k, v, **seen, soft_cap=cap)

    placed = [spread(x, mesh, "zigzag") for x in given]
    for sees_all in (True, False):
        out, pull_back = jax.vjp(partial(plainly, sees_all=sees_all), *given[:3])
        wanted = [out, *pull_back(given[3])]
        for there, here in zip(read(*placed, sees_all), wanted, strict=True):
            np.testing.assert_allclose(
                gathered(there, mesh, "zigzag"), here, rtol=1e-5, atol=1e-5
            )


@pytest.mark.full
def test_many_steps_of_layers_that_differ_do_not_stall():
    mesh, given = mesh_of(8), operands(batch=1)
    plan = LayerVariants.of(ContextSharding("cp", Arrangement("zigzag", 8)), LENGTH, 3)
    spec = P(None, "cp")
    placed = [spread(x, mesh, "zigzag", spec) for x in given[:3]]

    @jax.jit
    def step(q: Any, k: Any, v: Any) -> Any:
        def layer(q: Any, sees_all: Any) -> Any:
            return attend_in_region(
                plan, mesh.jax, spec, (q, k, v), None, sees_all
            ), None

        return jax.lax.scan(layer, q, jnp.arange(6) % 3 == 2)[0]

    for _ in range(200):
        placed[0] = step(*placed)
    assert jnp.isfinite(placed[0]).all()
