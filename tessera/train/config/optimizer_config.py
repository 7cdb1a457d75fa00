# SPDX-License-Identifier: Apache-2.0
"""The settings of the optimizers: a class for each, so that ``sgd`` has no ``beta2``.

``optimizers.py`` makes them. Nothing here imports JAX.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from tessera.errors import (
    SettingValueError,
    TesseraError,
    UnknownOptimizerError,
    did_you_mean,
)
from tessera.train.config.setting_fields import (
    MOST_COUNT,
    Conflict,
    as_f32,
    broken,
    problems_of,
    setting,
)

SCHEDULES: Final = ("cosine", "linear", "constant")
SCALINGS: Final = ("none", "linear", "sqrt")


@dataclass(frozen=True)
class OptimizerConfig:
    """What every optimizer has: a name and a learning rate over time.

    Attributes:
      name: Which optimizer; the files of ``configs/optimizer`` set it.
      learning_rate: The highest learning rate, reached at the end of the warm-up.
      scale_learning_rate: Multiply it by the number of data-parallel groups (linear) or
        by the root of that (sqrt).
      warmup_steps: Steps over which the learning rate rises in a line from zero; below
        1, a fraction of training.steps.
      schedule: How it falls from there to the last step of the run.
      final_fraction: The learning rate at the last step, as a fraction of the highest.
    """

    name: str = setting("adamw")
    learning_rate: float = setting(3e-3, above=0)
    scale_learning_rate: str = setting("none", choices=SCALINGS)
    warmup_steps: int | float = setting(
        20,
        least=0,
        most=MOST_COUNT,
        test=lambda steps: isinstance(steps, int) or steps < 1,
        legal="a number of steps, or a fraction below 1,",
    )
    schedule: str = setting("cosine", choices=SCHEDULES, error=UnknownOptimizerError)
    final_fraction: float = setting(0.1, least=0, most=1)

    def warmup(self, steps: int) -> int:
        """Steps of the warm-up in a run of so many steps.

        Example:
          >>> [OptimizerConfig(warmup_steps=given).warmup(100) for given in (20, 0.03)]
          [20, 3]
        """
        given = self.warmup_steps
        return given if isinstance(given, int) else round(given * steps)


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
      weight_decay: The fraction of a matrix that is taken off it per step, times the
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
    least_dim_to_factor: int = setting(128, least=1, most=MOST_COUNT)


# The settings of each optimizer, by its name.
OPTIMIZERS: Final[Mapping[str, type[OptimizerConfig]]] = MappingProxyType(
    {
        cls.name: cls
        for cls in (AdamWConfig, AdamConfig, SgdConfig, LionConfig, AdafactorConfig)
    }
)


_UNREAD: Final = (
    Conflict("momentum=0.0", "nesterov"),
    Conflict("schedule=constant", "final_fraction!=0.1|1.0"),
)


def check(config: OptimizerConfig, world_size: int = 1) -> list[TesseraError]:
    """Every mistake in an optimizer's settings.

    T505 for names, T502 for values, T507 for settings that have no effect.

    Args:
      config: The settings.
      world_size: Data-parallel groups, by whose number the rate may be scaled.
    """
    errors: list[TesseraError] = []
    if OPTIMIZERS.get(config.name) is not type(config):
        errors.append(
            UnknownOptimizerError(
                "optimizer.name is what optimizer= chooses, with its settings",
                got=f"optimizer.name={config.name}",
                fix=f"use optimizer=<name>: {did_you_mean(config.name, OPTIMIZERS)}",
            )
        )
    if ranges := problems_of(config, "optimizer"):
        return errors + ranges
    rule = config.scale_learning_rate
    highest = scaled_learning_rate(config.learning_rate, world_size, rule)
    if as_f32(highest) == float("inf"):
        errors.append(
            SettingValueError(
                "the scaled learning rate is beyond what a float32 holds",
                got=f"optimizer.learning_rate={config.learning_rate} scaled by "
                f"optimizer.scale_learning_rate={rule} for {world_size} data-parallel "
                "groups",
                fix="use a lower optimizer.learning_rate",
            )
        )
    return [*errors, *broken(_UNREAD, config, "optimizer")]


def unusual_rate(
    config: OptimizerConfig, world_size: int, *, trains_all: bool
) -> str | None:
    """A warning where the learning rate would likely undo weights that are given.

    Only for Adam and what moves each parameter by about the learning rate, as it does:
    rates of SGD follow the gradients, and those of Adafactor the parameters.

    Args:
      config: The settings.
      world_size: Data-parallel groups, by whose number the rate may be scaled.
      trains_all: Whether all parameters are trained, and not adapters or a few.
    """
    if not isinstance(config, (AdamConfig, LionConfig)):
        return None
    factor = 0.2 if isinstance(config, LionConfig) else 1.0  # arXiv 2302.06675
    low, high, most = (5e-6, 5e-5, 1e-4) if trains_all else (5e-5, 5e-4, 2e-3)
    rule = config.scale_learning_rate
    rate = scaled_learning_rate(config.learning_rate, world_size, rule)
    if rate <= most * factor:
        return None
    what = "all parameters" if trains_all else "adapters or some parameters"
    return (
        f"a learning rate of {rate:g} likely undoes the weights that the run begins "
        f"with: for {config.name}, optimizer.learning_rate is usually "
        f"{low * factor:g} to {high * factor:g} where {what} are trained"
    )


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
