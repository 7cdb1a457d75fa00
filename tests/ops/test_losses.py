# SPDX-License-Identifier: Apache-2.0
"""op.cross_entropy against a NumPy reference in f64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera.errors import OperandError
from tessera.ops.losses import cross_entropy


def reference(logits, labels, ignore_index=-100):
    """The loss of each position in f64; 0 where ignored."""
    x = np.asarray(logits, np.float64)
    x = x - x.max(-1, keepdims=True)
    log_p = x - np.log(np.exp(x).sum(-1, keepdims=True))
    safe = np.where(labels == ignore_index, 0, labels)
    picked = np.take_along_axis(log_p, safe[..., None], -1)[..., 0]
    return np.where(labels == ignore_index, 0.0, -picked)


def drawn(seed, *shape, scale=1.0, vocabulary=7):
    """Logits and labels of some shape; about a third of the labels ignored."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(*shape, vocabulary), scale=scale).astype("f4")
    labels = rng.integers(0, vocabulary, shape)
    return logits, np.where(rng.random(shape) < 0.3, -100, labels).astype("i4")


@pytest.mark.full
@given(
    st.integers(0, 2**31),
    st.sampled_from([(), (1,), (5,), (2, 3), (2, 1, 2)]),
    st.sampled_from([1e-3, 1.0, 30.0, 1e4]),
)
def test_every_position_agrees_with_the_reference(seed, shape, scale):
    logits, labels = drawn(seed, *shape, scale=scale)
    found = cross_entropy(logits, labels, reduction="none")
    np.testing.assert_allclose(found, reference(logits, labels), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_reductions_count_only_what_is_not_ignored(reduction):
    logits, labels = drawn(0, 5, 6)
    losses = reference(logits, labels)
    expected = losses.sum() / (
        np.maximum((labels != -100).sum(), 1) if reduction == "mean" else 1
    )
    found = cross_entropy(logits, labels, reduction=reduction)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert found.shape == ()


def test_the_mean_is_the_default():
    logits, labels = drawn(1, 9)
    assert cross_entropy(logits, labels) == cross_entropy(
        logits, labels, reduction="mean"
    )


def test_another_label_may_be_the_ignored_one():
    logits, labels = drawn(2, 9)
    labels = np.abs(labels) % 7
    found = cross_entropy(logits, labels, ignore_index=3, reduction="none")
    np.testing.assert_allclose(found, reference(logits, labels, 3), rtol=1e-5)
    assert (np.asarray(found)[labels == 3] == 0).all()


def test_a_batch_that_is_all_ignored_has_a_loss_and_gradient_of_zero():
    logits, labels = drawn(3, 4)
    labels = np.full_like(labels, -100)
    loss, slope = jax.value_and_grad(cross_entropy)(jnp.asarray(logits), labels)
    assert loss == 0
    assert not slope.any()


@pytest.mark.parametrize("label", [7, 100, -1, -99])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_label_outside_the_vocabulary_is_no_plausible_number(label, reduction):
    logits, _ = drawn(4, 2)
    found = cross_entropy(logits, np.array([1, label]), reduction=reduction)
    assert jnp.isnan(found).any()


def test_large_logits_neither_overflow_nor_round_the_loss_away():
    logits = jnp.array([[1e4, 1e4 - 1, -1e4], [-1e4, -1e4, -1e4]])
    labels = np.array([0, 2])
    found = cross_entropy(logits, labels, reduction="none")
    np.testing.assert_allclose(found, reference(logits, labels), rtol=1e-6)


def test_classes_that_are_ruled_out_by_minus_infinity():
    logits = jnp.array([[-jnp.inf, 0.0, 0.0]])
    np.testing.assert_allclose(cross_entropy(logits, np.array([1])), np.log(2), 1e-6)
    assert cross_entropy(logits, np.array([0])) == jnp.inf
    slope = jax.grad(cross_entropy)(logits, np.array([1]))
    np.testing.assert_allclose(slope, [[0.0, -0.5, 0.5]], rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_logits_are_added_up_in_f32(dtype):
    logits, labels = drawn(5, 6)
    narrow = jnp.asarray(logits).astype(dtype)
    found = cross_entropy(narrow, labels, reduction="none")
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, reference(narrow, labels), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "i2", "u4", "i4"])
def test_labels_of_every_integer_dtype_reach_a_large_vocabulary(dtype):
    logits, _ = drawn(6, 3, vocabulary=300)
    labels = np.array([0, 44, 127])
    found = cross_entropy(logits, labels.astype(dtype), reduction="none")
    np.testing.assert_allclose(found, reference(logits, labels), rtol=1e-5)


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_the_gradient_is_softmax_less_one_hot(z_loss):
    """With ``z_loss``, of the squared logarithm of the softmax's denominator too."""
    logits, labels = drawn(7, 6)
    loss, slope = jax.value_and_grad(cross_entropy)(
        jnp.asarray(logits), labels, z_loss=z_loss
    )
    x, counts = np.asarray(logits, np.float64), labels != -100
    total = np.exp(x).sum(-1)
    losses = reference(logits, labels) + z_loss * np.log(total) ** 2 * counts
    np.testing.assert_allclose(loss, losses.sum() / counts.sum(), rtol=1e-5)
    softmax = np.exp(x) / total[:, None] * (1 + 2 * z_loss * np.log(total))[:, None]
    expected = (softmax - np.eye(7)[np.where(counts, labels, 0)]) * counts[:, None]
    np.testing.assert_allclose(slope, expected / counts.sum(), rtol=1e-5, atol=1e-7)


# --- on a mesh


@pytest.mark.parametrize(
    "spec", [P(None, "tp"), P("dp"), P("dp", "tp"), P(None, ("dp", "tp"))], ids=str
)
def test_split_logits_are_never_collected_on_one_device(spec, grid_mesh):
    logits, labels = drawn(8, 16, vocabulary=16)

    @ts.function(mesh=grid_mesh, in_specs={"logits": spec})
    def step(logits, labels):
        loss = cross_entropy(logits, labels)
        return loss, ts.grad(loss, logits)

    loss, slope = step(logits, labels)
    expected = jax.value_and_grad(cross_entropy)(jnp.asarray(logits), labels)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    np.testing.assert_allclose(slope, expected[1], rtol=1e-5, atol=1e-7)
    assert slope.sharding.is_equivalent_to(NamedSharding(grid_mesh.jax, spec), 2)
    rows = step.last.collectives.rows
    assert {row.kind for row in rows} <= {"all-reduce"}
    # What is summed is at most a number for each position.
    assert max(shape.nbytes for row in rows for shape in row.arrays) <= 4 * 16


# --- mistakes


@pytest.mark.parametrize(
    ("logits", "labels", "text"),
    [
        (
            jnp.zeros((2, 3)),
            jnp.zeros((3,), jnp.int32),
            "[T401] cross_entropy needs one label for each row of logits\n"
            "  got: logits (2, 3), labels (3,)\n"
            "  fix: pass labels of shape (2,)\n",
        ),
        (
            jnp.zeros((2, 3)),
            jnp.zeros((2,)),
            "[T401] cross_entropy takes labels as integers\n"
            "  got: labels of dtype float32\n"
            "  fix: pass class numbers; take argmax of one-hot labels first\n",
        ),
        (
            jnp.zeros((2, 3), jnp.int32),
            jnp.zeros((2,), jnp.int32),
            "[T401] cross_entropy takes logits as floating-point numbers\n"
            "  got: logits of dtype int32\n"
            "  fix: pass unnormalized scores, before any softmax\n",
        ),
    ],
)
def test_operands_that_do_not_fit_are_shown(logits, labels, text):
    with pytest.raises(OperandError) as caught:
        cross_entropy(logits, labels)
    assert (
        str(caught.value)
        == text + "  docs: https://tessera-spmd.github.io/tessera/errors/T401.html"
    )


def test_a_reduction_that_does_not_exist():
    with pytest.raises(OperandError, match="there is no reduction 'avg'"):
        cross_entropy(jnp.zeros((1, 2)), jnp.zeros(1, jnp.int32), reduction="avg")


def test_logits_need_a_vocabulary():
    with pytest.raises(OperandError, match="one label for each row"):
        cross_entropy(jnp.float32(1), jnp.int32(0))


def test_rows_of_all_sequences_may_be_flattened():
    logits, labels = drawn(1, 2, 3)
    flat = cross_entropy(logits.reshape(-1, 7), labels.reshape(-1))
    assert float(flat) == float(cross_entropy(logits, labels))
