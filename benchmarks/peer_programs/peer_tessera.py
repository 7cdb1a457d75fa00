# SPDX-License-Identifier: Apache-2.0
"""The decoder as a Tessera function for one device, of Tessera's operations."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from peer_jax import dtype_of, rotated
from peer_setting import EPSILON, LEARNING_RATE, Setting

import tessera as ts
from tessera import op

Tree: TypeAlias = Any


def step_of(setting: Setting) -> tuple[Callable[..., Any], Tree]:
    """A compiled step ``(state, tokens, targets) -> (state, loss)``, and a state."""
    optimizer = optax.adam(LEARNING_RATE)

    def loss_of(weights: Tree, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        dtype = dtype_of(setting)
        x = weights["embedding"][tokens].astype(dtype)
        for block in weights["blocks"]:
            x = block_of(setting, block, x)
        x = ts.nn.rms_norm(x, weights["norm"], eps=EPSILON)
        head = weights["head"].astype(dtype)
        return op.fused_linear_cross_entropy(x, head, targets, vocab_dim=1)

    @ts.function(donate=["state"])
    def step(state: Tree, tokens: jax.Array, targets: jax.Array) -> Any:
        weights, moments = state
        with ts.autocast("bf16", enabled=setting.dtype == "autocast"):
            loss = loss_of(weights, tokens, targets)
        gradients = ts.grad(loss, weights)
        updates, moments = optimizer.update(gradients, moments)
        return (optax.apply_updates(weights, updates), moments), loss

    weights = jax.tree.map(jnp.asarray, setting.weights())
    return step, (weights, optimizer.init(weights))


def block_of(setting: Setting, block: Tree, x: jax.Array) -> jax.Array:
    """One decoder block on ``[rows, length, width]``."""
    rows, length, width = x.shape
    block = jax.tree.map(lambda weight: weight.astype(x.dtype), block)

    def heads(y: jax.Array, name: str) -> jax.Array:
        shape = (rows, length, setting.heads, setting.head_width)
        return (y @ block[name]).reshape(shape)

    y = ts.nn.rms_norm(x, block["norm_1"], eps=EPSILON)
    q, k = (rotated(setting, heads(y, name)) for name in ("query", "key"))
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, heads(y, "value")))
    attended = op.flash_attention(q, k, v, causal=True).swapaxes(1, 2)
    x = x + attended.reshape(rows, length, width) @ block["out"]
    y = ts.nn.rms_norm(x, block["norm_2"], eps=EPSILON)
    return x + jax.nn.gelu(y @ block["up"], approximate=True) @ block["down"]
