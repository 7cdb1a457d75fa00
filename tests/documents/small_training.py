# SPDX-License-Identifier: Apache-2.0
"""A model, an optimizer and data: what ``training-at-scale.md`` leaves undefined.

In plain ``jax.numpy``, so that the same functions serve the step by hand that each
block of the guide is compared with.
"""

import jax
import jax.numpy as jnp
import numpy as np

VOCAB, WIDTH, ROWS, LENGTH, STEPS = 16, 8, 8, 6, 4


def transformer_model(inputs, weights):
    """Logits ``[B, S, VOCAB]`` of tokens ``[B, S]``."""
    x = weights["table"][inputs]
    x = x + jnp.tanh(x @ weights["up"]) @ weights["down"]
    return x @ weights["head"]


def initialize_model_weights(config):
    del config
    shapes = {
        "table": (VOCAB, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
        "head": (WIDTH, VOCAB),
    }
    draw = np.random.default_rng(0)
    return {
        name: jnp.asarray(draw.normal(size=shape) / shape[0] ** 0.5, jnp.float32)
        for name, shape in shapes.items()
    }


def initialize_optimizer_state(weights, config):
    del config
    zeros = jax.tree.map(jnp.zeros_like, weights)
    return {"mean": zeros, "square": zeros}


def optimizer_step(weights, gradients, state, config):
    """RMSProp with momentum and weight decay."""
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], gradients)
    square = jax.tree.map(
        lambda s, g: 0.9 * s + 0.1 * g * g, state["square"], gradients
    )

    def updated(weight, first, second):
        step = first / (jnp.sqrt(second) + 1e-3) + config["weight_decay"] * weight
        return weight - 100 * config["learning_rate"] * step

    new = jax.tree.map(updated, weights, mean, square)
    return new, {"mean": mean, "square": square}


def adam_optimizer(weights, gradients, config):
    return jax.tree.map(
        lambda w, g: w - config["learning_rate"] * 1e3 * g, weights, gradients
    )


def apply_optimizer_update(weights, gradients, optimizer_state):
    return jax.tree.map(
        lambda w, g: w - optimizer_state["rate"] * g, weights, gradients
    )


def compute_gradient_norm(gradients):
    return jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))


def clip_gradients(gradients, limit):
    scale = jnp.minimum(1.0, limit / compute_gradient_norm(gradients))
    return jax.tree.map(lambda g: g * scale, gradients)


def adam_update_single_param(weight, gradient, state):
    return weight - 0.1 * gradient / (jnp.sqrt(state["square"]) + 1e-3)


def batches(count=STEPS, rows=ROWS):
    draw = np.random.default_rng(1)
    for _ in range(count):
        tokens = draw.integers(VOCAB, size=(rows, LENGTH + 1), dtype=np.int32)
        labels = np.where(draw.random((rows, LENGTH)) < 0.2, -100, tokens[:, 1:])
        yield {"input_ids": tokens[:, :-1], "labels": labels.astype(np.int32)}


HELPERS = {
    "transformer_model": transformer_model,
    "initialize_model_weights": initialize_model_weights,
    "initialize_optimizer_state": initialize_optimizer_state,
    "create_dataloader": lambda config: batches(),
    "optimizer_step": optimizer_step,
    "clip_gradients": clip_gradients,
    "adam_optimizer": adam_optimizer,
    "apply_optimizer_update": apply_optimizer_update,
    "compute_gradient_norm": compute_gradient_norm,
    "adam_update_single_param": adam_update_single_param,
}
