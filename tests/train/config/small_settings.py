# SPDX-License-Identifier: Apache-2.0
"""Settings of a run of ``tiny``, and what their checks find."""

from dataclasses import replace

from tessera.train.config import settings_checks
from tessera.train.config.layout_checks import layout_problems
from tessera.train.config.run_config import Config, ModelConfig, TrainingConfig
from tessera.train.models.named_models import config_of

TINY = ModelConfig(name="tiny", config=config_of("tiny"))


def settings(*, mesh_shape=((1, 1), ("fsdp", "tp")), name="tiny", **training):
    model = replace(TINY, mesh_shape=mesh_shape)
    return Config(name=name, model=model, training=TrainingConfig(**training))


def check(given):
    """What a command line is told, first of the settings, then of their layout."""
    return settings_checks.check(given) or layout_problems(given)
