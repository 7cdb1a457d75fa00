# SPDX-License-Identifier: Apache-2.0
"""The table of settings that exclude each other, or that a run does not read.

Those within the groups ``data`` and ``optimizer`` are beside their classes.

A value other than the default that nothing reads is an error, because its author
expects an effect. A feature without work to do, such as an axis of size 1, is only a
note in the log, because one configuration serves machines of all sizes.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Final, TypeAlias

from tessera.errors import (
    BatchSizeError,
    SettingConflictError,
    SettingValueError,
    TesseraError,
    nearest,
)
from tessera.train.config.post_training_config import (
    POLICY,
    PREFERENCE,
    GrpoConfig,
    PreferenceConfig,
)
from tessera.train.config.run_config import (
    MESH_AXES,
    Config,
    TrainingConfig,
)
from tessera.train.config.setting_fields import Conflict, as_yaml, broken
from tessera.train.loop.precision import Precision
from tessera.train.rewards.reward_names import names_model

Sizes: TypeAlias = Mapping[str, int]


def _all_of(group: str, settings: type) -> str:
    """Every setting of a group."""
    return " ".join(f"{group}.{one.name}" for one in fields(settings))


# What contradicts another setting.
EXCLUDED: Final = (
    Conflict("training.dry_run=false", "runtime.target", ": nothing runs on a target"),
    Conflict(
        "training.resume!=none|auto",
        "training.init_from",
        ", which says what the run begins with, too",
    ),
    Conflict(
        "training.global_batch_size",
        "training.gradient_accumulation_steps",
        ", which says how many microbatches a step has, too",
    ),
    Conflict(
        "training.zero_stage=2|3",
        "training.sync_gradients_every",
        " splits gradients over dp, which have to be whole on each device for this",
    ),
    Conflict(
        "training.resume=none training.init_from=null",
        "training.eval_only",
        ": no parameters were trained, so there is nothing to evaluate",
    ),
    Conflict(
        "training.resume=auto",
        "training.eval_only",
        ": its own folder has no checkpoints, so there is nothing to evaluate",
    ),
    Conflict(
        "data.validation_fraction=0.0",
        "training.eval_only",
        ": there is nothing to evaluate",
    ),
    Conflict(
        "training.eval_only=false",
        "data.validation_fraction=1.0",
        ": nothing is left to train on",
    ),
    Conflict(
        "training.eval_only=true",
        "training.profile_communication runtime.verify_every",
        " takes no steps",
    ),
    Conflict(
        "training.objective=policy",
        "training.eval_only",
        ": the reward of given weights is validated before the first step",
    ),
    Conflict("grpo.server", "grpo.slots grpo.mesh_shape", ": the server samples"),
    Conflict(
        "training.checkpoint_every=null",
        "runtime.verify_every",
        ": there are no checkpoints to resume from",
    ),
    Conflict(
        "training.numerics=fast",
        "runtime.verify_every",
        ": only with deterministic numerics have other devices the same bits",
    ),
    Conflict(
        "training.numerics=deterministic",
        "training.sync_gradients_every training.loss_chunk!=auto|none "
        "optimizer.name=adafactor optimizer.scale_learning_rate",
        ": these make other sums on another mesh",
    ),
    Conflict(
        "training.numerics=deterministic",
        "training.pipeline_schedule training.pipeline_gather "
        "model.sequence_parallel model.context_parallel",
        ": each device computes whole rows with all layers",
    ),
)
# What a feature would read that is off.
UNREAD: Final = (
    Conflict("runtime.target=null", "runtime.target_compiler"),
    Conflict(
        "training.profile_communication=false",
        "training.profile_wait training.profile_warmup training.profile_active",
    ),
    Conflict("training.checkpoint_every=null", "training.keep"),
    Conflict("training.resume=none", "training.resume_data"),
    Conflict(
        "data.validation_fraction=0.0",
        "training.validate_every training.validation_sequences",
    ),
    Conflict("training.sample_length=0", "training.sample_prompt"),
    Conflict("data.name=synthetic", "training.sample_prompt", ", which is no text"),
    Conflict(
        "training.on_spike=none", "training.spike_threshold training.spike_window"
    ),
    Conflict("training.numerics=fast", "training.reduction_parts"),
    Conflict("training.objective!=preference", _all_of("preference", PreferenceConfig)),
    Conflict("training.objective!=policy", "rewards " + _all_of("grpo", GrpoConfig)),
    Conflict("preference.loss!=dpo", "preference.label_smoothing"),
    Conflict("preference.loss!=simpo", "preference.margin"),
    Conflict("preference.loss=orpo|simpo", "preference.reference"),
    Conflict("grpo.kl_coefficient=0.0", "grpo.kl_estimator grpo.reference"),
    Conflict(
        "rewards=null",
        "grpo.reward_weights grpo.reward_time_limit grpo.reward_processes",
    ),
    Conflict("grpo.environment=null", "grpo.max_turns"),
    Conflict("grpo.server=null", "grpo.server_model grpo.server_weights"),
)
# What axes would read that a mesh does not have.
OF_AXES: Final = {
    "cp": "model.context_parallel",
    "tp": "model.sequence_parallel",
    "pp": "training.pipeline_schedule training.pipeline_chunks "
    "training.pipeline_gather",
}


def conflicts(config: Config, sizes: Sizes | None) -> Iterator[TesseraError]:
    """Settings that exclude each other, and those that nothing reads: T507.

    Args:
      config: Of the run.
      sizes: Of the mesh's axes, by name; None where they are not known.
    """
    excluded = [*EXCLUDED, *_excluded(config, sizes or {})]
    yield from broken(excluded, config, what="cannot be used in this run")
    yield from broken([*UNREAD, *_unread(config, sizes)], config)
    yield from _of_objective(config)


def _of_objective(config: Config) -> Iterator[SettingConflictError]:
    """Whether a run has the data and the rewards that its objective learns from."""
    objective, data = config.training.objective, config.data.name
    wanted = {PREFERENCE: "preferences", POLICY: "prompts"}
    needed = wanted.get(objective)
    if (needed or data) != data:
        where = "data.path=<file>"
        if data == "mixture" and objective == PREFERENCE:
            where = "data.sources=<those of the mixture>"
        yield SettingConflictError(
            f"training.objective={objective} learns from data={needed}",
            got=f"data={data}",
            fix=f"write data={needed} {where}",
        )
    elif needed is None and data in wanted.values():
        other = next(name for name in wanted if wanted[name] == data)
        recipe = "grpo" if other == POLICY else other
        yield SettingConflictError(
            f"data={data} is not for training.objective={objective}",
            got=f"recipe={config.recipe}",
            fix=f"write recipe={recipe}, or training.objective={other}",
        )
    if objective == POLICY and not (config.rewards or config.grpo.environment):
        yield SettingConflictError(
            "a policy learns from rewards",
            got="rewards=null",
            fix="write rewards=[my_module:my_function], or name a grpo.environment",
        )


def _excluded(config: Config, sizes: Sizes) -> Iterator[Conflict]:
    """What values exclude that follow from others."""
    training = config.training
    if training.profile_wait + training.profile_warmup >= training.steps:
        yield Conflict(
            f"{training.profile_wait=} {training.profile_warmup=} {training.steps=}",
            "training.profile_communication",
            ": the run ends before the steps that are profiled",
        )
    coupling = config.model.kind.row_coupling(config.model.config)
    if coupling is not None:
        gather = " training.pipeline_gather" if "pp" in sizes else ""
        yield Conflict("", "training.numerics" + gather, coupling)
    exclusive = "training.sync_gradients_every"
    if _precision(training).reduces_narrow:
        exclusive += " training.mixed_precision"
        yield Conflict(
            "training.mixed_precision",
            "training.numerics training.sync_gradients_every",
            ", and gradients are reduced in f32 here",
        )
    if "pp" not in sizes:
        return
    yield Conflict(
        _mesh(config),
        exclusive,
        ", and the stages of pp add up gradients in f32 where they arise",
    )
    yield Conflict(
        "training.pipeline_chunks=1",
        "training.pipeline_schedule=interleaved",
        ", and the schedule needs 2 or more",
    )
    yield Conflict(
        "training.pipeline_chunks!=2",
        "training.pipeline_schedule=dualpipev",
        ", and the schedule needs 2",
    )
    yield Conflict(
        "training.pipeline_schedule!=interleaved|dualpipev",
        "training.pipeline_chunks!=0|1",
        ", which has one chunk",
    )


def _unread(config: Config, sizes: Sizes | None) -> Iterator[Conflict]:
    """What the model, the dtypes and the mesh of a run leave unread."""
    for settings, reason in config.model.kind.unused_settings(config.model.config):
        yield Conflict(reason, settings)
    if _precision(config.training).computation == "float16":
        yield Conflict(
            "training.mixed_precision training.on_spike!=skip",
            "training.max_skipped_steps",
            ": the bound is the smallest loss scale",
        )
    if config.rewards and all(map(names_model, config.rewards)):
        unread = "grpo.reward_time_limit grpo.reward_processes"
        rewards = f"rewards={as_yaml(config.rewards)}"
        yield Conflict(rewards, unread, ": models score on the mesh")
    axes = MESH_AXES if sizes is None else sizes
    for axis, settings in OF_AXES.items():
        if axis not in axes:
            yield Conflict(_mesh(config), settings, f" has no axis {axis}")
    if "pp" in axes and "fsdp" not in axes:
        yield Conflict(_mesh(config), "training.pipeline_gather", " has no axis fsdp")


def _mesh(config: Config) -> str:
    """A condition that holds, and has a message name the mesh."""
    return f"model.mesh_shape={as_yaml(config.model.mesh_shape)}"


def _precision(training: TrainingConfig) -> Precision:
    """The dtypes of a run; the plain ones where the setting is no policy."""
    try:
        return training.precision
    except SettingValueError:
        return Precision()


def numerics_problems(config: Config, sizes: Sizes) -> Iterator[TesseraError]:
    """Why a step cannot be cut into the parts of deterministic numerics: T503, T507.

    Args:
      config: Of the run.
      sizes: Of the mesh's axes, by name.
    """
    training, parts = config.training, config.training.reduction_parts
    micro, devices = training.micro_batch_size, math.prod(sizes.values())
    rows = config.rows_per_step(sizes)
    if training.numerics == "fast":
        return
    if parts < devices:
        yield SettingConflictError(
            "deterministic numerics need a part of the rows for each device",
            got=f"{training.reduction_parts=} for {devices} devices",
            fix=f"use at most {parts} devices, or more parts",
        )
    elif rows % parts:
        near = nearest(range(parts, rows + parts + 1, parts), rows)
        yield BatchSizeError(
            "a step cannot be cut into its parts",
            got=f"{rows} rows, {training.reduction_parts=}: {rows} / {parts} leaves "
            f"{rows % parts}",
            fix=f"use a batch of {near} rows, or fewer parts",
        )
    elif rows // parts > micro:
        enough = 1 << (-(-rows // micro) - 1).bit_length()
        yield BatchSizeError(
            "a part of the rows is larger than a microbatch of one device",
            got=f"{rows} rows in {training.reduction_parts=}: {rows // parts} each, "
            f"{training.micro_batch_size=}",
            fix=f"use training.reduction_parts={enough} or "
            f"training.micro_batch_size={rows // parts}",
        )
