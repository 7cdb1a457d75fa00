# SPDX-License-Identifier: Apache-2.0
"""Checks for settings that exclude each other."""

import math
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from tessera.errors import (
    BatchSizeError,
    SettingConflictError,
    SettingValueError,
    TesseraError,
    nearest,
)
from tessera.training.config import (
    Config,
    ModelConfig,
    TrainingConfig,
    data_parallel_groups,
)
from tessera.training.setting_fields import as_yaml

Sizes: TypeAlias = Mapping[str, int]
# What a feature is incompatible with: whether it is so, the settings, the fix.
Obstacle: TypeAlias = tuple[bool, str, str]


def conflicts(config: Config, sizes: Sizes | None) -> Iterator[TesseraError]:
    """Settings that exclude each other: T507, or T502 and T503 for values.

    Args:
      config: Of the run.
      sizes: Of the mesh's axes, by name; None where they are not known.
    """
    training = config.training
    if config.runtime.target is not None and not training.dry_run:
        yield SettingConflictError(
            "a target is a machine to compile for, and nothing runs on it",
            got=f"{config.runtime.target=!s}, training.dry_run=false".replace(
                "config.", ""
            ),
            fix="use training.dry_run=true, or leave runtime.target out",
        )
    yield from _resume_conflicts(training)
    yield from _step_conflicts(training)
    yield from _evaluation_conflicts(config)
    yield from _rollback_conflicts(config)
    yield from _compression_conflicts(training, {"dp": 1} if sizes is None else sizes)
    yield from _reduction_conflicts(training, sizes or {})
    if sizes is not None:
        if "pp" in sizes:
            yield from _pipeline_conflicts(config)
        yield from numerics_problems(config, sizes)


def _resume_conflicts(training: TrainingConfig) -> Iterator[TesseraError]:
    if training.init_from is not None and training.resume not in ("none", "auto"):
        yield SettingConflictError(
            "two settings say what the run begins with",
            got=f"{training.init_from=!s}, {training.resume=!s}",
            fix="leave one of them out; with training.resume=auto, init_from is for a "
            "run that finds no checkpoint",
        )
    if training.resume == "none" and training.resume_data != "exact":
        yield SettingValueError(
            "training.resume_data has no meaning without training.resume",
            got=f"{training.resume_data=!s}, training.resume=none",
            fix="leave it out, or use training.resume=auto or a folder",
        )


def _step_conflicts(training: TrainingConfig) -> Iterator[TesseraError]:
    if training.global_batch_size and training.gradient_accumulation_steps > 1:
        yield SettingConflictError(
            "two settings say how many microbatches a step has",
            got=f"{training.global_batch_size=}, "
            f"{training.gradient_accumulation_steps=}",
            fix="leave one of them out",
        )
    if training.zero_stage >= 2 and training.sync_gradients_every > 1:
        yield SettingConflictError(
            "gradients cannot be split over dp and be exchanged seldom as well",
            got=f"{training.zero_stage=} splits them, {training.sync_gradients_every=} "
            "keeps whole ones on each device in between",
            fix="use training.sync_gradients_every=1, or training.zero_stage=1",
        )
    before = training.profile_wait + training.profile_warmup
    if training.profile_communication and before >= training.steps:
        yield SettingConflictError(
            "the run ends before the steps that are to be profiled",
            got=f"{training.profile_wait=} and {training.profile_warmup=} let {before} "
            f"steps pass, {training.steps=}",
            fix=f"use training.steps={before + training.profile_active} or more, or "
            "training.profile_wait=0 training.profile_warmup=0",
        )


def _reduction_conflicts(
    training: TrainingConfig, sizes: Sizes
) -> Iterator[TesseraError]:
    try:
        reduction = training.precision.reduction
    except SettingValueError:
        return
    if reduction == "float32":
        return
    yield from _incompatible(
        "gradients are reduced in f32 here",
        f"training.mixed_precision={as_yaml(training.mixed_precision)}",
        "leave reduction out of training.mixed_precision",
        (
            "pp" in sizes,
            "the mesh axis 'pp', whose stages add up microbatches",
            "drop 'pp' from the mesh",
        ),
        (
            training.numerics != "fast",
            f"training.numerics={training.numerics}",
            "use training.numerics=fast",
        ),
        (
            training.gradient_compression != "none",
            f"training.gradient_compression={training.gradient_compression}",
            "use training.gradient_compression=none",
        ),
        (
            training.sync_gradients_every > 1,
            f"training.sync_gradients_every={training.sync_gradients_every}",
            "use training.sync_gradients_every=1",
        ),
    )


def _evaluation_conflicts(config: Config) -> Iterator[TesseraError]:
    training = config.training
    if not training.eval_only:
        return
    yield from _incompatible(
        "this run has nothing to evaluate",
        "training.eval_only=true",
        "training.eval_only=false",
        (
            training.resume == "none" and training.init_from is None,
            "no parameters that were trained",
            "name a run, training.resume=<folder>, or training.init_from=<weights>",
        ),
        (
            training.resume == "auto",
            "training.resume=auto, and its own folder has no checkpoints",
            "name the run: training.resume=<folder>",
        ),
        (
            config.data.validation_fraction == 0,
            "data.validation_fraction=0",
            "use data.validation_fraction=0.05",
        ),
        (
            training.profile_communication,
            "training.profile_communication=true, which measures steps",
            "use training.profile_communication=false",
        ),
    )


def _rollback_conflicts(config: Config) -> Iterator[TesseraError]:
    training, verify_every = config.training, config.runtime.verify_every
    for setting, is_set in {
        "training.on_spike=rollback": training.on_spike == "rollback",
        f"runtime.verify_every={verify_every}": verify_every is not None,
    }.items():
        yield from _incompatible(
            "this run has no checkpoints to go back to",
            setting,
            f"leave out {setting.partition('=')[0]}",
            (
                is_set and training.checkpoint_every is None,
                "training.checkpoint_every=null",
                "use training.checkpoint_every=100",
            ),
            (
                is_set and training.eval_only,
                "training.eval_only=true, which takes no steps",
                "use training.eval_only=false",
            ),
        )


def _compression_conflicts(
    training: TrainingConfig, sizes: Sizes
) -> Iterator[TesseraError]:
    method, ratio = training.gradient_compression, training.compression_ratio
    if ratio != TrainingConfig.compression_ratio and method != "top_k":
        yield SettingValueError(
            "training.compression_ratio has no meaning without top_k",
            got=f"{training.compression_ratio=}, {training.gradient_compression=!s}",
            fix="leave it out, or use training.gradient_compression=top_k",
        )
    elif method != "none":
        yield from _incompatible(
            "gradients cannot be compressed in this run",
            f"{training.gradient_compression=!s}",
            "training.gradient_compression=none",
            ("dp" not in sizes, "no axis dp in the mesh", "name an axis dp"),
            (
                "pp" in sizes,
                "pipeline stages, whose gradients are reduced where they arise",
                "use a mesh without pp",
            ),
            (
                training.sync_gradients_every > 1,
                f"{training.sync_gradients_every=}, while compressed gradients cross "
                "dp once in a step",
                "use training.sync_gradients_every=1",
            ),
            (
                training.zero_stage > 1,
                f"{training.zero_stage=}, which splits gradients over dp, while "
                "compressed ones are whole there",
                "use training.zero_stage=1",
            ),
        )


def _pipeline_conflicts(config: Config) -> Iterator[TesseraError]:
    training = config.training
    coupling = config.model.kind.row_coupling(config.model.config)
    is_interleaved = training.pipeline_schedule == "interleaved"
    if (training.pipeline_chunks > 1) != is_interleaved:
        yield SettingConflictError(
            "several runs of layers on a device are what makes a schedule interleaved",
            got=f"{training.pipeline_schedule=!s}, {training.pipeline_chunks=}",
            fix="use training.pipeline_schedule=interleaved with "
            "training.pipeline_chunks=2 or more, or another schedule with 1",
        )
    elif training.sync_gradients_every > 1:
        yield SettingConflictError(
            "the stages of a pipeline exchange gradients where they arise",
            got=f"{training.sync_gradients_every=}",
            fix="use training.sync_gradients_every=1, or a mesh without pp",
        )
    elif training.pipeline_gather == "step" and coupling is not None:
        yield SettingConflictError(
            "parameters cannot be gathered once: experts balance tokens over fsdp",
            got=f"{training.pipeline_gather=!s}; {coupling}",
            fix="use training.pipeline_gather=tick, or a model without it",
        )


def numerics_problems(settings: Config, sizes: Sizes) -> list[TesseraError]:
    """What keeps a run from deterministic numerics: T502, T503 and T507.

    Args:
      settings: Of the run.
      sizes: Of the mesh's axes, by name.
    """
    training, parts = settings.training, settings.training.microshards
    if training.numerics != "deterministic":
        if parts == TrainingConfig.microshards:
            return []
        return [
            SettingValueError(
                "training.microshards has no meaning with fast numerics",
                got=f"{training.microshards=}, training.numerics=fast",
                fix="leave it out, or use training.numerics=deterministic",
            )
        ]
    if parts < 1 or parts & (parts - 1):
        below = 1 << max(parts.bit_length() - 1, 0)
        return [
            SettingValueError(
                "microshards are added in pairs, so their number is a power of two",
                got=f"{training.microshards=}",
                fix=f"use training.microshards={below} or {2 * below}",
            )
        ]
    return [*_reordered_sums(settings, sizes)] or [*_uncut_steps(training, sizes)]


def _uncut_steps(training: TrainingConfig, sizes: Sizes) -> Iterator[BatchSizeError]:
    """Whether microshards are of as many rows each, and a device has room for one."""
    parts, micro = training.microshards, training.micro_batch_size
    groups = data_parallel_groups(sizes)
    microbatches = training.gradient_accumulation_steps
    rows = training.global_batch_size or micro * groups * microbatches
    if rows % parts:
        near = nearest(range(parts, rows + parts + 1, parts), rows)
        yield BatchSizeError(
            "a step cannot be cut into its microshards",
            got=f"{rows} rows, {training.microshards=}: {rows} / {parts} leaves "
            f"{rows % parts}",
            fix=f"use a batch of {near} rows, or fewer microshards",
        )
    elif rows // parts > micro:
        enough = 1 << (-(-rows // micro) - 1).bit_length()
        yield BatchSizeError(
            "a microshard is larger than a microbatch of one device",
            got=f"{rows} rows in {training.microshards=}: {rows // parts} each, "
            f"{training.micro_batch_size=}",
            fix=f"use training.microshards={enough} or "
            f"training.micro_batch_size={rows // parts}",
        )


def _reordered_sums(settings: Config, sizes: Sizes) -> Iterator[SettingConflictError]:
    """What would add in another order on another mesh, or in another run."""
    training, optimizer = settings.training, settings.optimizer
    parts, devices = training.microshards, math.prod(sizes.values())
    coupling = settings.model.kind.row_coupling(settings.model.config)
    return _incompatible(
        "numerics cannot be deterministic in this run",
        "training.numerics=deterministic",
        "training.numerics=fast",
        (
            parts < devices,
            f"{training.microshards=} for {devices} devices: some have none",
            f"use at most {parts} devices, or more microshards",
        ),
        *_idle_settings(settings),
        (
            coupling is not None,
            f"{coupling}",
            "use a model without it",
        ),
        (
            training.gradient_compression != "none",
            f"{training.gradient_compression=!s}",
            "use training.gradient_compression=none",
        ),
        (
            training.loss_chunk not in ("auto", "none"),
            f"{training.loss_chunk=!s}, whose sums XLA orders otherwise on another "
            "mesh",
            "use training.loss_chunk=auto, which makes all logits at once then",
        ),
        (
            training.sync_gradients_every > 1,
            f"{training.sync_gradients_every=}, while gradients in a fixed order are "
            "exchanged once in a step",
            "use training.sync_gradients_every=1",
        ),
        (
            optimizer.name == "adafactor",
            "optimizer.name=adafactor, which sums over rows and columns that a mesh "
            "may split",
            "use optimizer=adamw",
        ),
        (
            optimizer.scale_learning_rate != "none",
            f"{optimizer.scale_learning_rate=!s}, which follows the size of the mesh",
            "use optimizer.scale_learning_rate=none",
        ),
    )


def _idle_settings(settings: Config) -> Iterator[Obstacle]:
    """What would do nothing where each device computes whole rows with all layers."""
    training, model = settings.training, settings.model
    values = {
        "training.pipeline_schedule": training.pipeline_schedule,
        "training.pipeline_gather": training.pipeline_gather,
        "model.sequence_parallel": model.sequence_parallel,
        "model.context_parallel": model.context_parallel,
    }
    for name, value in values.items():
        owner = TrainingConfig if name.startswith("training") else ModelConfig
        is_set = value != getattr(owner, name.partition(".")[2])
        yield (
            is_set,
            f"{name}={as_yaml(value)}, while each device computes whole rows with all "
            "layers",
            "leave it out",
        )


def _incompatible(
    what: str, feature: str, without: str, *obstacles: Obstacle
) -> Iterator[SettingConflictError]:
    """T507 for each obstacle to a feature that a setting asks for.

    Args:
      what: The error's message.
      feature: The setting that asks for it, as one would write it.
      without: The setting that does not.
      obstacles: What it is incompatible with.
    """
    for applies, got, fix in obstacles:
        if applies:
            yield SettingConflictError(
                what, got=f"{feature}; {got}", fix=f"{fix}, or {without}"
            )
