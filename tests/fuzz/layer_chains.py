# SPDX-License-Identifier: Apache-2.0
"""Drawn losses of a chain of layers, in which XLA finds algebra to simplify."""

import jax
import jax.numpy as jnp
import numpy as np

import tessera as ts

WIDTH, LAYERS = 16, 3


def softmax(x, w):
    return jax.nn.softmax(x @ w, axis=-1) ** 2


def softmax_of_columns(x, w):
    return 4 * jax.nn.softmax(x @ w, axis=0) * x


def norm(x, w):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True)) * w[0]


def divided(x, w):
    return 2 * x / jnp.sum(jnp.abs(x), axis=-1, keepdims=True) / (1 + w[0] ** 2) * 3


def gated(x, w):
    return jax.nn.silu(x @ w) * (x @ w.T)


def attention(x, w):
    return jax.nn.softmax(x @ w @ x.T / 4) @ x


def repeated(x, w):
    return jax.lax.scan(lambda x, row: (x + jnp.tanh(x @ w) * row, None), x, w[:3])[0]


def in_order(x, w):
    return jnp.sort(x, axis=0) + w[0]


KINDS = [softmax, softmax_of_columns, norm, divided, gated, attention, repeated]
KINDS += [in_order]


def drawn_loss(draw):
    """From weights [3, 16, 16] and rows [N, 16] to a sum and the sums of columns.

    Some layers compute in bf16, on arrays of it or under ``ts.autocast``.
    """
    layers = draw.choices(KINDS, k=LAYERS)
    dtypes = draw.choices([jnp.float32, jnp.bfloat16], [3, 1], k=LAYERS)
    autocasts = [draw.random() < 0.25 for _ in layers]

    def loss(weights, x):
        for layer, w, dtype, is_cast in zip(
            layers, weights, dtypes, autocasts, strict=True
        ):
            with ts.autocast("bf16", enabled=is_cast):
                x = layer(x.astype(dtype), w.astype(dtype)).astype(jnp.float32)
        return jnp.sum((x - 1) ** 2), jnp.sum(x, axis=0)

    return loss


def drawn_arrays(seed, rows):
    """Weights and rows for it."""
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=(LAYERS, WIDTH, WIDTH)) / 4
    x = rng.normal(size=(rows, WIDTH))
    return jnp.asarray(weights, jnp.float32), jnp.asarray(x, jnp.float32)
