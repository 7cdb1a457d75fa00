# SPDX-License-Identifier: Apache-2.0
"""Checks for settings that exclude each other, or that nothing in a run reads.

Each rule is a row of a table: when it applies, what the error shows and how to fix it.

A value other than the default that nothing reads is an error, because its author
expects an effect. A feature without work to do, such as an axis of size 1, is only a
note in the log, because one configuration serves machines of all sizes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from tessera.errors import (
    BatchSizeError,
    SettingConflictError,
    SettingValueError,
    TesseraError,
)
from tessera.models.gemma3_config import Gemma3Config
from tessera.training.config import (
    Config,
    ModelConfig,
    TrainingConfig,
    data_parallel_groups,
)
from tessera.training.optimizer_config import SgdConfig
from tessera.training.setting_fields import as_yaml

Sizes: TypeAlias = Mapping[str, int]


@dataclass(frozen=True)
class _Rule:
    """One mistake.

    Attributes:
      applies: Whether the settings make it.
      what: The error's message.
      got: The settings, as one would write them.
      fix: What to write instead.
      error: Its class.
    """

    applies: bool
    what: str
    got: str
    fix: str
    error: type[TesseraError] = SettingConflictError


def conflicts(config: Config, sizes: Sizes | None) -> list[TesseraError]:
    """Settings that exclude each other: T507, or T502 and T503 for values.

    Args:
      config: Of the run.
      sizes: Of the mesh's axes, by name; None where they are not known.
    """
    training = config.training
    rules = [
        *_resume_rules(training),
        *_step_rules(training),
        *_compression_rules(training, sizes),
        *([] if sizes is None else _pipeline_rules(training, sizes)),
    ]
    errors = [
        rule.error(rule.what, got=rule.got, fix=rule.fix)
        for rule in rules
        if rule.applies
    ]
    return errors + ([] if sizes is None else numerics_problems(config, sizes))


def _resume_rules(training: TrainingConfig) -> Iterator[_Rule]:
    resume, is_path = training.resume, training.resume not in ("none", "auto")
    has_two = training.init_from is not None and is_path
    yield _Rule(
        has_two,
        "two settings say what the run begins with",
        f"training.init_from={training.init_from}, training.resume={resume}",
        "leave one of them out; with training.resume=auto, init_from is for a run that "
        "finds no checkpoint",
    )
    yield _Rule(
        resume == "none" and training.resume_data != "exact",
        "training.resume_data has no meaning without training.resume",
        f"training.resume_data={training.resume_data}, training.resume=none",
        "leave it out, or use training.resume=auto or a folder",
        SettingValueError,
    )


def _step_rules(training: TrainingConfig) -> Iterator[_Rule]:
    yield _Rule(
        training.zero_stage >= 2 and training.sync_gradients_every > 1,
        "gradients cannot be split over dp and be exchanged seldom as well",
        f"training.zero_stage={training.zero_stage} splits them, "
        f"training.sync_gradients_every={training.sync_gradients_every} keeps whole "
        "ones on each device in between",
        "use training.sync_gradients_every=1, or training.zero_stage=1",
    )
    before = training.profile_wait + training.profile_warmup
    yield _Rule(
        training.profile_communication and before >= training.steps,
        "the run ends before the steps that are to be profiled",
        f"training.profile_wait={training.profile_wait} and "
        f"training.profile_warmup={training.profile_warmup} let {before} steps pass, "
        f"training.steps={training.steps}",
        f"use training.steps={before + training.profile_active} or more, or "
        "training.profile_wait=0 training.profile_warmup=0",
    )


def _compression_rules(
    training: TrainingConfig, sizes: Sizes | None
) -> Iterator[_Rule]:
    method, ratio = training.gradient_compression, training.compression_ratio
    if ratio != TrainingConfig.compression_ratio and method != "top_k":
        yield _Rule(
            True,
            "training.compression_ratio has no meaning without top_k",
            f"training.compression_ratio={ratio}, "
            f"training.gradient_compression={method}",
            "leave it out, or use training.gradient_compression=top_k",
            SettingValueError,
        )
        return
    if method == "none":
        return
    axes = {"dp": 1} if sizes is None else sizes
    rows = [
        ("dp" not in axes, "no axis dp in the mesh", "name an axis dp"),
        (
            "pp" in axes,
            "pipeline stages, whose gradients are reduced where they arise",
            "use a mesh without pp",
        ),
        (
            training.sync_gradients_every > 1,
            f"training.sync_gradients_every={training.sync_gradients_every}, while "
            "compressed gradients cross dp once in a step",
            "use training.sync_gradients_every=1",
        ),
        (
            training.zero_stage > 1,
            f"training.zero_stage={training.zero_stage}, which splits gradients over "
            "dp, while compressed ones are whole there",
            "use training.zero_stage=1",
        ),
    ]
    for applies, got, fix in rows:
        yield _Rule(
            applies,
            "gradients cannot be compressed in this run",
            f"training.gradient_compression={method}; {got}",
            f"{fix}, or training.gradient_compression=none",
        )


def _pipeline_rules(training: TrainingConfig, sizes: Sizes) -> Iterator[_Rule]:
    name, chunks = training.pipeline_schedule, training.pipeline_chunks
    has_stages, is_mixed = "pp" in sizes, (chunks > 1) != (name == "interleaved")
    yield _Rule(
        has_stages and is_mixed,
        "several runs of layers on a device are what makes a schedule interleaved",
        f"training.pipeline_schedule={name}, training.pipeline_chunks={chunks}",
        "use training.pipeline_schedule=interleaved with training.pipeline_chunks=2 or "
        "more, or another schedule with 1",
    )
    yield _Rule(
        has_stages and not is_mixed and training.sync_gradients_every > 1,
        "the stages of a pipeline exchange gradients where they arise",
        f"training.sync_gradients_every={training.sync_gradients_every}",
        "use training.sync_gradients_every=1, or a mesh without pp",
    )


def numerics_problems(settings: Config, sizes: Sizes) -> list[TesseraError]:
    """What keeps a run from deterministic numerics: T502, T503 and T507.

    Args:
      settings: Of the run.
      sizes: Of the mesh's axes, by name.
    """
    training, parts = settings.training, settings.training.microshards
    if training.numerics != "deterministic":
        return _unused_microshards(training)
    if parts < 1 or parts & (parts - 1):
        below = 1 << max(parts.bit_length() - 1, 0)
        return [
            SettingValueError(
                "microshards are added in pairs, so their number is a power of two",
                got=f"training.microshards={parts}",
                fix=f"use training.microshards={below} or {2 * below}",
            )
        ]
    rules = [
        *_mesh_reorders_sums(settings, sizes),
        *_settings_reorder_sums(settings),
    ]
    errors: list[TesseraError] = [
        SettingConflictError(
            "numerics cannot be deterministic in this run",
            got=f"training.numerics=deterministic; {got}",
            fix=f"{fix}, or training.numerics=fast",
        )
        for applies, got, fix in rules
        if applies
    ]
    groups = data_parallel_groups(sizes)
    rows = settings.training.micro_batch_size * groups
    if not errors and rows % parts:
        each = -(-rows // parts) * parts // groups
        errors.append(
            BatchSizeError(
                "a microbatch cannot be cut into its microshards",
                got=f"{rows} rows, training.microshards={parts}: {rows} / {parts} "
                f"leaves {rows % parts}",
                fix=f"use training.micro_batch_size={each}, or fewer microshards",
            )
        )
    return errors


def _unused_microshards(training: TrainingConfig) -> list[TesseraError]:
    default = TrainingConfig.microshards
    if training.microshards == default:
        return []
    return [
        SettingValueError(
            "training.microshards has no meaning with fast numerics",
            got=f"training.microshards={training.microshards}, training.numerics=fast",
            fix="leave it out, or use training.numerics=deterministic",
        )
    ]


def _mesh_reorders_sums(settings: Config, sizes: Sizes) -> list[tuple[bool, str, str]]:
    parts, groups = settings.training.microshards, data_parallel_groups(sizes)
    others = [
        axis
        for axis, size in sizes.items()
        if axis == "pp" or (axis not in ("dp", "fsdp") and size > 1)
    ]
    return [
        (
            bool(others),
            f"mesh axis {', '.join(map(repr, others))}, which changes the order of "
            "sums inside the model",
            "use a mesh of dp and fsdp alone",
        ),
        (
            not others and parts % groups != 0,
            f"training.microshards={parts} for {groups} data-parallel groups: "
            f"{parts} / {groups} leaves {parts % groups}",
            "use as many groups as divide training.microshards",
        ),
    ]


def _settings_reorder_sums(settings: Config) -> list[tuple[bool, str, str]]:
    training, optimizer = settings.training, settings.optimizer
    return [
        (
            settings.model.config.num_experts > 0,
            f"num_experts={settings.model.config.num_experts}, whose routers balance a "
            "whole microbatch",
            "use a model without experts",
        ),
        (
            training.gradient_compression != "none",
            f"training.gradient_compression={training.gradient_compression}",
            "use training.gradient_compression=none",
        ),
        (
            training.loss_chunk not in ("auto", "none"),
            f"training.loss_chunk={training.loss_chunk}, whose sums XLA orders "
            "otherwise on another mesh",
            "use training.loss_chunk=auto, which makes all logits at once then",
        ),
        (
            training.sync_gradients_every > 1,
            f"training.sync_gradients_every={training.sync_gradients_every}, while "
            "gradients in a fixed order are exchanged once in a step",
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
            f"optimizer.scale_learning_rate={optimizer.scale_learning_rate}, which "
            "follows the size of the mesh",
            "use optimizer.scale_learning_rate=none",
        ),
    ]


@dataclass(frozen=True)
class _Unused:
    """Settings without a use, and why.

    Attributes:
      group: How the group is called on the command line.
      config: Has their values.
      defaults: The class that has their defaults.
      names: What they are called.
      because: The setting that leaves out their use, as one would write it.
      fix: What gives them one.
    """

    group: str
    config: Any
    defaults: type
    names: tuple[str, ...]
    because: str
    fix: str

    def problem(self) -> SettingConflictError | None:
        """T507 where one of them has a value of its own."""
        values = {name: getattr(self.config, name) for name in self.names}
        given = [
            f"{self.group}.{name}"
            for name, value in values.items()
            if value != self.defaults.__dataclass_fields__[name].default
        ]
        if not given:
            return None
        shown = [f"{key}={as_yaml(values[key.rpartition('.')[2]])}" for key in given]
        verb = "have no effect" if len(given) > 1 else "has no effect"
        return SettingConflictError(
            f"{' and '.join(given)} {verb} in this run",
            got=f"{', '.join(shown)}; {self.because}",
            fix=f"leave {'them' if len(given) > 1 else 'it'} out, or {self.fix}",
        )


def unused_problems(settings: Config, sizes: Sizes | None) -> list[TesseraError]:
    """Every setting that is given and that nothing in the run reads.

    Args:
      settings: Of the run.
      sizes: Of the mesh's axes, by name; None where they are not known.
    """
    found = (*_of_model(settings), *_of_mesh(settings, sizes), *_of_run(settings))
    return [problem for each in found if (problem := each.problem()) is not None]


def _of_model(settings: Config) -> Iterator[_Unused]:
    model, optimizer = settings.model.config, settings.optimizer
    if not model.num_experts:
        names = ("experts_per_token", "capacity_factor")
        weights = ("router_balance_weight", "router_z_weight")
        yield _Unused(
            *("model", model, Gemma3Config, (*names, *weights)),
            "model.num_experts=0",
            "use a model with experts: model.num_experts=8",
        )
    if isinstance(optimizer, SgdConfig) and optimizer.momentum == 0:
        yield _Unused(
            *("optimizer", optimizer, SgdConfig, ("nesterov",)),
            "optimizer.momentum=0",
            "use an optimizer.momentum above 0",
        )


def _of_mesh(settings: Config, sizes: Sizes | None) -> Iterator[_Unused]:
    if sizes is None:
        return
    shape = f"model.mesh_shape={as_yaml(settings.model.mesh_shape)}"
    axes = {
        "cp": ("model", settings.model, ModelConfig, ("context_parallel",)),
        "tp": ("model", settings.model, ModelConfig, ("sequence_parallel",)),
        "pp": (
            *("training", settings.training, TrainingConfig),
            ("pipeline_schedule", "pipeline_chunks"),
        ),
    }
    for axis, given in axes.items():
        if axis not in sizes:
            yield _Unused(
                *given, f"{shape} has no axis {axis}", f"use a mesh with an axis {axis}"
            )


def _of_run(settings: Config) -> Iterator[_Unused]:
    training, data = settings.training, settings.data
    rows = [
        (
            not training.profile_communication,
            ("profile_wait", "profile_warmup", "profile_active"),
            "training.profile_communication=false",
            "use training.profile_communication=true",
        ),
        (
            training.checkpoint_every is None,
            ("keep",),
            "training.checkpoint_every=null",
            "use training.checkpoint_every=0, which keeps the last one",
        ),
        (
            data.validation_fraction == 0,
            ("validate_every", "validation_batches"),
            "data.validation_fraction=0",
            "keep data for validation: data.validation_fraction=0.05",
        ),
        (
            not training.sample_length,
            ("sample_prompt",),
            "training.sample_length=0",
            "use a training.sample_length above 0",
        ),
        (
            data.name == "synthetic",
            ("sample_prompt",),
            "data=synthetic, which is no text",
            "use data=text",
        ),
        (
            training.mixed_precision == "fp16",
            ("max_skipped_steps",),
            "training.mixed_precision=fp16, whose bound is the smallest loss scale",
            "use training.mixed_precision=bf16",
        ),
    ]
    for is_unused, names, because, fix in rows:
        if is_unused:
            yield _Unused("training", training, TrainingConfig, names, because, fix)
