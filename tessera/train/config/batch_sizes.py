# SPDX-License-Identifier: Apache-2.0
"""Derives microbatches and accumulation from the global batch; imports no JAX.

With ``training.global_batch_size`` a run learns from as many sequences in each step on
every mesh. The data-parallel groups share them, and each group takes its share in as
few microbatches as fit ``training.micro_batch_size``.
"""

from collections.abc import Mapping
from dataclasses import replace

from tessera.errors import BatchSizeError, nearest
from tessera.train.config.run_config import Config, data_parallel_groups


def with_batch_sizes(config: Config, sizes: Mapping[str, int]) -> Config:
    """A configuration whose microbatches are those of its global batch on a mesh.

    Args:
      config: Of the run; one without a global batch is returned as it is.
      sizes: Of the mesh's axes, by name.

    Raises:
      BatchSizeError: [T503] the data-parallel groups cannot share the global batch.

    Example:
      >>> from tessera.train.config.run_config import Config, ModelConfig
      >>> from tessera.train.config.run_config import TrainingConfig
      >>> training = TrainingConfig(global_batch_size=96, micro_batch_size=8)
      >>> model = ModelConfig(name="m", config=None)
      >>> config = with_batch_sizes(Config("m", model, training), {"fsdp": 4, "tp": 2})
      >>> config.training.micro_batch_size, config.training.gradient_accumulation_steps
      (8, 3)
    """
    training, groups = config.training, data_parallel_groups(sizes)
    total = training.global_batch_size
    if total is None:
        return config
    if total % groups:
        near = nearest(range(groups, total + groups + 1, groups), total)
        raise BatchSizeError(
            "the data-parallel groups of the mesh cannot share the global batch",
            got=f"{training.global_batch_size=}: {total} / {groups} groups leaves "
            f"{total % groups}",
            fix=f"use training.global_batch_size={near}, or a mesh with as many groups "
            "as divide it",
        )
    share = total // groups
    micro = largest_divisor(share, training.micro_batch_size)
    training = replace(
        training, micro_batch_size=micro, gradient_accumulation_steps=share // micro
    )
    return replace(config, training=training)


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of a number that is at most ``most``.

    Example:
      >>> largest_divisor(12, 8), largest_divisor(7, 6)
      (6, 1)
    """
    return next(d for d in range(min(number, most), 0, -1) if number % d == 0)
