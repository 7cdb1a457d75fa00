# SPDX-License-Identifier: Apache-2.0
"""flash_attention against attention written out in NumPy in f64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera.errors import ArgumentError, OperandError
from tessera.ops.attention import tiling
from tessera.ops.attention.dispatch import Operands, Options
from tessera.ops.attention.flash import flash_attention
from tests.ops.attention.exact import exact, visible

pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.fixture(scope="module")
def small_blocks():
    """Several blocks for short sequences."""
    before, tiling.MAX_ROWS = tiling.MAX_ROWS, 8
    jax.clear_caches()  # programs of other tests have other blocks
    yield
    tiling.MAX_ROWS = before
    jax.clear_caches()


def drawn(batch=2, heads=4, kv_heads=2, queries=20, keys=20, size=4, dtype="f4"):
    rng = np.random.default_rng(0)
    sizes = [(heads, queries), (kv_heads, keys), (kv_heads, keys)]
    return [rng.normal(size=(batch, *s, size)).astype(dtype) for s in sizes]


def reference(*arrays, gradient=None, **settings):
    """The output, and with a ``gradient`` of it those of q, k and v."""
    ids = settings.pop("segment_ids", None)
    defaults = {"causal": False, "scale": arrays[0].shape[-1] ** -0.5}
    operands = Operands(*arrays, segments=ids)
    cotangent = np.zeros(arrays[0].shape) if gradient is None else gradient
    out, *gradients = exact(operands, Options(**(defaults | settings)), cotangent)
    return out if gradient is None else gradients


IDS = np.array([[1] * 7 + [2] * 13, [5] * 20], np.int32)
SETTINGS = {
    "plain": {},
    "causal": {"causal": True},
    "scaled": {"causal": True, "scale": 1.5},
    "window": {"causal": True, "window": 5},
    "capped": {"causal": True, "soft_cap": 0.7},
    "segments": {"causal": True, "segment_ids": IDS},
    "both ways in segments": {"segment_ids": IDS},
    "everything": {
        "causal": True,
        "window": 9,
        "soft_cap": 2.0,
        "scale": 1.0,
        "segment_ids": IDS,
    },
}


FAST = ("plain", "segments", "everything")


@pytest.mark.slow(reason="its first case compiles what the others share")
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(settings, id=name, marks=() if name in FAST else pytest.mark.full)
        for name, settings in SETTINGS.items()
    ],
)
def test_it_reads_what_attention_reads(settings):
    arrays = drawn()
    found = flash_attention(*arrays, **settings)
    np.testing.assert_allclose(found, reference(*arrays, **settings), atol=3e-6)


@pytest.mark.parametrize(
    "heads",
    [(6, 3), *(pytest.param(h, marks=pytest.mark.full) for h in ((4, 4), (4, 1)))],
)
def test_query_heads_share_key_heads_in_groups(heads):
    arrays = drawn(heads=heads[0], kv_heads=heads[1])
    found = flash_attention(*arrays, causal=True)
    np.testing.assert_allclose(found, reference(*arrays, causal=True), atol=3e-6)


@pytest.mark.parametrize("lengths", [(3, 20), (20, 3), (1, 1), (17, 16)])
def test_queries_may_be_more_or_fewer_than_keys(lengths):
    arrays = drawn(queries=lengths[0], keys=lengths[1])
    np.testing.assert_allclose(flash_attention(*arrays), reference(*arrays), atol=3e-6)


@pytest.mark.parametrize(
    "name",
    [
        "everything",
        *(
            pytest.param(n, marks=pytest.mark.full)
            for n in ("plain", "causal", "capped")
        ),
    ],
)
def test_its_gradients_are_those_of_attention(name):
    settings, arrays = SETTINGS[name], drawn()
    cotangent = np.random.default_rng(1).normal(size=arrays[0].shape).astype("f4")

    def loss(*arrays):
        return (flash_attention(*arrays, **settings) * cotangent).sum()

    found = jax.grad(loss, (0, 1, 2))(*arrays)
    expected = reference(*arrays, gradient=cotangent, **settings)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.full)]
)
def test_narrow_operands_are_summed_in_f32(dtype):
    arrays = [jnp.asarray(x, dtype) for x in drawn(queries=64, keys=64)]
    found = flash_attention(*arrays, causal=True)
    assert found.dtype == dtype
    expected = reference(*arrays, causal=True)
    tolerance = 4 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        np.asarray(found, np.float64), expected, atol=tolerance, rtol=tolerance
    )


@pytest.mark.full
def test_the_memory_of_a_step_grows_with_the_sequence_and_not_with_its_square(
    monkeypatch,
):
    monkeypatch.setattr(tiling, "MAX_ROWS", 64)

    def temporaries(length):
        shape = jax.ShapeDtypeStruct((1, 2, length, 8), jnp.float32)

        @ts.function
        def step(q, k, v):
            loss = flash_attention(q, k, v, causal=True).sum()
            return ts.grad(loss, (q, k, v))

        return step.compile(shape, shape, shape).memory.temporaries

    short, long = temporaries(1024), temporaries(4096)
    assert long < 4.5 * short
    assert long < 4 * 4096**2, "one head's scores"


def test_heads_and_batch_may_be_split_over_devices(grid_mesh):
    """No device sends anything: each has whole sequences of its own heads."""
    arrays = drawn(heads=8, kv_heads=4)
    split = NamedSharding(grid_mesh.jax, P("dp", "tp"))
    ids = jax.device_put(IDS, NamedSharding(grid_mesh.jax, P("dp")))

    def loss(q, k, v):
        out = flash_attention(q, k, v, causal=True, segment_ids=ids)
        return (out**2).sum(), out

    placed = [jax.device_put(x, split) for x in arrays]
    step = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
    (_, out), gradients = step(*placed)
    np.testing.assert_allclose(
        out, reference(*arrays, causal=True, segment_ids=IDS), atol=3e-6
    )
    text = step.lower(*placed).compile().as_text()
    sent = [line for line in text.splitlines() if "all-" in line or "permute" in line]
    # The sum of the loss, and nothing of attention.
    assert all("f32[]" in line for line in sent if " = " in line), sent
    assert gradients[0].sharding.is_equivalent_to(split, 4)


@pytest.mark.full
def test_it_runs_on_the_blocks_of_an_spmd_region(grid_mesh):
    arrays = drawn(heads=8, kv_heads=4)

    def step(q, k, v):
        return jax.grad(
            lambda *a: (flash_attention(*a, causal=True) ** 2).sum(), (0, 1, 2)
        )(q, k, v)

    spec = P("dp", "tp")
    mapped = jax.shard_map(
        step, mesh=grid_mesh.jax, in_specs=(spec, spec, spec), out_specs=(spec,) * 3
    )
    for one, other in zip(jax.jit(mapped)(*arrays), step(*arrays), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_autocast_reaches_its_matmuls():
    arrays = drawn()

    @ts.function
    def narrow(q, k, v):
        with ts.autocast("bf16"):
            out = flash_attention(q, k, v, causal=True)
        return out, ts.grad(out.sum(), v)

    out, gradient = narrow(*map(jnp.asarray, arrays))
    expected = reference(*arrays, causal=True)
    assert 1e-4 < abs(out - expected).max() < 3e-2
    assert gradient.dtype == jnp.float32


@pytest.mark.parametrize(
    ("change", "settings", "text"),
    [
        ({"kv_heads": 3}, {}, "whose G divides H"),
        ({"keys": 8}, {"causal": True}, "20 queries, 8 keys, causal=True"),
        ({"keys": 8}, {"segment_ids": IDS}, "segments of as many queries as keys"),
        ({}, {"window": 4}, "window=4, causal=False"),
        ({}, {"window": 0, "causal": True}, "window=0"),
        ({}, {"soft_cap": 0.0}, "positive soft_cap"),
        ({}, {"segment_ids": IDS[0]}, r"pass integers of shape \(2, 20\)"),
    ],
)
def test_what_does_not_fit_is_an_error(change, settings, text):
    with pytest.raises(OperandError, match=text):
        flash_attention(*drawn(**change), **settings)


@pytest.mark.parametrize(
    ("kv_heads", "settings"),
    [
        (3, {}),  # 20 is no multiple of what are now the keys' heads
        (2, {"causal": True}),
        (4, {"segment_ids": IDS}),
    ],
)
def test_heads_after_the_sequence_are_an_error_that_says_which_order_it_is(
    kv_heads, settings
):
    """As JAX has them: ``[B, S, H, D]``, where the sizes show it."""
    q, k, v = (x.swapaxes(1, 2) for x in drawn(kv_heads=kv_heads))
    if kv_heads == 3:
        k, v = k[:, :6], v[:, :6]
    with pytest.raises(OperandError, match=r"x\.swapaxes\(1, 2\) for \[B, S, H, D\]"):
        flash_attention(q, k, v, **settings)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"is_causal": True}, "write causal=True"),
        ({"attn_mask": True}, r"use jax\.nn\.dot_product_attention"),
        ({"dropout_p": 0.1}, r"use jax\.nn\.dot_product_attention"),
        ({"casual": True}, "did you mean 'causal'"),
    ],
    ids=str,
)
def test_options_of_other_libraries_say_what_to_write(option, text):
    with pytest.raises(ArgumentError, match=text):
        flash_attention(*drawn(), **option)
    flash_attention(*drawn(), is_causal=False, mask=None, dropout_p=0.0)


def test_operands_of_different_dtypes_are_an_error_that_names_them():
    q, k, v = drawn()
    with pytest.raises(OperandError) as caught:
        flash_attention(q, k.astype(np.float16), v)
    assert str(caught.value) == (
        "[T401] flash_attention takes operands of one floating-point dtype\n"
        "  got: queries float32, keys float16, values float32\n"
        "  fix: cast them to one dtype first\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T401.html"
    )


@pytest.mark.slow(reason="it compiles a backward pass of its own")
@pytest.mark.parametrize(
    "name",
    ["everything", pytest.param("both ways in segments", marks=pytest.mark.full)],
)
def test_a_sink_takes_a_share_of_the_softmax_and_has_no_value(name):
    """As a further key of zeros would, whose score is given; with all gradients."""
    settings, (q, k, v) = SETTINGS[name], drawn()
    rng = np.random.default_rng(2)
    sinks = rng.normal(size=q.shape[1]).astype("f4")
    cotangent = rng.normal(size=q.shape).astype("f4")
    operands = Operands(q, k, v, segments=settings.get("segment_ids"))
    scale = settings.get("scale", q.shape[-1] ** -0.5)
    options = Options(
        settings.get("causal", False),
        scale,
        settings.get("window"),
        settings.get("soft_cap"),
    )

    def ours(q, k, v, sinks):
        return (flash_attention(q, k, v, sinks=sinks, **settings) * cotangent).sum()

    def written_out(q, k, v, sinks):
        scores = jnp.einsum("bhsd,bhtd->bhst", q, k.repeat(q.shape[1] // k.shape[1], 1))
        scores = scores * scale
        if options.soft_cap is not None:
            scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
        scores = jnp.where(visible(operands, options)[:, None], scores, -jnp.inf)
        sink = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, sink], -1), -1)[..., :-1]
        out = weights @ v.repeat(q.shape[1] // v.shape[1], 1)
        return (out * cotangent).sum()

    arguments = q, k, v, sinks
    found = jax.value_and_grad(ours, (0, 1, 2, 3))(*arguments)
    expected = jax.value_and_grad(written_out, (0, 1, 2, 3))(*arguments)
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, atol=5e-5)


@pytest.mark.parametrize("sinks", [np.ones(5, "f4"), np.ones((2, 4), "f4"), [1, 2]])
def test_sinks_are_one_number_for_each_head(sinks):
    q, k, v = drawn()
    with pytest.raises(OperandError, match="one sink for each head"):
        flash_attention(q, k, v, sinks=sinks)
