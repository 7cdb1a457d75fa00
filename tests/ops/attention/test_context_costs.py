# SPDX-License-Identifier: Apache-2.0
"""What context-parallel attention sends and computes."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import tessera as ts
from tessera import op
from tessera.analysis.ledger import collectives
from tessera.mesh import Mesh
from tessera.ops.attention.blockwise import (
    Keys,
    Mask,
    Queries,
    _visibility,
    attend_blocks,
)
from tessera.ops.attention.context_parallel_variants import NO_WINDOW
from tessera.ops.attention.tiling import Rows, Tiling
from tessera.ops.attention.zigzag import Arrangement
from tests.ops.attention.spreading import (
    BATCH,
    HEADS,
    KV_HEADS,
    LENGTH,
    SEQUENCES,
    WIDTH,
    gathered,
    mesh_of,
    operands,
    plain,
    spread,
)

# --- what is sent


def sent(
    mesh: Mesh,
    method: str,
    length: int = LENGTH,
    policy: str = "none",
    **options: Any,
) -> dict[str, Any]:
    """The ledger's totals over cp of the forward, and of both passes."""
    shardings = NamedSharding(mesh.jax, SEQUENCES)
    given = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings)
        for x in operands(length=length)
    ]

    def read(q: Any, k: Any, v: Any) -> Any:
        return op.context_attention(q, k, v, method=method, **options)

    def both(q: Any, k: Any, v: Any, gradient: Any) -> Any:
        out, pull_back = jax.vjp(ts.remat(read, policy=policy), q, k, v)
        return out, pull_back(gradient)

    found = {}
    for name, function in (("forward", read), ("both", both)):
        mapped = jax.shard_map(
            function, mesh=mesh.jax, in_specs=SEQUENCES, out_specs=SEQUENCES
        )
        count = 3 if name == "forward" else 4
        compiled = jax.jit(mapped).lower(*given[:count]).compile()
        totals = collectives(compiled, mesh).totals()
        assert {axes for axes, _ in totals} <= {("cp",)}
        found[name] = {kind: (t.calls, t.nbytes) for (_, kind), t in totals.items()}
    return found


@pytest.mark.slow(reason="its first case compiles what the others share")
@pytest.mark.parametrize(
    ("method", "options"),
    [("ring", {}), ("zigzag", {}), ("all_to_all", {}), ("zigzag", {"window": 5})],
)
def test_saved_matmuls_are_those_around_attention(method, options):
    """With the policy ``dots`` its output is saved, not what each pair of blocks is."""
    mesh, largest = mesh_of(4), []

    def read(q: Any, k: Any, v: Any) -> Any:
        return op.context_attention(q, k, v, method=method, **options)

    def both(q: Any, k: Any, v: Any) -> Any:
        out, pull_back = jax.vjp(ts.remat(read, policy="dots"), q, k, v)
        largest.append(max(leaf.size for leaf in jax.tree.leaves(pull_back)))
        return pull_back(out)

    mapped = jax.shard_map(both, mesh=mesh.jax, in_specs=SEQUENCES, out_specs=SEQUENCES)
    q, k, v, *_ = operands()
    jax.eval_shape(mapped, q, k, v)
    assert largest == [q.size // mesh.size]


@pytest.mark.full
def test_attention_whose_output_is_saved_is_computed_once():
    given = sent(mesh_of(4), "zigzag"), sent(mesh_of(4), "zigzag", policy="dots")
    assert given[0] == given[1]


@pytest.mark.full
@pytest.mark.parametrize(
    "method", [pytest.param("ring", marks=pytest.mark.full), "zigzag"]
)
def test_the_ring_sends_keys_and_values_once_around(method):
    block = 2 * (BATCH // 2) * (LENGTH // 4) * KV_HEADS * WIDTH * 4
    given = sent(mesh_of(4), method)
    assert given["forward"] == {"collective-permute": (3, 3 * block)}
    # Again backward, and their gradients the same way and one hop further.
    assert given["both"] == {"collective-permute": (3 + 3 + 4, 10 * block)}


@pytest.mark.full
@pytest.mark.parametrize(
    ("length", "method", "ways"),
    [
        (48, "zigzag", 2),
        pytest.param(96, "zigzag", 2, marks=pytest.mark.full),
        pytest.param(48, "ring", 1, marks=pytest.mark.full),
    ],
)
def test_a_window_sends_its_halo_whatever_the_length(length, method, ways):
    mesh, window = mesh_of(4), 4
    halo = 2 * (BATCH // 2) * (window - 1) * KV_HEADS * WIDTH * 4
    given = sent(mesh, method, length, window=window)
    assert given["forward"] == {"collective-permute": (ways, ways * halo)}
    # Its gradients back; the compiler finds that it has the halo already.
    want = (2 * ways, 2 * ways * halo)
    assert given["both"] == {"collective-permute": want}


def test_all_to_all_sends_queries_keys_values_and_what_is_read():
    given = sent(mesh_of(4), "all_to_all")
    heads = (BATCH // 2) * (LENGTH // 4) * WIDTH * 4
    once = 2 * (HEADS + KV_HEADS) * heads
    assert given["forward"] == {"all-to-all": (4, once)}
    # Backward as much.
    assert given["both"] == {"all-to-all": (8, 2 * once)}


@pytest.mark.parametrize(
    ("method", "window"),
    [
        ("zigzag", 5),
        *(
            pytest.param(method, None, marks=pytest.mark.full)
            for method in ("zigzag", "ring", "all_to_all")
        ),
    ],
)
def test_autocast_sends_what_the_matmuls_take(method, window):
    mesh, given = mesh_of(4), operands()
    placed = [spread(x, mesh, method) for x in given[:3]]

    @ts.function
    def read(q: Any, k: Any, v: Any) -> Any:
        with ts.autocast("bf16"):
            return op.context_attention(q, k, v, method=method, window=window)

    # The compiler for CPU widens it again, so that the ledger has f32.
    narrow, wide = r"bf16\[[\d,]+\] = {}", r"f32\[[\d,]+\] = {}"
    sends = "all_to_all" if method == "all_to_all" else "ppermute"
    text = read.trace(*placed).as_text()
    assert re.search(narrow.format(sends), text)
    assert len(re.findall(wide.format(sends), text)) == (method == "all_to_all")
    want = plain(*given[:3], window=window)
    got = gathered(read(*placed), mesh, method)
    assert 1e-4 < np.abs(got - want).max() < 0.05


# --- what is computed


def pairs_of(order: str, size: int, window: int = NO_WINDOW) -> list[list[int]]:
    """How many pairs of blocks each device computes, hop by hop."""
    arrangement = Arrangement(order, size)
    length = 8 * arrangement.runs
    places = arrangement.positions(size * length).reshape(size, length)
    tiling, mask = Tiling(arrangement.runs, length), Mask(True, jnp.int32(window))

    def rows(rank: int) -> Rows:
        return Rows.of(tiling, jnp.asarray(places[rank]), None)

    see = jax.jit(
        jax.vmap(jax.vmap(mask.any_visible, in_axes=(None, 0)), in_axes=(0, None))
    )
    return [
        [int(see(rows(rank), rows((rank - hop) % size)).sum()) for hop in range(size)]
        for rank in range(size)
    ]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_zigzag_gives_every_device_as_many_blocks_at_every_hop(size):
    counts = pairs_of("zigzag", size)
    assert counts == [[3] + [2] * (size - 1)] * size
    # In order, the first device would do one block, and the last all.
    assert [sum(c) for c in pairs_of("contiguous", size)] == [*range(1, size + 1)]


def test_a_window_skips_blocks_beyond_it():
    chunk = 8
    counts = [sum(c) for c in pairs_of("zigzag", 4, window=chunk + 1)]
    # Each of the two chunks sees itself and the one before it, but for the first.
    assert counts == [3, 4, 4, 4]


def test_a_block_of_another_document_is_skipped():
    at = Rows(jnp.arange(8, dtype=jnp.int32), jnp.ones((2, 8), jnp.int32))
    other = at._replace(segment=2 * at.segment)
    mixed = at._replace(segment=at.segment.at[1].set(2))
    mask = Mask(True, jnp.int32(NO_WINDOW))
    assert mask.any_visible(at, at)
    assert not mask.any_visible(at, other)
    assert mask.any_visible(mixed, other)


def test_predictions_know_how_many_pairs_of_blocks_are_computed():
    tiling = Tiling(1, 512)
    x = jnp.ones((tiling.count, 1, 1, tiling.rows, 8))
    rows = Rows.of(tiling, jnp.arange(512, dtype=jnp.int32), None)
    mask = Mask(True, jnp.int32(NO_WINDOW), blocks=tiling.count)

    def attend(x):
        return attend_blocks(Queries(x, rows), Keys(x, x, rows), mask)

    text = jax.jit(attend).lower(x).as_text(debug_info=True)
    kinds = np.asarray(_visibility(rows, rows, mask)).ravel()
    for count in np.bincount(kinds)[:2]:
        assert f"tessera_taken_at_most_{count}_of_{kinds.size}" in text
