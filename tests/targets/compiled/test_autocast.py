# SPDX-License-Identifier: Apache-2.0
"""Under ``ts.autocast`` GPUs and TPUs keep what the backward pass reads in bf16.

XLA's CPU compiler does not: it keeps the arrays that a loop stacks in f32.
"""

from functools import cache

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import tessera as ts
from tests.targets.compiled.programs import array, on_one_device, only_in_test_targets

pytestmark = only_in_test_targets

LAYERS, BATCH, LENGTH, WIDTH, HIDDEN, HEADS = 6, 8, 256, 256, 1024, 4
MATRICES = [(WIDTH, WIDTH)] * 4 + [(WIDTH, HIDDEN)] * 2 + [(HIDDEN, WIDTH)]
SHAPES = [(LAYERS, *shape) for shape in (*MATRICES, (WIDTH,), (WIDTH,))]


def normalized(x, scale):
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def block(h, weights):
    """A decoder layer, written as in f32."""
    wq, wk, wv, wo, gate, up, down, first, second = weights
    x = normalized(h, first)
    q, k, v = ((x @ w).reshape(BATCH, LENGTH, HEADS, -1) for w in (wq, wk, wv))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (WIDTH // HEADS) ** -0.5
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    shares = jax.nn.softmax(jnp.where(causal, scores, -1e30))
    h = h + jnp.einsum("bhqk,bkhd->bqhd", shares, v).reshape(h.shape) @ wo
    x = normalized(h, second)
    return h + (jax.nn.silu(x @ gate) * (x @ up)) @ down, None


@cache
def temporaries(target, dtype, layer):
    def step(h, *weights):
        with ts.autocast(dtype):
            loss = jnp.mean(lax.scan(layer, h, weights)[0] ** 2)
        return ts.grad(loss, weights, allow_unused=True)

    shapes = (BATCH, LENGTH, WIDTH), *SHAPES
    arrays = [array(*shape, dtype="float32") for shape in shapes]
    return on_one_device(target, step, *arrays).memory.temporaries


def mlp(h, weights):
    *_, gate, up, down, _, scale = weights
    x = normalized(h, scale)
    return h + (jax.nn.silu(x @ gate) * (x @ up)) @ down, None


@pytest.mark.parametrize("target", ["h100:1x1", "v5e:2x2"])
@pytest.mark.parametrize(("layer", "share"), [(mlp, 0.6), (block, 0.7)])
def test_temporaries_fall(target, layer, share):
    narrow, wide = (temporaries(target, d, layer) for d in ("bf16", "f32"))
    assert narrow < share * wide
