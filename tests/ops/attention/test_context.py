# SPDX-License-Identifier: Apache-2.0
"""Attention over spread sequences against plain attention on one device."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import tessera as ts
from tessera import dist, op
from tessera.analysis.ledger import collectives
from tessera.errors import (
    CollectiveError,
    HeadCountError,
    OperandError,
    ShardDivisibilityError,
)
from tessera.mesh import Mesh
from tessera.ops.attention import blockwise
from tessera.ops.attention.arrangement import Arrangement, Spread
from tessera.ops.attention.blockwise import Mask, Rows, Tiling
from tessera.ops.attention.halo import Halo
from tessera.ops.attention.spread import NO_WINDOW, Plan, attend_in_region

pytestmark = pytest.mark.usefixtures("quick_compile")

P = PartitionSpec
BATCH, LENGTH, HEADS, KV_HEADS, WIDTH = 2, 48, 8, 4, 8
SEQUENCES = P("dp", "cp")


def plain(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = True,
    window: int | None = None,
    segment_ids: Any = None,
) -> jax.Array:
    """Attention on one device, with a mask as large as the square of the sequence."""
    copies, length = q.shape[2] // k.shape[2], q.shape[1]
    k, v = (jnp.repeat(x, copies, axis=2) for x in (k, v))
    scores = jnp.einsum("bshk,bthk->bhst", q, k) * np.float32(q.shape[-1] ** -0.5)
    distance = np.arange(length)[:, None] - np.arange(length)
    seen = np.ones((1, length, length), bool)
    if causal:
        seen = seen & (distance >= 0)
    if window is not None:
        seen = seen & (distance < window)
    if segment_ids is not None:
        seen = seen & (segment_ids[:, :, None] == segment_ids[:, None])
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhst,bthk->bshk", weights, v)


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def operands(
    batch: int = BATCH,
    length: int = LENGTH,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
) -> list[np.ndarray]:
    """Queries, keys, values and the gradient of what is read."""
    kinds = (heads, kv_heads, kv_heads, heads)
    return [
        drawn(batch, length, kind, WIDTH, seed=seed) for seed, kind in enumerate(kinds)
    ]


def segments(batch: int = BATCH, length: int = LENGTH) -> np.ndarray:
    """Rows of a few documents each, and of padding at the end."""
    draw = np.random.default_rng(0).integers(1, 4, (batch, length))
    ids = np.sort(draw, axis=1).astype(np.int32)
    ids[:, -5:] = 0
    return ids


def mesh_of(size: int) -> Mesh:
    return Mesh(["dp", "cp"], devices=range(8), shape=(8 // size, size))


def spread(x: Any, mesh: Mesh, method: str, spec: PartitionSpec = SEQUENCES) -> Any:
    """An array on the mesh, its sequences in the order that the method takes."""
    x = op.zigzag(x, mesh.shape["cp"]) if method == "zigzag" else x
    return jax.device_put(x, NamedSharding(mesh.jax, spec))


def gathered(x: Any, mesh: Mesh, method: str) -> np.ndarray:
    x = op.unzigzag(x, mesh.shape["cp"]) if method == "zigzag" else x
    return np.asarray(x)


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


# --- numbers

METHODS = ["ring", "zigzag", "all_to_all"]
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


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_spread_attention_reads_and_differentiates_as_on_one_device(method, kind):
    assert_as_plain(mesh_of(4), method, operands(), **KINDS[kind])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("size", "kind"), [(1, "packed"), (2, "packed_halo"), (8, "packed")]
)
def test_it_does_over_any_number_of_devices(method, size, kind):
    assert_as_plain(mesh_of(size), method, operands(batch=8), **of_rows(kind, 8))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kv_heads", [1, 8])
def test_it_does_with_any_number_of_key_value_heads(method, kv_heads):
    assert_as_plain(mesh_of(4), method, operands(kv_heads=kv_heads))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["packed", "packed_halo"])
def test_blocks_that_do_not_divide_the_rows_are_padded(method, kind, monkeypatch):
    monkeypatch.setattr(blockwise, "MOST_ROWS", 5)
    assert_as_plain(mesh_of(2), method, operands(batch=4), **of_rows(kind, 4))


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
    monkeypatch.setattr(blockwise, "MOST_ROWS", most)
    tiling = Tiling(runs, runs * length)
    x = jnp.asarray(drawn(2, runs * length, 4, 3))
    blocks = tiling.heads(x, 2)
    assert blocks.shape == (tiling.count, 2, 2, 2 * tiling.rows, 3)
    assert tiling.rows <= most
    np.testing.assert_array_equal(tiling.unheads(blocks), x)


# --- what is sent


def sent(
    mesh: Mesh, method: str, length: int = LENGTH, **options: Any
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
        out, pull_back = jax.vjp(read, q, k, v)
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


def test_the_ring_sends_keys_and_values_once_round():
    mesh = mesh_of(4)
    block = 2 * (BATCH // 2) * (LENGTH // 4) * KV_HEADS * WIDTH * 4
    for method in ("ring", "zigzag"):
        given = sent(mesh, method)
        assert given["forward"] == {"collective-permute": (3, 3 * block)}
        # Again backward, and their gradients on the same way and home.
        assert given["both"] == {"collective-permute": (3 + 3 + 4, 10 * block)}


@pytest.mark.parametrize("length", [48, 96])
def test_a_window_sends_its_halo_whatever_the_length(length):
    mesh, window = mesh_of(4), 4
    halo = 2 * (BATCH // 2) * (window - 1) * KV_HEADS * WIDTH * 4
    for method, ways in (("ring", 1), ("zigzag", 2), ("all_to_all", 1)):
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
    # Backward as much, and one number for each query and head.
    want = (9, 2 * once + HEADS * heads // WIDTH)
    assert given["both"] == {"all-to-all": want}


@pytest.mark.parametrize("method", METHODS)
def test_autocast_sends_what_the_matmuls_take(method):
    mesh, given = mesh_of(4), operands()
    placed = [spread(x, mesh, method) for x in given[:3]]

    @ts.function
    def read(q: Any, k: Any, v: Any) -> Any:
        with ts.autocast("bf16"):
            return op.context_attention(q, k, v, method=method)

    # The compiler for CPU widens it again, so that the ledger has f32.
    narrow, wide = r"bf16\[[\d,]+\] = {}", r"f32\[[\d,]+\] = {}"
    sends = "all_to_all" if method == "all_to_all" else "ppermute"
    text = read.trace(*placed).as_text()
    assert re.search(narrow.format(sends), text)
    assert len(re.findall(wide.format(sends), text)) == (method == "all_to_all")
    want = plain(*given[:3])
    got = gathered(read(*placed), mesh, method)
    assert 1e-4 < np.abs(got - want).max() < 0.05


# --- what is computed


def pairs_of(order: str, size: int, window: int = NO_WINDOW) -> list[list[int]]:
    """How many pairs of blocks each device computes, hop by hop."""
    arrangement = Arrangement(order, size)
    length = 8 * arrangement.runs
    places = arrangement.places(size * length).reshape(size, length)
    tiling, mask = Tiling(arrangement.runs, length), Mask(True, jnp.int32(window))

    def rows(rank: int) -> Rows:
        return Rows.of(tiling, jnp.asarray(places[rank]), None)

    see = jax.jit(
        jax.vmap(jax.vmap(mask.may_see, in_axes=(None, 0)), in_axes=(0, None))
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
    assert mask.may_see(at, at)
    assert not mask.may_see(at, other)
    assert mask.may_see(mixed, other)


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


def test_sequences_may_be_split_along_with_heads():
    mesh = Mesh(["cp", "tp"], devices=range(8), shape=(4, 2))
    given = operands(heads=8, kv_heads=4)
    layout = P(None, "cp", "tp")
    for method in METHODS:
        placed = [spread(x, mesh, method, layout) for x in given[:3]]
        got = op.context_attention(*placed, method=method)
        assert got.sharding.spec == layout
        np.testing.assert_allclose(
            gathered(got, mesh, method), plain(*given[:3]), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize(
    ("method", "local"), [("ring", True), ("ring", False), ("all_to_all", False)]
)
def test_a_flag_chooses_between_the_whole_sequence_and_the_window(method, local):
    mesh, given, window = mesh_of(4), operands(), 4
    arrangement = Arrangement("zigzag", 4)
    ids = segments()

    def read(q: Any, k: Any, v: Any, sees_all: Any, alone: bool) -> Any:
        plan = Plan.of(method, Spread("cp", arrangement, alone=alone), LENGTH, window)
        assert isinstance(plan.near, Halo)
        rows = arrangement.apply(ids, 1)
        return attend_in_region(plan, mesh.jax, SEQUENCES, (q, k, v), rows, sees_all)

    def plainly(q: Any, k: Any, v: Any) -> Any:
        q = q * np.float32(WIDTH**0.5)
        return plain(q, k, v, window=window if local else None, segment_ids=ids)

    want, pull_back = jax.vjp(plainly, *given[:3])
    wanted = [want, *pull_back(given[3])]
    placed = [spread(x, mesh, "zigzag") for x in given]
    for alone in (False, True):
        out, pull_back = jax.vjp(
            jax.jit(
                lambda q, k, v, alone=alone: read(q, k, v, jnp.array(not local), alone)
            ),
            *placed[:3],
        )
        for there, here in zip([out, *pull_back(placed[3])], wanted, strict=True):
            np.testing.assert_allclose(
                gathered(there, mesh, "zigzag"), here, rtol=1e-5, atol=1e-5
            )


def test_many_steps_of_layers_that_differ_do_not_stall():
    mesh, given = mesh_of(8), operands(batch=1)
    plan = Plan.of("ring", Spread("cp", Arrangement("zigzag", 8)), LENGTH, 3)
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


# --- mistakes


def message_of(kind: type[Exception], *args: Any, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        op.context_attention(*args, **options)
    return str(caught.value)


def test_settings_that_contradict_each_other():
    q, k, v, _ = operands()
    given = message_of(OperandError, q, k, v, method="rings", causal=False, window=0)
    assert given == (
        "[T401] context_attention cannot do this\n"
        "  got: method 'rings'\n"
        "  got: window 0\n"
        "  got: a window with causal=False\n"
        "  fix: use one of 'zigzag', 'ring', 'all_to_all'\n"
        "  fix: use a window of 1 or more, or None\n"
        "  fix: leave one of them out\n"
        "  docs: docs/errors/T401.md"
    )


def test_operands_that_do_not_fit():
    q, k, v, _ = operands()
    assert message_of(OperandError, q, k, v[:, :4]) == (
        "[T401] context_attention takes queries [B, S, H, K], and keys and values "
        "[B, S, G, K] whose G divides H\n"
        "  got: queries (2, 48, 8, 8), keys (2, 48, 4, 8), values (2, 4, 4, 8)\n"
        "  fix: give all three the same B, S and K\n"
        "  docs: docs/errors/T401.md"
    )
    assert message_of(OperandError, q, k, v, segment_ids=np.zeros((2, 4), int)) == (
        "[T401] context_attention takes one segment id for each token\n"
        "  got: segment_ids (2, 4), queries (2, 48, 8, 8)\n"
        "  fix: pass segment_ids of shape (2, 48)\n"
        "  docs: docs/errors/T401.md"
    )
    half = q.astype(np.float16)
    assert message_of(OperandError, half, k, v) == (
        "[T401] context_attention takes operands of one floating-point dtype\n"
        "  got: queries float16, keys float32, values float32\n"
        "  fix: cast them to one dtype first\n"
        "  docs: docs/errors/T401.md"
    )


def test_queries_whose_layout_nobody_sees_or_splits_otherwise():
    mesh, (q, k, v, _) = mesh_of(4), operands()
    assert message_of(CollectiveError, q, k, v) == (
        "[T206] context_attention cannot see how its queries are split\n"
        "  got: float32[2,48,8,8]\n"
        "  fix: call it inside @op.kernel, where every device has its own block, or "
        "give the queries a layout\n"
        "  docs: docs/errors/T206.md"
    )
    rows = spread(q, mesh, "ring", P("dp"))
    assert message_of(CollectiveError, rows, k, v) == (
        "[T206] mesh axis 'cp' does not split the sequences of the queries alone\n"
        f"  got: shape (2, 48, 8, 8), layout {rows.sharding.spec}\n"
        "  fix: split dim 1 over 'cp', and leave dim 3 whole\n"
        "  docs: docs/errors/T206.md"
    )


def test_heads_that_cannot_be_exchanged():
    mesh, given = mesh_of(8), operands(heads=6, kv_heads=3)
    placed = [spread(x, mesh, "ring", P(None, "cp")) for x in given[:3]]
    assert message_of(HeadCountError, *placed, method="all_to_all") == (
        "[T402] all-to-all attention cannot divide the heads over mesh axis 'cp'\n"
        "  got: 6 query heads and 3 key/value heads on each device, axis size 8\n"
        "  fix: use cp 6, or the ring, which divides no heads\n"
        "  docs: docs/errors/T402.md"
    )


def test_sequences_that_the_chunks_do_not_divide():
    with pytest.raises(ShardDivisibilityError) as caught:
        op.zigzag(jnp.zeros((2, 20)), 4)
    assert str(caught.value) == (
        "[T201] a sequence cannot be cut into the 8 chunks that 4 devices hold in "
        "zigzag order\n"
        "  got: 20 tokens: 20 / 8 leaves 4\n"
        "  fix: use a sequence of 16 or 24 tokens\n"
        "  docs: docs/errors/T201.md"
    )
