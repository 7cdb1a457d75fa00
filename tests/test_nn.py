# SPDX-License-Identifier: Apache-2.0
"""ts.nn is a map: every name is an operation of tessera.ops."""

import jax.numpy as jnp
import numpy as np
import pytest

import tessera as ts
from tessera import nn, op


def test_the_names_are_these():
    names = {name for name in vars(nn) if not name.startswith("_")}
    assert names == {
        "cross_entropy",
        "embedding",
        "flash_attention",
        "fused_linear_cross_entropy",
        "rms_norm",
    }
    assert ts.nn is nn


@pytest.mark.parametrize("name", ["Linear", "Module", "functional", "gelu"])
def test_another_name_of_pytorch_s_says_where_it_is(name):
    assert not hasattr(nn, name)
    with pytest.raises(AttributeError, match=r"flax\.nnx, other functions in jax\.nn"):
        getattr(ts.nn, name)


def test_the_loss_is_the_one_loss():
    assert nn.cross_entropy is op.cross_entropy


def test_a_layer_is_written_as_in_torch_and_trained():
    """Attention over heads that are split off, its norm, and a loss over all tokens."""
    batch, length, heads, size = 2, 6, 2, 4
    width = heads * size
    draw = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(draw.normal(size=shape, scale=0.3), jnp.float32)

    weights = {
        "table": normal(11, width),
        "qkv": normal(width, 3 * width),
        "out": normal(width, width),
    }

    def forward(tokens, weights):
        x = ts.nn.embedding(tokens, weights["table"])
        qkv = ts.nn.rms_norm(x) @ weights["qkv"]
        q, k, v = (
            part.reshape(batch, length, heads, size).transpose(1, 2)
            for part in ts.split(qkv, sections=3, dim=-1)
        )
        read = ts.nn.flash_attention(q, k, v, causal=True)
        x = x + read.transpose(1, 2).reshape(batch, length, -1) @ weights["out"]
        return x @ weights["table"].T

    @ts.function
    def step(tokens, targets, weights):
        logits = forward(tokens, weights)
        loss = ts.nn.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=-100
        )
        gradients = ts.grad(loss, weights)
        return loss, {k: w - 0.3 * gradients[k] for k, w in weights.items()}

    tokens = jnp.asarray(draw.integers(0, 11, (batch, length)), jnp.int32)
    losses = []
    for _ in range(30):
        loss, weights = step(tokens, tokens[:, ::-1], weights)
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]
