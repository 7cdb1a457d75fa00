# SPDX-License-Identifier: Apache-2.0
"""The steps of the guide ``training-at-scale.md`` train as plain JAX does.

What the guide leaves undefined, a model, an optimizer and data among it, is in
``small_training.py``.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera import dist
from tessera.analysis.ledger import collectives
from tests.documents import guide_pages
from tests.documents.small_training import (
    HELPERS,
    VOCAB,
    adam_optimizer,
    adam_update_single_param,
    apply_optimizer_update,
    batches,
    clip_gradients,
    compute_gradient_norm,
    initialize_model_weights,
    initialize_optimizer_state,
    optimizer_step,
    transformer_model,
)

PAGE = "training-at-scale.md"
FULL = pytest.mark.full
SIZES = [pytest.param(1, marks=FULL), 2, pytest.param(4, marks=FULL)]


# --- the guide


def run(title, namespace):
    """Execute the blocks of a section of the page."""
    guide_pages.run(PAGE, title, namespace)


@pytest.fixture
def guide():
    """What the reader has after the first block."""
    namespace = {**HELPERS, "__name__": "guide"}
    run("One device", namespace)
    return namespace


# --- the same in plain JAX


def cross_entropy(logits, labels):
    """The mean over the labels that are not -100, in f32."""
    logits = logits.reshape(-1, VOCAB).astype(jnp.float32)
    labels = labels.reshape(-1)
    kept = labels != -100
    chosen = jnp.take_along_axis(
        jax.nn.log_softmax(logits), jnp.where(kept, labels, 0)[:, None], axis=1
    )
    return -jnp.sum(jnp.where(kept, chosen[:, 0], 0.0)) / jnp.sum(
        kept.astype(jnp.float32)
    )


def loss_of(weights, batch):
    return cross_entropy(
        transformer_model(batch["input_ids"], weights), batch["labels"]
    )


@partial(jax.jit, static_argnames="config")
def step_by_hand(batch, weights, state, config):
    loss, gradients = jax.value_and_grad(loss_of)(weights, batch)
    gradients = clip_gradients(gradients, 1.0)
    return loss, *optimizer_step(weights, gradients, state, dict(config))


def assert_alike(got, expected, rtol=2e-5, atol=1e-6):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for ours, theirs in zip(
        jax.tree.leaves(got), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol)


# --- section by section


def test_a_loss_of_named_dims_is_the_mean_over_labels_that_count(guide):
    weights = initialize_model_weights({})
    batch = next(batches())
    got = guide["compute_loss"](
        transformer_model, batch["input_ids"], batch["labels"], weights
    )
    assert_alike(got, loss_of(weights, batch))
    with pytest.raises(
        ts.TesseraError, match=r"S is 6 by inputs \(dim 1\), 5 by targets"
    ):
        guide["compute_loss"](
            transformer_model, batch["input_ids"], batch["labels"][:, 1:], weights
        )


def test_the_loop_on_one_device_trains_as_plain_jax(guide, capsys):
    trained = guide["train"]()
    config = guide["config"]
    weights = initialize_model_weights(config)
    state, losses = initialize_optimizer_state(weights, config), []
    for batch in batches():
        static = (("learning_rate", 1e-4), ("weight_decay", 0.01))
        loss, weights, state = step_by_hand(batch, weights, state, static)
        losses.append(float(loss))
    assert_alike(trained, weights)
    assert capsys.readouterr().out == f"Step 0: Loss = {losses[0]:.4f}\n"
    assert losses[-1] < losses[0]
    assert guide["training_step"].num_programs() == 0  # ts.jit has one of its own


def scaled_state(scale):
    return {"loss_scale": jnp.float32(scale), "rate": jnp.float32(0.5)}


@pytest.mark.full
def test_mixed_precision_updates_the_weights_and_the_scale(guide, capsys):
    run("Mixed precision", guide)
    weights, batch = initialize_model_weights({}), next(batches())
    batch = {**batch, "labels": np.maximum(batch["labels"], 0)}
    state = scaled_state(1024.0)
    loss, updated = guide["mixed_precision_step"](
        transformer_model, batch, weights, state
    )
    expected, gradients = jax.value_and_grad(loss_of)(weights, batch)
    assert_alike(loss, expected, rtol=1e-2)
    assert float(loss) != float(expected)  # the matmuls do round
    assert_alike(updated, apply_optimizer_update(weights, gradients, state), 0.02, 0.01)
    assert_alike(state, scaled_state(1024.0 * 1.0001))
    assert capsys.readouterr().out == ""


def test_mixed_precision_skips_an_update_that_overflows(guide, capsys):
    run("Mixed precision", guide)
    batch = next(batches())
    weights = jax.tree.map(lambda w: 30 * w, initialize_model_weights({}))
    state = scaled_state(3e38)
    step = ts.jit(guide["mixed_precision_step"])
    _, updated = step(transformer_model, batch, weights, state)
    jax.effects_barrier()
    assert_alike(updated, weights, 0, 0)
    assert_alike(state, scaled_state(1.5e38))
    told = capsys.readouterr().out
    assert told.startswith("Gradient overflow: the loss scale is 1.5")
    for _ in range(20):
        _, updated = step(transformer_model, batch, weights, state)
    assert_alike(state, scaled_state(65536.0))  # halved until it fitted
    assert np.all(np.isfinite(updated["head"]))
    assert np.any(updated["head"] != weights["head"])
    assert step.num_programs() <= 2


@pytest.mark.slow(reason="it compiles several programs")
def test_data_parallel_training_is_training_on_one_device(guide):
    run("Data parallelism", guide)

    @jax.jit
    def by_hand(batch, weights):
        loss, gradients = jax.value_and_grad(loss_of)(weights, batch)
        return loss, adam_optimizer(weights, gradients, guide["config"])

    weights = expected = initialize_model_weights({})
    step = ts.jit(guide["data_parallel_step"])
    for batch in batches():
        loss, weights = step(transformer_model, batch, weights, guide["config"])
        theirs, expected = by_hand(batch, expected)
        assert_alike(loss, theirs)
    assert_alike(weights, expected)
    assert len(weights["up"].sharding.device_set) == 8


@pytest.mark.full
def test_accumulated_gradients_are_those_of_the_mean_of_the_losses(guide):
    run("Accumulation", guide)
    weights, micro_batches = initialize_model_weights({}), list(batches(3))
    loss, gradients = guide["gradient_accumulation_step"](
        transformer_model, micro_batches, weights, 3
    )

    def mean_loss(weights):
        return sum(loss_of(weights, batch) for batch in micro_batches) / 3

    assert_alike((loss, gradients), jax.value_and_grad(mean_loss)(weights))


def test_owners_of_optimizer_state_update_the_weights_of_all(guide):
    run("ZeRO", guide)
    weights = initialize_model_weights({})
    gradients = jax.grad(loss_of)(weights, next(batches()))
    state = jax.tree.map(lambda g: {"square": g * g + 1e-4}, gradients)
    got = guide["zero_optimizer_step"](weights, gradients, state)
    expected = {
        name: adam_update_single_param(weights[name], gradients[name], state[name])
        for name in weights
    }
    assert_alike(got, expected)


@pytest.mark.parametrize("tp", SIZES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_tensor_parallel_linear_layer_is_a_linear_layer(guide, tp, with_bias):
    run("Tensor parallelism", guide)
    draw = np.random.default_rng(2)
    x = jnp.asarray(draw.normal(size=(2, 3, 8)), jnp.bfloat16)
    weight = jnp.asarray(draw.normal(size=(8, 12)), jnp.bfloat16)
    bias = jnp.asarray(draw.normal(size=12), jnp.bfloat16) if with_bias else None
    mesh = dist.Mesh(axes=["tp"], devices=range(tp))
    with mesh:
        given = (x, weight, bias) if with_bias else (x, weight)
        got = guide["tensor_parallel_linear"](*given)
    expected = x @ weight if bias is None else x @ weight + bias
    assert got.dtype == jnp.bfloat16
    assert_alike(got.astype(np.float32), expected.astype(np.float32), 1e-2)


def attention_by_hand(x, w_qkv, w_out, num_heads):
    rows, length, width = x.shape
    heads = [
        part.reshape(rows, length, num_heads, -1).swapaxes(1, 2)
        for part in jnp.split(x @ w_qkv, 3, axis=-1)
    ]
    q, k, v = (part.astype(jnp.float32) for part in heads)
    scores = q @ k.swapaxes(-1, -2) / (width // num_heads) ** 0.5
    scores = jnp.where(jnp.tri(length, dtype=bool), scores, -jnp.inf)
    out = (jax.nn.softmax(scores) @ v).astype(x.dtype)
    return out.swapaxes(1, 2).reshape(rows, length, -1) @ w_out


@pytest.mark.slow(reason="it compiles several programs")
@pytest.mark.parametrize("tp", SIZES)
def test_tensor_parallel_attention_is_attention(guide, tp):
    run("Tensor parallelism", guide)
    draw = np.random.default_rng(3)

    def normal(*shape):
        return jnp.asarray(draw.normal(size=shape) / shape[0] ** 0.5, jnp.bfloat16)

    given = normal(2, 6, 16), normal(16, 48), normal(16, 16), 4
    with dist.Mesh(axes=["tp"], devices=range(tp)):
        got = guide["tensor_parallel_attention"](*given)
    expected = attention_by_hand(*given)
    assert_alike(
        got.astype(np.float32), expected.astype(np.float32), rtol=2e-2, atol=2e-2
    )


# --- the same programs


def costs(compiled, mesh=None):
    """FLOPs, bytes, and what is sent over which axes."""
    found = compiled.cost_analysis()
    sent = collectives(compiled, mesh).totals() if mesh else None
    return found["flops"], found["bytes accessed"], sent


def mean_loss(model, weights, batch):
    logits = model(batch["input_ids"], weights).reshape(-1, VOCAB)
    return ts.nn.cross_entropy(logits, batch["labels"].reshape(-1), ignore_index=-100)


def test_the_step_is_the_program_of_value_and_grad(guide):
    config, batch = guide["config"], next(batches())
    weights = initialize_model_weights(config)
    state = initialize_optimizer_state(weights, config)

    @jax.jit
    def by_hand(batch, weights, state):
        grad = jax.value_and_grad(partial(mean_loss, transformer_model))
        loss, gradients = grad(weights, batch)
        gradients = clip_gradients(gradients, 1.0)
        return loss, *optimizer_step(weights, gradients, state, config)

    step = ts.jit(guide["training_step"])
    ours = step.compile(transformer_model, batch, weights, state, config)
    theirs = by_hand.lower(batch, weights, state).compile()
    assert costs(ours.jax) == costs(theirs)


def rounded(x):
    """To bf16 and back, as autocast does to operands of matmuls on a CPU."""
    narrow = x.astype(jnp.bfloat16).astype(jnp.float32)
    return jax.lax.reduce_precision(narrow, exponent_bits=8, mantissa_bits=7)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def narrow_matmul(x, w, dtype="float32", gradient="float32"):
    """Of operands in bf16; the dtypes are those of the result and of x's gradient."""
    return (rounded(x) @ rounded(w)).astype(dtype)


def narrow_forward(x, w, dtype, gradient):
    x = x.astype(jnp.bfloat16)
    return narrow_matmul(x, w, dtype), (x, w)


def narrow_backward(dtype, gradient, kept, g):
    x, w = kept
    g = g.astype(jnp.bfloat16)
    by_x = jax.lax.dot_general(rounded(g), rounded(w), (((2,), (1,)), ((), ())))
    by_w = jax.lax.dot_general(rounded(g), rounded(x), (((0, 1), (0, 1)), ((), ())))
    return by_x.astype(gradient), by_w.T


narrow_matmul.defvjp(narrow_forward, narrow_backward)


@jax.custom_vjp
def narrow_tanh(x):
    return jnp.tanh(x.astype(jnp.float32)).astype(x.dtype)


# As JAX differentiates it: from 0.12 on by an operation for 1 - y².
if hasattr(jax.lax, "one_minus_square"):

    def narrow_tanh_forward(x):
        y = narrow_tanh(x)
        slope = jax.lax.one_minus_square(y.astype(jnp.float32))
        return y, slope.astype(x.dtype)

    def narrow_tanh_backward(slope, g):
        return (g * slope,)

else:

    def narrow_tanh_forward(x):
        y = narrow_tanh(x)
        return y, (y, 1 - y)

    def narrow_tanh_backward(kept, g):
        y, rest = kept
        return (g * rest + g * rest * y,)


narrow_tanh.defvjp(narrow_tanh_forward, narrow_tanh_backward)


@jax.custom_vjp
def narrow_gradient(x):
    return x


narrow_gradient.defvjp(
    lambda x: (x, ()), lambda _, g: (g.astype(jnp.bfloat16).astype(jnp.float32),)
)


def narrow_model(inputs, weights):
    x = weights["table"][inputs]
    hidden = narrow_tanh(narrow_matmul(x, weights["up"], "bfloat16"))
    down = narrow_matmul(hidden, weights["down"], "float32", "bfloat16")
    return narrow_matmul(narrow_gradient(x + down), weights["head"])


@jax.jit
def mixed_precision_by_hand(batch, weights, state):
    scale = state["loss_scale"]

    def scaled(weights):
        loss = mean_loss(narrow_model, weights, batch)
        return loss * scale, loss

    gradients, loss = jax.grad(scaled, has_aux=True)(weights)
    gradients = {name: g / scale for name, g in gradients.items()}

    def update():
        new = apply_optimizer_update(weights, gradients, state)
        return new, jnp.minimum(scale * 1.0001, 65536.0)

    def skip():
        jax.debug.print("Gradient overflow, loss scale {}", scale * 0.5)
        return weights, scale * 0.5

    is_finite = jnp.isfinite(compute_gradient_norm(gradients))
    return loss, *jax.lax.cond(is_finite, update, skip)


def test_mixed_precision_is_the_program_of_cond(guide):
    run("Mixed precision", guide)
    weights, batch = initialize_model_weights({}), next(batches())
    state = scaled_state(1024.0)
    step = ts.jit(guide["mixed_precision_step"])
    ours = step.compile(transformer_model, batch, weights, state)
    theirs = mixed_precision_by_hand.lower(batch, weights, state).compile()
    assert costs(ours.jax) == costs(theirs)


def test_data_parallel_is_the_program_of_named_shardings(guide):
    run("Data parallelism", guide)
    config, batch = guide["config"], next(batches())
    weights, mesh = initialize_model_weights(config), ts.mesh.auto()
    whole, rows = (NamedSharding(mesh.jax, spec) for spec in (P(), P("dp")))

    @partial(jax.jit, in_shardings=(rows, whole), out_shardings=whole)
    def by_hand(batch, weights):
        grad = jax.value_and_grad(partial(mean_loss, transformer_model))
        loss, gradients = grad(weights, batch)
        return loss, adam_optimizer(weights, gradients, config)

    step = ts.jit(guide["data_parallel_step"])
    ours = step.compile(transformer_model, batch, weights, config)
    theirs = by_hand.lower(batch, weights).compile()
    assert costs(ours.jax, mesh) == costs(theirs, mesh)
    assert [axes for axes, _ in costs(theirs, mesh)[2]] == [("dp",)]
