# SPDX-License-Identifier: Apache-2.0
"""Stages of many kinds, each with its weights and its inputs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LAYERS, BATCH, SEQ, DIM, HIDDEN = 4, 2, 5, 8, 12


DRAW = np.random.default_rng(0)


def normal(*shape, dtype=np.float32):
    return jnp.asarray((0.4 * DRAW.normal(size=shape)).astype(dtype))


def norm(x, scale):
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def attention(weights, x, constrain=lambda x, *_: x):
    split_heads = partial(jnp.einsum, "bsd,dhe->bshe")
    q, k, v = (
        constrain(split_heads(x, weights[name]), "dp", None, "tp") for name in "qkv"
    )
    scores = jnp.einsum("bshe,bthe->bhst", q, k)
    mask = jnp.tril(jnp.ones(scores.shape[-2:], dtype=bool))
    weights_of = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    return jnp.einsum("bhst,bthe,hed->bsd", weights_of, v, weights["o"])


def block(weights, x, constrain=lambda x, *_: x):
    x = x + attention(weights, norm(x, weights["norm"]), constrain)
    hidden = constrain(norm(x, weights["norm2"]) @ weights["up"], "dp", None, "tp")
    return constrain(x + jax.nn.gelu(hidden) @ weights["down"], "dp")


def block_weights(*stack):
    heads = (*stack, DIM, 2, DIM // 2)
    return {
        **{name: normal(*heads) for name in "qkv"},
        "o": normal(*stack, 2, DIM // 2, DIM),
        "norm": normal(*stack, DIM),
        "norm2": normal(*stack, DIM),
        "up": normal(*stack, DIM, HIDDEN),
        "down": normal(*stack, HIDDEN, DIM),
    }


def scanned(layer, **options):
    def stage(weights, h, *more):
        def body(h, layer_weights):
            return layer(layer_weights, h, *more), None

        return lax.scan(body, h, weights, **options)[0]

    return stage


def mlp(weights, h):
    return jnp.tanh(h @ weights["up"] + weights["bias"]) @ weights["down"]


MLP = {"up": normal(DIM, HIDDEN), "bias": normal(HIDDEN), "down": normal(HIDDEN, DIM)}
STACKED = block_weights(LAYERS)
ACTIVATIONS = normal(BATCH, SEQ, DIM)


def with_shared(weights, h):
    def body(h, up):
        return h + jnp.tanh(h @ up) @ weights["shared"] + weights["bias"], None

    return lax.scan(body, h, weights["up"])[0]


def with_positions(weights, h, positions, key):
    angles = positions[:, None].astype(h.dtype) * weights["rate"]
    kept = jax.random.bernoulli(key, 0.7, h.shape)
    return jnp.where(kept, h + jnp.sin(angles), jnp.zeros_like(h)) @ weights["w"]


@jax.custom_vjp
def scaled(w, x):
    return x @ w


scaled.defvjp(
    lambda w, x: (x @ w, (w, x)),
    lambda kept, g: (jnp.einsum("bsd,bse->de", kept[1], g), 2.0 * (g @ kept[0].T)),
)


def with_branch(weights, h):
    h = h @ weights["w"]
    return lax.cond(h.sum() > 0, lambda h: jnp.sin(h @ weights["v"]), jnp.cos, h)


def looped_by_hand(weights, h):
    def body(i, h):
        return h + jnp.tanh(h @ weights[i])

    return lax.fori_loop(0, LAYERS, body, h)


def scan_in_scan(weights, h):
    def outer(h, stack):
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, stack)[0], None

    return lax.scan(outer, h, weights)[0]


WIDE = normal(LAYERS, DIM, DIM)

# Name -> stage, its weights, its input, its side inputs.
STAGES = {
    "mlp": (mlp, MLP, ACTIVATIONS),
    "transformer": (scanned(block), STACKED, ACTIVATIONS),
    "transformer, rematerialized": (
        scanned(jax.checkpoint(block)),
        STACKED,
        ACTIVATIONS,
    ),
    "transformer, matmuls saved": (
        scanned(jax.checkpoint(block, policy=jax.checkpoint_policies.dots_saveable)),
        STACKED,
        ACTIVATIONS,
    ),
    "layers without a loop": (
        jax.checkpoint(lambda w, h: mlp(w[1], mlp(w[0], h))),
        [MLP, {name: -w for name, w in MLP.items()}],
        ACTIVATIONS,
    ),
    "weights used twice": (
        lambda w, h: jnp.tanh(jnp.tanh(h @ w) @ w) @ w.T,
        normal(DIM, DIM),
        ACTIVATIONS,
    ),
    "weights that all layers share": (
        with_shared,
        {"up": WIDE, "shared": normal(DIM, DIM), "bias": normal(DIM)},
        ACTIVATIONS,
    ),
    "only a bias": (lambda w, h: h + w, normal(DIM), ACTIVATIONS),
    "unused weights": (
        lambda w, h: h @ w["used"],
        {"used": normal(DIM, DIM), "unused": normal(3, 3)},
        ACTIVATIONS,
    ),
    "integer side inputs": (
        with_positions,
        {"rate": normal(DIM), "w": normal(DIM, DIM)},
        ACTIVATIONS,
        jnp.arange(SEQ),
        jax.random.key(3),
    ),
    "an embedding": (
        lambda w, h, tokens: w["embedding"][tokens] @ w["up"],
        {"embedding": normal(11, DIM), "up": normal(DIM, DIM)},
        ACTIVATIONS,
        jnp.arange(10).reshape(2, 5),
    ),
    "a derivative of its own": (
        lambda w, h: scaled(w, jnp.tanh(scaled(w, h))),
        normal(DIM, DIM),
        ACTIVATIONS,
    ),
    "a branch": (
        with_branch,
        {"w": normal(DIM, DIM), "v": normal(DIM, DIM)},
        ACTIVATIONS,
    ),
    "a loop unrolled by two": (
        scanned(lambda w, h: jnp.tanh(h @ w), unroll=2),
        WIDE,
        ACTIVATIONS,
    ),
    "a loop that counts": (looped_by_hand, WIDE, ACTIVATIONS),
    "a scan in a scan": (scan_in_scan, normal(2, 3, DIM, DIM), ACTIVATIONS),
    "narrow activations": (
        scanned(block),
        jax.tree.map(lambda w: w.astype(jnp.bfloat16), STACKED),
        ACTIVATIONS.astype(jnp.bfloat16),
    ),
}
