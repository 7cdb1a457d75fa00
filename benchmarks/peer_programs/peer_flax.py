# SPDX-License-Identifier: Apache-2.0
"""The decoder in Flax and Optax, without Tessera."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from peer_jax import cross_entropy, dtype_of, rotated
from peer_setting import EPSILON, LEARNING_RATE, Setting

Tree: TypeAlias = Any


class Block(nnx.Module):
    """One decoder block."""

    def __init__(self, setting: Setting, weights: Tree) -> None:
        self.setting = setting
        self.norm_1 = norm(setting, weights["norm_1"])
        self.norm_2 = norm(setting, weights["norm_2"])
        names = ("query", "key", "value", "out", "up", "down")
        for name in names:
            setattr(self, name, linear(setting, weights[name]))

    def __call__(self, x: jax.Array) -> jax.Array:
        """On ``[rows, length, width]``."""
        rows, length, width = x.shape
        heads = (rows, length, self.setting.heads, self.setting.head_width)
        y = self.norm_1(x)
        q, k, v = (f(y).reshape(heads) for f in (self.query, self.key, self.value))
        attended = jax.nn.dot_product_attention(
            rotated(self.setting, q),
            rotated(self.setting, k),
            v,
            is_causal=True,
            implementation="cudnn" if jax.default_backend() == "gpu" else None,
        )
        x = x + self.out(attended.reshape(rows, length, width))
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class Decoder(nnx.Module):
    """All of them, between an embedding and the last matmul."""

    def __init__(self, setting: Setting, weights: Tree) -> None:
        self.embedding = nnx.Embed(
            setting.vocabulary,
            setting.width,
            dtype=dtype_of(setting),
            rngs=nnx.Rngs(0),
        )
        self.embedding.embedding[...] = weights["embedding"]
        self.blocks = nnx.List(Block(setting, block) for block in weights["blocks"])
        self.norm = norm(setting, weights["norm"])
        self.head = linear(setting, weights["head"])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits of the next words."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def norm(setting: Setting, scale: Any) -> nnx.RMSNorm:
    """RMSNorm with a given scale."""
    made = nnx.RMSNorm(
        setting.width, epsilon=EPSILON, dtype=dtype_of(setting), rngs=nnx.Rngs(0)
    )
    made.scale[...] = jnp.asarray(scale)
    return made


def linear(setting: Setting, kernel: Any) -> nnx.Linear:
    """A matmul with given weights."""
    made = nnx.Linear(
        *kernel.shape, use_bias=False, dtype=dtype_of(setting), rngs=nnx.Rngs(0)
    )
    made.kernel[...] = jnp.asarray(kernel)
    return made


def step_of(setting: Setting) -> tuple[Callable[..., Any], Tree]:
    """A compiled step ``(state, tokens, targets) -> (state, loss)``, and a state."""
    model = Decoder(setting, jax.tree.map(jnp.asarray, setting.weights()))
    optimizer = nnx.Optimizer(model, optax.adam(LEARNING_RATE), wrt=nnx.Param)

    @nnx.jit(donate_argnums=(0, 1))
    def step(
        model: Decoder,
        optimizer: nnx.Optimizer,
        tokens: jax.Array,
        targets: jax.Array,
    ) -> jax.Array:
        loss, gradients = nnx.value_and_grad(
            lambda model: cross_entropy(model(tokens), targets)
        )(model)
        optimizer.update(model, gradients)
        return loss

    def run(state: Tree, tokens: Any, targets: Any) -> tuple[Tree, jax.Array]:
        return state, step(*state, jnp.asarray(tokens), jnp.asarray(targets))

    return run, (model, optimizer)
