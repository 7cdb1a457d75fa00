# SPDX-License-Identifier: Apache-2.0
"""Checks for settings that nothing in a run reads.

A value other than the default that nothing reads is an error, because its author
expects an effect. A feature without work to do, such as an axis of size 1, is only a
note in the log, because one configuration serves machines of all sizes.
"""

from collections.abc import Iterator
from typing import Any

from tessera.errors import SettingConflictError, SettingValueError
from tessera.training.config import MESH_AXES, Config, TrainingConfig
from tessera.training.optimizer_config import SgdConfig
from tessera.training.setting_conflicts import Sizes
from tessera.training.setting_fields import as_yaml


def unused_problems(
    settings: Config, sizes: Sizes | None
) -> Iterator[SettingConflictError]:
    """Every setting that is given and that nothing in the run reads: T507.

    Args:
      settings: Of the run.
      sizes: Of the mesh's axes, by name; None where they are not known.
    """
    for is_unused, names, because, fix in _features(settings, sizes):
        if not is_unused:
            continue
        values = {name: _value_and_default(settings, name) for name in names.split()}
        given = [name for name, (value, default) in values.items() if value != default]
        if not given:
            continue
        several = len(given) > 1
        shown = ", ".join(f"{name}={as_yaml(values[name][0])}" for name in given)
        yield SettingConflictError(
            f"{' and '.join(given)} {'have' if several else 'has'} no effect in this "
            "run",
            got=f"{shown}; {because}",
            fix=f"leave {'them' if several else 'it'} out, or {fix}",
        )


def _value_and_default(settings: Config, name: str) -> tuple[Any, Any]:
    """Of a setting by its dotted name; a model's sizes are one level down."""
    group, *path, last = name.split(".")
    config = getattr(settings, group)
    if group == "model" and not hasattr(config, [*path, last][0]):
        config = config.config
    for part in path:
        config = getattr(config, part)
    return getattr(config, last), type(config).__dataclass_fields__[last].default


def _features(
    settings: Config, sizes: Sizes | None
) -> Iterator[tuple[bool, str, str, str]]:
    """Whether a feature is off, the settings that it reads, why, and the fix."""
    axes = MESH_AXES if sizes is None else sizes
    training, optimizer = settings.training, settings.optimizer
    for unused in settings.model.kind.unused_settings(settings.model.config):
        yield (True, *unused)
    yield (
        isinstance(optimizer, SgdConfig) and optimizer.momentum == 0,
        "optimizer.nesterov",
        "optimizer.momentum=0",
        "use an optimizer.momentum above 0",
    )
    for axis, names in {
        "cp": "model.context_parallel",
        "tp": "model.sequence_parallel",
        "pp": "training.pipeline_schedule training.pipeline_chunks "
        "training.pipeline_gather",
        "fsdp": "training.pipeline_gather" * ("pp" in axes),
    }.items():
        yield (
            axis not in axes,
            names,
            f"model.mesh_shape={as_yaml(settings.model.mesh_shape)} has no axis {axis}",
            f"use a mesh with an axis {axis}",
        )
    yield (
        settings.runtime.target is None,
        "runtime.target_compiler runtime.timeline_dir",
        "runtime.target=null",
        "name a runtime.target",
    )
    yield (
        not training.profile_communication,
        "training.profile_wait training.profile_warmup training.profile_active",
        "training.profile_communication=false",
        "use training.profile_communication=true",
    )
    yield (
        training.checkpoint_every is None,
        "training.keep",
        "training.checkpoint_every=null",
        "use training.checkpoint_every=0, which keeps the last one",
    )
    yield (
        settings.data.validation_fraction == 0,
        "training.validate_every training.validation_sequences",
        "data.validation_fraction=0",
        "keep data for validation: data.validation_fraction=0.05",
    )
    yield (
        not training.sample_length,
        "training.sample_prompt",
        "training.sample_length=0",
        "use a training.sample_length above 0",
    )
    yield (
        settings.data.name == "synthetic",
        "training.sample_prompt",
        "data=synthetic, which is no text",
        "use data=text",
    )
    yield (
        training.on_spike == "none",
        "training.spike_threshold training.spike_window",
        "training.on_spike=none",
        "use training.on_spike=warn, skip or rollback",
    )
    yield (
        _computes_in(training, "float16") and training.on_spike != "skip",
        "training.max_skipped_steps",
        "training.mixed_precision=fp16, whose bound is the smallest loss scale",
        "use training.mixed_precision=bf16",
    )


def _computes_in(training: TrainingConfig, dtype: str) -> bool:
    """Whether the setting, which may be no policy, names this dtype of computation."""
    try:
        return training.precision.computation == dtype
    except SettingValueError:
        return False
