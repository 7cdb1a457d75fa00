# SPDX-License-Identifier: Apache-2.0
"""The optimizers and learning-rate schedules that have a name, all of them Optax's.

A configuration class for each, so that ``optimizer=sgd`` has no ``beta2``. The trainer
takes one ``optax.GradientTransformation`` and the schedule, which it logs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from tessera.errors import (
    SettingValueError,
    TesseraError,
    UnknownOptimizerError,
    did_you_mean,
)
from tessera.training.clipping import clip_by_global_norm
from tessera.training.settings import joined, problems_of, setting

# Nested containers of arrays, as parameters and gradients are.
Tree: TypeAlias = Any
Schedule: TypeAlias = Callable[[ArrayLike], Float[Array, ""]]

SCHEDULES: Final = ("cosine", "linear", "constant")
SCALINGS: Final = ("none", "linear", "sqrt")


@dataclass(frozen=True)
class OptimizerConfig:
    """What every optimizer has: a name and a learning rate over time.

    Attributes:
      name: Which optimizer; the files of ``configs/optimizer`` set it.
      learning_rate: The highest learning rate, reached at the end of the warm-up.
      scale_learning_rate: Multiply it by the number of data-parallel groups (linear)
        or by the root of that (sqrt), whose batches together make the step's.
      warmup_steps: Steps over which the learning rate rises in a line from zero.
      schedule: How it falls from there to the last step of the run.
      final_fraction: The learning rate at the last step, as a fraction of the highest.
    """

    name: str = setting("adamw")
    learning_rate: float = setting(3e-3, above=0)
    scale_learning_rate: str = setting("none", choices=SCALINGS)
    warmup_steps: int = setting(20, least=0)
    schedule: str = setting("cosine", choices=SCHEDULES, error=UnknownOptimizerError)
    final_fraction: float = setting(0.1, least=0, most=1)


@dataclass(frozen=True)
class AdamConfig(OptimizerConfig):
    """Adam (arXiv 1412.6980), without weight decay.

    Attributes:
      beta1: Decay of the running mean of gradients.
      beta2: Decay of the running mean of squared gradients.
      epsilon: Added to the root of the second, before dividing by it.
    """

    name: str = setting("adam")
    beta1: float = setting(0.9, least=0, below=1)
    beta2: float = setting(0.95, least=0, below=1)
    epsilon: float = setting(1e-8, above=0)


@dataclass(frozen=True)
class AdamWConfig(AdamConfig):
    """Adam with decoupled weight decay (arXiv 1711.05101).

    Attributes:
      weight_decay: Per step, the fraction of a matrix that is taken off it, times the
        learning rate. Norms, biases and vectors do not decay.
    """

    name: str = setting("adamw")
    weight_decay: float = setting(0.1, least=0)


@dataclass(frozen=True)
class SgdConfig(OptimizerConfig):
    """Stochastic gradient descent with momentum.

    Attributes:
      momentum: Decay of the running sum of gradients; 0 has none, and no memory for it.
      nesterov: Look one step ahead along the momentum.
    """

    name: str = setting("sgd")
    learning_rate: float = setting(0.1, above=0)
    momentum: float = setting(0.9, least=0, below=1)
    nesterov: bool = setting(False)


@dataclass(frozen=True)
class LionConfig(OptimizerConfig):
    """Lion (arXiv 2302.06675): the sign of a running mean; a third of AdamW's rate.

    Attributes:
      beta1: Share of the running mean in the update.
      beta2: Decay of the running mean of gradients.
      weight_decay: As for AdamW; its rate is lower, so this is higher.
    """

    name: str = setting("lion")
    learning_rate: float = setting(3e-4, above=0)
    beta1: float = setting(0.9, least=0, below=1)
    beta2: float = setting(0.99, least=0, below=1)
    weight_decay: float = setting(0.3, least=0)


@dataclass(frozen=True)
class AdafactorConfig(OptimizerConfig):
    """Adafactor (arXiv 1804.04235): second moments by rows and columns, little memory.

    Attributes:
      learning_rate: The highest learning rate; with scale_by_parameter, a fraction of
        each parameter's own size.
      scale_by_parameter: Make the step of a parameter proportional to its size.
      decay_rate: The power of the step by which the memory of second moments grows.
      clip_update: The highest root mean square of one parameter's update.
      least_dim_to_factor: A matrix with a smaller dim keeps all its second moments.
    """

    name: str = setting("adafactor")
    learning_rate: float = setting(1e-2, above=0)
    scale_by_parameter: bool = setting(True)
    decay_rate: float = setting(0.8, above=0, most=1)
    clip_update: float = setting(1.0, least=1)
    least_dim_to_factor: int = setting(128, least=1)


def _adamw(config: AdamWConfig, rate: Schedule) -> optax.GradientTransformation:
    return optax.adamw(
        rate,
        b1=config.beta1,
        b2=config.beta2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=decay_mask,
    )


def _adam(config: AdamConfig, rate: Schedule) -> optax.GradientTransformation:
    return optax.adam(rate, b1=config.beta1, b2=config.beta2, eps=config.epsilon)


def _sgd(config: SgdConfig, rate: Schedule) -> optax.GradientTransformation:
    return optax.sgd(rate, momentum=config.momentum or None, nesterov=config.nesterov)


def _lion(config: LionConfig, rate: Schedule) -> optax.GradientTransformation:
    return optax.lion(
        rate,
        b1=config.beta1,
        b2=config.beta2,
        weight_decay=config.weight_decay,
        mask=decay_mask,
    )


def _adafactor(config: AdafactorConfig, rate: Schedule) -> optax.GradientTransformation:
    return optax.adafactor(
        rate,
        min_dim_size_to_factor=config.least_dim_to_factor,
        decay_rate=config.decay_rate,
        multiply_by_parameter_scale=config.scale_by_parameter,
        clipping_threshold=config.clip_update,
    )


# Each optimizer's settings, and how Optax makes it.
OPTIMIZERS: Final[Mapping[str, tuple[type[OptimizerConfig], Callable[..., Any]]]] = (
    MappingProxyType(
        {
            "adamw": (AdamWConfig, _adamw),
            "adam": (AdamConfig, _adam),
            "sgd": (SgdConfig, _sgd),
            "lion": (LionConfig, _lion),
            "adafactor": (AdafactorConfig, _adafactor),
        }
    )
)


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
      config: One of the classes of ``OPTIMIZERS``.
      steps: Optimizer steps of the whole run, which the schedule spans.
      clip_norm: Gradients with a larger global norm are scaled down to it; None leaves
        them as they are.
      world_size: Data-parallel groups, by whose number the rate may be scaled.

    Returns:
      The transformation, and the schedule: step (from 0) to learning rate, float32.

    Raises:
      UnknownOptimizerError: [T505] there is no such optimizer or schedule.
      SettingValueError: [T502] settings that are out of range or have no effect.

    Example:
      >>> optimizer, learning_rate = make_optimizer(SgdConfig(), steps=100)
      >>> params = {"w": jnp.ones(3)}
      >>> updates, state = optimizer.update(params, optimizer.init(params), params)
    """
    if problems := check(config):
        raise joined(problems)
    rate = make_schedule(config, steps, world_size)
    transform = _with_promotion(OPTIMIZERS[config.name][1](config, rate))
    if clip_norm is not None:
        transform = optax.chain(clip_by_global_norm(clip_norm), transform)
    return transform, rate


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


def check(config: OptimizerConfig) -> list[TesseraError]:
    """Every mistake in an optimizer's settings: T505 for names, T502 for values."""
    found: list[TesseraError] = []
    cls, _ = OPTIMIZERS.get(config.name, (None, None))
    if cls is not type(config):
        what = "has other settings than these" if cls else "does not exist"
        found.append(
            UnknownOptimizerError(
                f"optimizer {config.name!r} {what}",
                got=f"optimizer.name={config.name}",
                fix="choose with optimizer=<name>, which brings the settings: "
                + did_you_mean(config.name, OPTIMIZERS),
            )
        )
    unset = OptimizerConfig.__dataclass_fields__["final_fraction"].default
    if config.schedule == "constant" and config.final_fraction not in (unset, 1.0):
        found.append(
            SettingValueError(
                "a constant learning rate has no final fraction",
                got=f"optimizer.final_fraction={config.final_fraction}",
                fix="leave optimizer.final_fraction out, or use optimizer.schedule="
                "linear or cosine",
            )
        )
    return found + problems_of(config, "optimizer")


def scaled_learning_rate(learning_rate: float, world_size: int, rule: str) -> float:
    """The learning rate for as many times the batch, by a rule of thumb.

    ``linear`` (Goyal et al., arXiv 1706.02677) keeps the distance that SGD goes in one
    pass over the data; it wants a warm-up and fails where batches are very large.
    ``sqrt`` (Krizhevsky, arXiv 1404.5997) keeps the variance of a step, and is the
    rule for Adam and its like (Malladi et al., arXiv 2205.10287).

    Args:
      learning_rate: What is right for the batch of one group.
      world_size: How many data-parallel groups there are.
      rule: ``none``, ``linear`` or ``sqrt``.

    Example:
      >>> [scaled_learning_rate(0.1, 16, rule) for rule in SCALINGS]
      [0.1, 1.6, 0.4]
    """
    factors = {"none": 1.0, "linear": float(world_size), "sqrt": world_size**0.5}
    return learning_rate * factors[rule]


def make_schedule(config: OptimizerConfig, steps: int, world_size: int = 1) -> Schedule:
    """The learning rate of each step, counted from 0: float32, a scalar.

    It rises in a line to its highest value, that of ``scaled_learning_rate``, at step
    ``warmup_steps - 1`` and reaches ``final_fraction`` of that at step ``steps - 1``. A
    run that is shorter than the warm-up ends while it rises.

    Example:
      >>> rate = make_schedule(OptimizerConfig(learning_rate=1.0, warmup_steps=4), 10)
      >>> [round(float(rate(step)), 2) for step in (0, 3, 6, 9)]
      [0.25, 1.0, 0.55, 0.1]
    """
    falling = max(steps - config.warmup_steps, 1)
    highest = scaled_learning_rate(
        config.learning_rate, world_size, config.scale_learning_rate
    )

    def learning_rate(step: ArrayLike) -> Float[Array, ""]:
        done = jnp.asarray(step).astype(jnp.float32) + 1.0
        rising = jnp.minimum(done / max(config.warmup_steps, 1), 1.0)
        progress = jnp.clip((done - config.warmup_steps) / falling, 0.0, 1.0)
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
