# SPDX-License-Identifier: Apache-2.0
"""The decoder in JAX and Optax as people write it; with its layers scanned as well."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from peer_setting import EPSILON, LEARNING_RATE, Setting

Tree: TypeAlias = Any


def step_of(setting: Setting, *, scanned: bool) -> tuple[Callable[..., Any], Tree]:
    """A compiled step ``(state, tokens, targets) -> (state, loss)``, and a state."""
    optimizer = optax.adam(LEARNING_RATE)
    weights = jax.tree.map(jnp.asarray, setting.weights())
    if scanned:
        weights["blocks"] = jax.tree.map(
            lambda *arrays: jnp.stack(arrays), *weights["blocks"]
        )

    def loss_of(weights: Tree, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        return cross_entropy(logits_of(setting, weights, tokens), targets)

    @partial(jax.jit, donate_argnums=0)
    def step(state: Tree, tokens: jax.Array, targets: jax.Array) -> Any:
        weights, moments = state
        loss, gradients = jax.value_and_grad(loss_of)(weights, tokens, targets)
        updates, moments = optimizer.update(gradients, moments)
        return (optax.apply_updates(weights, updates), moments), loss

    return step, (weights, optimizer.init(weights))


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean loss, from all logits."""
    chances = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(chances, targets[..., None], axis=-1).mean()


def logits_of(setting: Setting, weights: Tree, tokens: jax.Array) -> jax.Array:
    """Logits of the next words, ``[rows, length, vocabulary]``."""
    dtype = dtype_of(setting)
    x = weights["embedding"][tokens].astype(dtype)
    if isinstance(weights["blocks"], dict):
        x, _ = jax.lax.scan(
            lambda x, block: (block_of(setting, block, x), None), x, weights["blocks"]
        )
    else:
        for block in weights["blocks"]:
            x = block_of(setting, block, x)
    return rms_norm(x, weights["norm"]) @ weights["head"].astype(dtype)


def block_of(setting: Setting, block: Tree, x: jax.Array) -> jax.Array:
    """One decoder block on ``[rows, length, width]``."""
    rows, length, width = x.shape
    heads = (rows, length, setting.heads, setting.head_width)
    block = jax.tree.map(lambda weight: weight.astype(x.dtype), block)
    y = rms_norm(x, block["norm_1"])
    q, k, v = ((y @ block[name]).reshape(heads) for name in ("query", "key", "value"))
    attended = jax.nn.dot_product_attention(
        rotated(setting, q),
        rotated(setting, k),
        v,
        is_causal=True,
        implementation="cudnn" if jax.default_backend() == "gpu" else None,
    )
    x = x + attended.reshape(rows, length, width) @ block["out"]
    y = rms_norm(x, block["norm_2"])
    return x + jax.nn.gelu(y @ block["up"]) @ block["down"]


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMSNorm in f32, in the dtype of ``x`` (arXiv 1910.07467)."""
    wide = x.astype(jnp.float32)
    size = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(size + EPSILON) * scale).astype(x.dtype)


def rotated(setting: Setting, x: jax.Array) -> jax.Array:
    """Rotary embedding of ``[rows, length, heads, head_width]``."""
    cos, sin = (table[:, None, :] for table in setting.rotations())
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def dtype_of(setting: Setting) -> Any:
    """The dtype of matmuls."""
    return jnp.bfloat16 if setting.dtype == "bf16" else jnp.float32
