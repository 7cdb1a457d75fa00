# SPDX-License-Identifier: Apache-2.0
"""op.fused_linear_cross_entropy against op.cross_entropy of all logits, and f64."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera.errors import OperandError
from tessera.jax_compat import jaxprs
from tessera.mesh import Mesh
from tessera.ops.fused_losses import fused_linear_cross_entropy
from tessera.ops.linear_loss_chunks import LossLayout, Terms, chunk_rows
from tessera.ops.linear_loss_vjp import fused_loss
from tessera.ops.losses import cross_entropy
from tessera.tracing import scope

V, D = 11, 5


def drawn(seed, *shape, dtype="f4", words=V, width=D):
    """Tokens, a weight and labels of which a third are ignored."""
    rng = np.random.default_rng(seed)
    arrays = [
        jnp.asarray(rng.normal(size=size), jnp.float32).astype(dtype)
        for size in ((*shape, width), (words, width))
    ]
    labels = rng.integers(0, words, shape)
    return arrays, np.where(rng.random(shape) < 0.3, -100, labels).astype("i4")


def whole(hidden, weight, labels, *, soft_cap=None, **options):
    """The same loss of logits that exist."""
    logits = jnp.matmul(hidden, weight.T, preferred_element_type=jnp.float32)
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    return cross_entropy(logits, labels, **options)


def with_gradients(loss, operands, labels, **options):
    """The loss and its gradients; of losses by token, those of a weighted sum."""

    def scalar(*operands):
        found = loss(*operands, labels, **options)
        weights = jnp.cos(jnp.arange(found.size, dtype=found.dtype))
        return (found * weights.reshape(found.shape)).sum() + 0.5 * found.sum()

    return jax.value_and_grad(scalar, tuple(range(len(operands))))(*operands)


def in_f64(operands, labels, reduction, z_loss, soft_cap):
    """Loss and gradients by hand, in double precision."""
    hidden, weight = (np.asarray(x, "f8") for x in operands)
    raw = hidden @ weight.T
    logits = soft_cap * np.tanh(raw / soft_cap) if soft_cap else raw
    counts = labels != -100
    target = np.eye(V)[np.where(counts, labels, 0)]
    lse = np.log(np.exp(logits).sum(-1))
    losses = counts * (lse - (target * logits).sum(-1) + z_loss * lse**2)
    seeds = np.cos(np.arange(losses.size)).reshape(losses.shape) + 0.5
    if reduction != "none":
        total = max(counts.sum(), 1) if reduction == "mean" else 1
        seeds = 1.5 * np.ones(losses.shape) / total
    softmax = np.exp(logits - lse[..., None])
    slopes = softmax * (1 + 2 * z_loss * lse)[..., None] - target
    slopes *= 1 - (logits / soft_cap) ** 2 if soft_cap else 1
    slopes *= (seeds * counts)[..., None]
    rows, tokens = slopes.reshape(-1, V), hidden.reshape(-1, D)
    return (losses * seeds).sum(), (slopes @ weight, rows.T @ tokens)


OPTIONS = st.fixed_dictionaries(
    {
        "reduction": st.sampled_from(["mean", "sum", "none"]),
        "z_loss": st.sampled_from([0.0, 0.01]),
        "soft_cap": st.sampled_from([None, 3.0]),
    }
)


@pytest.mark.full
@settings(max_examples=6, phases=[Phase.generate])
@given(
    st.integers(0, 2**31),
    st.sampled_from([(), (2, 5)]),
    st.sampled_from(["f4", jnp.bfloat16]),
    st.sampled_from([1, 3, None]),
    OPTIONS,
)
def test_loss_and_gradients_are_as_near_to_f64_as_those_of_whole_logits(
    seed, shape, dtype, chunk_size, options
):
    operands, labels = drawn(seed, *shape, dtype=dtype)
    wanted = in_f64(operands, labels, **options)
    theirs = with_gradients(whole, operands, labels, **options)
    ours = with_gradients(
        fused_linear_cross_entropy, operands, labels, chunk_size=chunk_size, **options
    )
    leaves = map(jax.tree.leaves, (ours, theirs, wanted))
    for our, their, want in zip(*leaves, strict=True):
        assert our.dtype == their.dtype
        our, their, want = (np.asarray(x, "f8") for x in (our, their, want))
        # One rounding of the largest number is no error that could be halved.
        rounding = float(jnp.finfo(dtype).eps) * np.abs(want).max() + 1e-6
        assert np.abs(our - want).max() <= 2 * np.abs(their - want).max() + rounding


@pytest.mark.full
def test_a_weight_may_have_the_vocabulary_last():
    (hidden, weight), labels = drawn(0, 4, 3)
    found = with_gradients(
        fused_linear_cross_entropy, (hidden, weight.T), labels, vocab_dim=1
    )
    expected = with_gradients(whole, (hidden, weight), labels)
    np.testing.assert_allclose(found[1][1].T, expected[1][1], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)


def test_a_label_outside_the_vocabulary_is_no_plausible_number():
    (hidden, weight), _ = drawn(1, 2)
    assert jnp.isnan(fused_linear_cross_entropy(hidden, weight, np.array([1, V])))
    assert jnp.isnan(fused_linear_cross_entropy(hidden, weight, np.array([1, -1])))


def test_a_batch_that_is_all_ignored_has_a_loss_and_gradient_of_zero():
    operands, labels = drawn(2, 4)
    loss, slopes = with_gradients(
        fused_linear_cross_entropy, operands, np.full_like(labels, -100)
    )
    assert loss == 0
    assert not any(slope.any() for slope in slopes)


def matmuls(function, *operands):
    """The ``dot_general`` equations of a function, as their results' shapes."""
    found = []

    def walk(program):
        for equation in jaxprs.equations(program):
            if equation.primitive.name == "dot_general":
                found.append(equation.outvars[0].aval.shape)
            for inner in jaxprs.inner_programs(equation):
                walk(inner)

    walk(jax.make_jaxpr(function)(*operands))
    return found


def test_gradients_are_computed_where_the_loss_is_differentiated_and_nowhere_else():
    operands, labels = drawn(4, 12)

    def loss(*operands):
        return fused_linear_cross_entropy(*operands, labels, chunk_size=4)

    assert matmuls(loss, *operands) == [(4, V)]
    gradients = matmuls(jax.grad(loss, (0, 1)), *operands)
    assert sorted(gradients) == [(4, D), (4, V), (D, V)]


def test_no_array_is_as_large_as_the_logits():
    words, tokens, width = 2048, 1024, 8
    (hidden, weight), labels = drawn(5, tokens, words=words, width=width)

    def compiled(loss, **options):
        def gradients(*operands):
            return jax.grad(lambda *o: loss(*o, labels, **options), (0, 1))(*operands)

        return jax.jit(gradients).lower(hidden, weight).compile()

    logits = 4 * words * tokens
    ours = (
        compiled(fused_linear_cross_entropy, chunk_size=64)
        .memory_analysis()
        .temp_size_in_bytes
    )
    theirs = compiled(whole).memory_analysis().temp_size_in_bytes
    assert theirs >= logits
    assert ours <= 0.15 * theirs


def test_small_shares_of_a_large_vocabulary_survive_fp16():
    (hidden, weight), labels = drawn(6, 8, dtype="f2", words=50_000, width=4)
    hidden, weight = hidden * jnp.float16(0.01), weight * jnp.float16(0.01)
    found = jax.grad(fused_linear_cross_entropy, 1)(hidden, weight, labels)
    # A word that is no label has 1 / V of a token: below fp16's normal numbers.
    f32 = [x.astype(jnp.float32) for x in (hidden, weight)]
    wanted = jax.grad(fused_linear_cross_entropy, 1)(*f32, labels)
    others = np.setdiff1d(np.arange(50_000), labels)
    apart = np.abs(np.asarray(found, "f4") - wanted)[others].max()
    assert apart <= 2**-24  # the smallest number of fp16


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        ((2048, 32_768, "cpu"), 128),
        ((2048, 264, "cpu"), 2048),
        ((100, 262_144, "cpu"), 100),
        ((8192, 32_768, "gpu"), 1024),
        ((65_536, 131_072, "gpu"), 1024),
        ((8192, 262_144, "gpu"), 512),
        ((0, 7, "cpu"), 1),
    ],
)
def test_chunks_are_chosen_by_the_bytes_of_their_logits(given, rows):
    assert chunk_rows(*given) == rows


# --- on a mesh


EACH = ("dp", "fsdp", "tp")


@pytest.mark.full
@pytest.mark.parametrize(
    ("hidden", "labels", "weight", "tokens", "words"),
    [
        (P(("dp", "fsdp")), P(("dp", "fsdp")), P("tp", "fsdp"), 4, 2),
        pytest.param(
            P("dp", "fsdp"), P("dp", "fsdp"), P("tp"), 4, 2, marks=pytest.mark.full
        ),
        pytest.param(
            P("fsdp"), P("fsdp"), P(None, "fsdp"), 2, 1, marks=pytest.mark.full
        ),
        # Computed, as in a model: only the layout of the labels is known.
        (None, P(("dp", "fsdp")), P("tp"), 4, 2),
        pytest.param(None, None, P(EACH), 1, 8, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_devices_chunk_their_own_tokens_and_words(
    hidden, labels, weight, tokens, words
):
    B, S, D, V = 8, 16, 6, 32
    operands, targets = drawn(8, B, S, words=V, width=D)
    specs = {"hidden": hidden, "labels": labels, "weight": weight}
    specs = {name: spec for name, spec in specs.items() if spec is not None}
    mesh = Mesh(EACH, devices=range(8))

    def outputs(hidden):
        return hidden if "hidden" in specs else jnp.tanh(hidden)

    @ts.function(mesh=mesh, in_specs=specs)
    def step(hidden, weight, labels):
        loss = fused_linear_cross_entropy(outputs(hidden), weight, labels, chunk_size=8)
        return loss, ts.grad(loss, weight)

    def plain(weight):
        return whole(outputs(operands[0]), weight, targets)

    found = step(*operands, targets)
    expected = jax.value_and_grad(plain)(operands[1])
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    home = NamedSharding(mesh.jax, weight)
    assert found[1].sharding.is_equivalent_to(home, 2)

    own_tokens, own_words = B * S // tokens, V // words
    ledger = step.last.collectives
    assert not any(row.copies_whole for row in ledger.rows)
    sent = dict.fromkeys(("all-gather", "all-reduce"), 0)
    for (_, kind), total in ledger.totals().items():
        sent[kind] += total.nbytes
    # A weight that is split along its width is put together once, not in every chunk.
    assert sent["all-gather"] == (4 * own_words * D if len(weight) > 1 else 0)
    # Of each token the maximum, the sum, the label's logit, and no more of the logits.
    softmax = 3 * own_tokens if words > 1 else 0
    # Once for all chunks: gradients of the head, the loss, how many labels count.
    head = own_words * D if tokens > 1 else 0
    scalars = 2 * sum(entry is not None for entry in labels or ())
    assert sent["all-reduce"] == 4 * (softmax + head + scalars)


@pytest.mark.parametrize(
    ("reduction", "vocab_dim"),
    [
        ("sum", 0),
        ("none", 1),
        pytest.param("sum", 1, marks=pytest.mark.full),
        pytest.param("none", 0, marks=pytest.mark.full),
    ],
)
def test_a_weight_that_is_gathered_along_its_last_dim_is_transposed_on_gpus(
    monkeypatch, vocab_dim, reduction
):
    B, S, D, V = 8, 16, 6, 32
    (hidden, weight), labels = drawn(8, B, S, words=V, width=D)
    weight = weight.T if vocab_dim else weight
    mesh = Mesh(("fsdp", "tp"), shape=(4, 2))
    # Of [V, D] the width is the last dim, of [D, V] the vocabulary.
    dims = ("tp", "fsdp") if vocab_dim == 0 else (None, ("tp", "fsdp"))
    split = LossLayout(mesh, P("fsdp"), ("tp",), P(*dims))

    def loss(hidden, weight):
        terms = Terms(vocab_dim=vocab_dim)
        losses = fused_loss(terms, weight, hidden, labels, split, reduction, 8)
        return (losses * jnp.cos(jnp.arange(losses.size)).reshape(losses.shape)).sum()

    def gradients():
        run = jax.jit(jax.value_and_grad(loss, (0, 1)))
        traced = run.trace(hidden, weight)
        results = traced.lower().compile()(hidden, weight)
        return results, str(traced.jaxpr).count(" transpose[")

    with mesh:
        expected, as_stored = gradients()
        monkeypatch.setattr(scope, "device", lambda: SimpleNamespace(platform="gpu"))
        found, transposed = gradients()
    assert transposed > as_stored
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.full
def test_in_an_spmd_region_each_device_has_its_own_tokens(dp_mesh):
    (hidden, weight), labels = drawn(9, 16)

    def own(hidden, weight, labels):
        losses = fused_linear_cross_entropy(
            hidden, weight, labels, reduction="sum", chunk_size=1
        )
        return jax.lax.psum(losses, "dp")

    specs = (P("dp"), P(), P("dp"))
    region = jax.shard_map(own, mesh=dp_mesh.jax, in_specs=specs, out_specs=P())
    gradients = jax.jit(jax.value_and_grad(region, (0, 1)))
    found = gradients(hidden, weight, labels)
    expected = jax.value_and_grad(
        lambda *operands: whole(*operands, labels, reduction="sum"), (0, 1)
    )(hidden, weight)
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.full
def test_rows_may_be_mapped_over():
    (hidden, weight), labels = drawn(10, 3, 4)
    found = jax.vmap(
        lambda h, y: fused_linear_cross_entropy(h, weight, y, chunk_size=3)
    )
    expected = jax.vmap(lambda h, y: whole(h, weight, y))
    np.testing.assert_allclose(
        found(hidden, labels), expected(hidden, labels), rtol=1e-6
    )


# --- mistakes


def test_everything_that_does_not_fit_is_shown_at_once():
    with pytest.raises(OperandError) as caught:
        fused_linear_cross_entropy(
            jnp.zeros((2, 3, 4)),
            jnp.zeros((4, 9), jnp.bfloat16),
            jnp.zeros((2, 4), jnp.int32),
            soft_cap=0.0,
            chunk_size=0,
        )
    assert str(caught.value) == (
        "[T401] fused_linear_cross_entropy takes tokens [..., D], a weight [V, D] and "
        "labels [...]\n"
        "  got: dtypes float32, bfloat16\n"
        "  got: hidden (2, 3, 4), labels (2, 4)\n"
        "  got: hidden (2, 3, 4), weight (4, 9), vocab_dim=0\n"
        "  got: soft_cap=0.0\n"
        "  got: chunk_size=0\n"
        "  fix: cast the operands to one floating-point dtype first\n"
        "  fix: pass labels of shape (2, 3)\n"
        "  fix: pass vocab_dim=1: its dim 0 has that size\n"
        "  fix: use a positive soft_cap, or None\n"
        "  fix: use 1 or more, or None\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T401.html"
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"reduction": "avg"}, "there is no reduction 'avg'"),
        ({"z_loss": -1.0}, "use 0 or a positive number"),
        ({"vocab_dim": 2}, "use 0 for"),
    ],
)
def test_settings_that_do_not_exist(options, text):
    (hidden, weight), labels = drawn(9, 4)
    with pytest.raises(OperandError, match=text):
        fused_linear_cross_entropy(hidden, weight, labels, **options)
