# SPDX-License-Identifier: Apache-2.0
"""Makes the optimizers and learning-rate schedules of the settings, all Optax's.

``optimizer_config.py`` has their settings. The trainer takes one
``optax.GradientTransformation`` and the schedule, which it logs.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from tessera.foundations.tree import Tree
from tessera.ops import clipping
from tessera.train.config.optimizer_config import (
    AdafactorConfig,
    AdamConfig,
    AdamWConfig,
    LionConfig,
    OptimizerConfig,
    SgdConfig,
    check,
    scaled_learning_rate,
)
from tessera.train.config.setting_fields import raise_all

# Nested containers of arrays, as parameters and gradients are.
Schedule: TypeAlias = Callable[[ArrayLike], Float[Array, ""]]


def _transform(config: OptimizerConfig, rate: Schedule) -> optax.GradientTransformation:
    """How Optax makes the optimizer of a configuration, without clipping."""
    match config:
        case AdamWConfig(beta1=b1, beta2=b2, epsilon=eps, weight_decay=decay):
            return optax.adamw(rate, b1, b2, eps, weight_decay=decay, mask=decay_mask)
        case AdamConfig(beta1=b1, beta2=b2, epsilon=eps):
            return optax.adam(rate, b1, b2, eps)
        case SgdConfig(momentum=momentum, nesterov=nesterov):
            return optax.sgd(rate, momentum=momentum or None, nesterov=nesterov)
        case LionConfig(beta1=b1, beta2=b2, weight_decay=decay):
            return optax.lion(rate, b1, b2, weight_decay=decay, mask=decay_mask)
        case AdafactorConfig():
            return optax.adafactor(
                rate,
                min_dim_size_to_factor=config.least_dim_to_factor,
                decay_rate=config.decay_rate,
                multiply_by_parameter_scale=config.scale_by_parameter,
                clipping_threshold=config.clip_update,
            )
    raise AssertionError(f"no optimizer has settings of type {type(config).__name__}")


def make_optimizer(
    config: OptimizerConfig,
    *,
    steps: int,
    clip_norm: float | None = None,
    world_size: int = 1,
) -> tuple[optax.GradientTransformation, Schedule]:
    """The optimizer that a configuration describes, and its learning rate over time.

    Its state has the parameters' shapes (Adafactor's: their rows and columns), so it
    takes their layouts.

    Args:
      config: One of the classes of ``optimizer_config.OPTIMIZERS``.
      steps: Optimizer steps of the whole run, which the schedule spans.
      clip_norm: Gradients with a larger global norm are scaled down to it; None leaves
        them as they are.
      world_size: Data-parallel groups, by whose number the rate may be scaled.

    Returns:
      The transformation, and the schedule: step (from 0) to learning rate, float32.

    Raises:
      UnknownOptimizerError: [T505] there is no such optimizer or schedule.
      SettingValueError: [T502] settings that are out of range.
      SettingConflictError: [T507] settings that have no effect.

    Example:
      >>> optimizer, learning_rate = make_optimizer(SgdConfig(), steps=100)
      >>> params = {"w": jnp.ones(3)}
      >>> updates, state = optimizer.update(params, optimizer.init(params), params)
    """
    raise_all(check(config, world_size))
    rate = make_schedule(config, steps, world_size)
    transform = _with_promotion(_transform(config, rate))
    if clip_norm is not None:
        transform = optax.chain(clip_by_global_norm(clip_norm), transform)
    return transform, rate


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Scale gradients whose global norm is above ``max_norm`` down to it.

    Unlike Optax's, the norm is float32 whatever the gradients' dtype, and gradients
    with a NaN among them are left as they are instead of all becoming NaN. Who
    knows the norm already gives it to ``update`` as the argument ``norm``.

    Source: arXiv 1211.5063.
    """

    def init(params: Tree) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def update(
        updates: Tree,
        state: Any,
        params: Tree = None,
        *,
        norm: jax.Array | None = None,
        **extra: Any,
    ) -> tuple[Tree, Any]:
        del params, extra
        norm = clipping.global_norm(updates) if norm is None else norm
        return clipping.scaled_down(updates, norm, max_norm), state

    return optax.GradientTransformationExtraArgs(init, update)


def _with_promotion(
    transform: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Let Optax mix Python numbers with counters, which strict promotion refuses."""

    def init(params: Tree) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return transform.init(params)

    def update(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        with jax.numpy_dtype_promotion("standard"):
            return transform.update(updates, state, params)

    return optax.GradientTransformation(init, update)


def make_schedule(config: OptimizerConfig, steps: int, world_size: int = 1) -> Schedule:
    """The learning rate of each step, counted from 0: float32, a scalar.

    It rises in a line to its highest value, that of ``scaled_learning_rate``, at step
    ``config.warmup(steps) - 1`` and reaches ``final_fraction`` of that at step
    ``steps - 1``. A run that is shorter than the warm-up ends while it rises.

    Example:
      >>> rate = make_schedule(OptimizerConfig(learning_rate=1.0, warmup_steps=4), 10)
      >>> [round(float(rate(step)), 2) for step in (0, 3, 6, 9)]
      [0.25, 1.0, 0.55, 0.1]
    """
    warmup = config.warmup(steps)
    falling = max(steps - warmup, 1)
    highest = scaled_learning_rate(
        config.learning_rate, world_size, config.scale_learning_rate
    )

    def learning_rate(step: ArrayLike) -> Float[Array, ""]:
        done = jnp.asarray(step).astype(jnp.float32) + 1.0
        rising = jnp.minimum(done / max(warmup, 1), 1.0)
        progress = jnp.clip((done - warmup) / falling, 0.0, 1.0)
        left = {
            "cosine": (1.0 + jnp.cos(jnp.pi * progress)) / 2.0,
            "linear": 1.0 - progress,
            "constant": jnp.ones_like(progress),
        }[config.schedule]
        fallen = config.final_fraction + (1.0 - config.final_fraction) * left
        return highest * rising * fallen

    return learning_rate


def decay_mask(params: Tree) -> Tree:
    """Which parameters weight decay acts on: matrices, embeddings among them.

    A norm scale or bias does not decay, known by its name, because one that is stacked
    over layers has two dims; and nothing of fewer than two dims does.

    Example:
      >>> decay_mask({"norm": {"scale": jnp.ones((6, 8))}, "up": jnp.ones((8, 32))})
      {'norm': {'scale': False}, 'up': True}
    """

    def decays(path: Any, leaf: Any) -> bool:
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        # An nnx.State ends its paths in ".value".
        named = [name for name in names if name != "value"]
        is_norm = any("norm" in name for name in named)
        return (
            leaf.ndim >= 2 and not is_norm and named[-1:] not in (["bias"], ["scale"])
        )

    return jax.tree_util.tree_map_with_path(decays, params)
