# SPDX-License-Identifier: Apache-2.0
"""What is wrong with the settings of a run, before anything is compiled or written."""

import re
from collections.abc import Sequence
from math import lcm, prod
from typing import cast

from tessera.errors import (
    BatchSizeError,
    MeshShapeError,
    OutputPathError,
    SettingConflictError,
    SettingValueError,
    TesseraError,
    UnknownAxisError,
    did_you_mean,
)
from tessera.mesh import Mesh
from tessera.models.remat import policies_of, policies_of_stage
from tessera.models.rules import Placement
from tessera.ops.attention.spread import Method
from tessera.training import optimizers
from tessera.training.config import (
    MESH_AXES,
    ModelSettings,
    Settings,
    TrainingConfig,
)
from tessera.training.data import config as data_config
from tessera.training.data.config import DataConfig
from tessera.training.numerics_checks import numerics_problems
from tessera.training.pipelined import schedule_of, split_of
from tessera.training.settings import as_yaml, problems_of


def check(settings: Settings) -> list[TesseraError]:
    """Every mistake that can be seen in the settings alone; starts no backend.

    T101, T102, T103 and T402 for the mesh, T502 and T505 for values, T503 for batches,
    T504 for the run's name, T507 for settings that exclude each other.
    """
    mesh, mesh_errors = _read_mesh(settings.model)
    return [
        *_check_name(settings.name),
        *mesh_errors,
        *problems_of(settings.model, "model"),
        *problems_of(settings.training, "training"),
        *_check_resume(settings.training),
        *_check_accumulation(settings.training),
        *_check_zero(settings.training),
        *_check_profile(settings.training),
        *_check_remat(settings, mesh),
        *_check_loss_chunk(settings.training.loss_chunk),
        *_check_compression(settings.training, mesh),
        *([] if mesh is None else numerics_problems(settings, mesh)),
        *_check_pipeline(settings, mesh),
        *_check_sequences(settings, mesh),
        *_check_data(settings.data),
        *optimizers.check(settings.optimizer),
        *problems_of(settings.runtime, "runtime"),
    ]


def _check_name(name: str) -> list[TesseraError]:
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        return []
    return [
        OutputPathError(
            "the run's name cannot name a folder",
            got=f"name={name!r}",
            fix="use letters, digits, '.', '_' and '-', beginning with a letter or "
            "digit, at most 100",
        )
    ]


def _read_mesh(model: ModelSettings) -> tuple[Mesh | None, list[TesseraError]]:
    """The mesh, with -1 as 1, or what is wrong with it for this model."""
    try:
        if [type(part) for part in model.mesh_shape] != [tuple, tuple]:
            raise MeshShapeError(
                "a mesh shape is a pair of sizes and axis names",
                got=f"model.mesh_shape={as_yaml(model.mesh_shape)}",
                fix="write model.mesh_shape=[[4,2],[fsdp,tp]]",
            )
        sizes = [size for size in model.mesh_shape[0] if isinstance(size, int)]
        least = prod(size for size in sizes if size > 0)
        mesh = Mesh.from_shape(model.mesh_shape, num_devices=least)
        if unknown := [axis for axis in mesh.axes if axis not in MESH_AXES]:
            raise UnknownAxisError(
                f"the model has no use for mesh axes {', '.join(map(repr, unknown))}",
                got=f"model.mesh_shape={as_yaml(model.mesh_shape)}",
                fix="\n".join(did_you_mean(axis, MESH_AXES) for axis in unknown),
            )
        _placement(model, mesh)
    except TesseraError as error:
        return None, [error]
    return mesh, []


def _placement(model: ModelSettings, mesh: Mesh | None) -> Placement:
    return Placement.of(
        model.config,
        mesh,
        sequence_parallel=model.sequence_parallel,
        context_parallel=cast(Method, model.context_parallel),
    )


def _check_resume(training: TrainingConfig) -> list[TesseraError]:
    if not training.resume or "\0" in training.resume:
        return [
            SettingValueError(
                "training.resume names nothing",
                got=f"training.resume={training.resume!r}",
                fix="use none, auto, or the folder of a run",
            )
        ]
    if training.init_from is not None and training.resume not in ("none", "auto"):
        return [
            SettingConflictError(
                "two settings say what the run begins with",
                got=f"training.init_from={training.init_from}, "
                f"training.resume={training.resume}",
                fix="leave one of them out; with training.resume=auto, init_from is "
                "for a run that finds no checkpoint",
            )
        ]
    if training.resume == "none" and training.resume_data != "exact":
        return [
            SettingValueError(
                "training.resume_data has no meaning without training.resume",
                got=f"training.resume_data={training.resume_data}, "
                "training.resume=none",
                fix="leave it out, or use training.resume=auto or a folder",
            )
        ]
    return []


def _check_accumulation(training: TrainingConfig) -> list[TesseraError]:
    total, every = training.gradient_accumulation_steps, training.sync_gradients_every
    if min(total, every) < 1 or total % every == 0:
        return []
    divisors = [number for number in range(1, total + 1) if total % number == 0]
    return [
        BatchSizeError(
            "training.sync_gradients_every does not divide "
            "training.gradient_accumulation_steps",
            got=f"{total} / {every} leaves {total % every}",
            fix=f"use training.sync_gradients_every={_nearest(divisors, every)}",
        )
    ]


def _check_zero(training: TrainingConfig) -> list[TesseraError]:
    if training.zero_stage < 2 or training.sync_gradients_every <= 1:
        return []
    return [
        SettingConflictError(
            "gradients cannot be split over dp and be exchanged seldom as well",
            got=f"training.zero_stage={training.zero_stage} splits them, "
            f"training.sync_gradients_every={training.sync_gradients_every} keeps "
            "whole ones on each device in between",
            fix="use training.sync_gradients_every=1, or training.zero_stage=1",
        )
    ]


def _check_profile(training: TrainingConfig) -> list[TesseraError]:
    before = training.profile_wait + training.profile_warmup
    if not training.profile_communication or before < training.steps:
        return []
    return [
        SettingConflictError(
            "the run ends before the steps that are to be profiled",
            got=f"training.profile_wait={training.profile_wait} and "
            f"training.profile_warmup={training.profile_warmup} let {before} steps "
            f"pass, training.steps={training.steps}",
            fix=f"use training.steps={before + training.profile_active} or more, or "
            "training.profile_wait=0 training.profile_warmup=0",
        )
    ]


def _check_compression(
    training: TrainingConfig, mesh: Mesh | None
) -> list[TesseraError]:
    if training.compression_ratio != 0.01 and training.gradient_compression != "top_k":
        return [
            SettingValueError(
                "training.compression_ratio has no meaning without top_k",
                got=f"training.compression_ratio={training.compression_ratio}, "
                f"training.gradient_compression={training.gradient_compression}",
                fix="leave it out, or use training.gradient_compression=top_k",
            )
        ]
    if training.gradient_compression == "none":
        return []
    axes = mesh.shape if mesh else {"dp": 1}
    conflicts = [
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
    return [
        SettingConflictError(
            "gradients cannot be compressed in this run",
            got=f"training.gradient_compression={training.gradient_compression}; {got}",
            fix=f"{fix}, or training.gradient_compression=none",
        )
        for found, got, fix in conflicts
        if found
    ]


def _check_pipeline(settings: Settings, mesh: Mesh | None) -> list[TesseraError]:
    training = settings.training
    name, chunks = training.pipeline_schedule, training.pipeline_chunks
    if (chunks > 1) != (name == "interleaved"):
        return [
            SettingConflictError(
                "several runs of layers on a device are what makes a schedule "
                "interleaved",
                got=f"training.pipeline_schedule={name}, "
                f"training.pipeline_chunks={chunks}",
                fix="use training.pipeline_schedule=interleaved with "
                "training.pipeline_chunks=2 or more, or another schedule with 1",
            )
        ]
    if mesh is None or "pp" not in mesh.axes or problems_of(training, "training"):
        return []
    if training.sync_gradients_every > 1:
        return [
            SettingConflictError(
                "the stages of a pipeline exchange gradients where they arise",
                got=f"training.sync_gradients_every={training.sync_gradients_every}",
                fix="use training.sync_gradients_every=1, or a mesh without pp",
            )
        ]
    try:
        schedule_of(mesh, name, chunks, training.gradient_accumulation_steps)
        split_of(mesh, settings.model.config, chunks)
    except TesseraError as error:
        return [error]
    return []


def _check_remat(settings: Settings, mesh: Mesh | None) -> list[TesseraError]:
    config = settings.model.config
    try:
        policies = policies_of(settings.training.remat, config)
        if mesh is not None and "pp" in mesh.axes:
            stages = mesh.shape["pp"] * max(settings.training.pipeline_chunks, 1)
            policies_of_stage(policies, config.num_layers // stages)
    except TesseraError as error:
        return [error]
    return []


def _check_loss_chunk(given: int | str) -> list[TesseraError]:
    if given in ("auto", "none") or (isinstance(given, int) and given >= 1):
        return []
    return [
        SettingValueError(
            "training.loss_chunk is a number of tokens",
            got=f"training.loss_chunk={given}",
            fix="use a number from 1 up, auto or none",
        )
    ]


def _check_sequences(settings: Settings, mesh: Mesh | None) -> list[TesseraError]:
    if mesh is None:
        return []
    place = _placement(settings.model, mesh)
    length, spread = settings.training.sequence_length, place.arrangement
    chunks = spread.size * spread.runs if spread else 1
    split = place.size("sequence") if settings.model.sequence_parallel else 1
    step = lcm(chunks, split)
    if length % step == 0:
        return []
    longer = _nearest(range(step, length + step + 1, step), length)
    errors: list[TesseraError] = []
    if length % chunks:
        errors.append(
            BatchSizeError(
                f"sequences cannot be cut into the {chunks} chunks that the devices of "
                f"mesh axis 'cp' share by model.context_parallel="
                f"{settings.model.context_parallel}",
                got=f"training.sequence_length={length}: {length} / {chunks} leaves "
                f"{length % chunks}",
                fix=f"use training.sequence_length={longer}",
            )
        )
    if length % split:
        axes = place.axes("sequence")
        named = " and ".join(map(repr, axes))
        errors.append(
            BatchSizeError(
                f"sequences cannot be split evenly over mesh "
                f"{'axis' if len(axes) == 1 else 'axes'} {named}, which "
                "model.sequence_parallel asks for",
                got=f"training.sequence_length={length}: {length} / {split} leaves "
                f"{length % split}",
                fix=f"use training.sequence_length={longer}, or "
                "model.sequence_parallel=false",
            )
        )
    return errors


def _check_data(data: DataConfig) -> list[TesseraError]:
    try:
        data_config.check(data)
    except TesseraError as error:
        return [error]
    return []


def _nearest(legal: Sequence[int], wanted: int) -> str:
    """The legal numbers on both sides of one that is not."""
    below = [number for number in legal if number < wanted][-1:]
    above = [number for number in legal if number > wanted][:1]
    return " or ".join(map(str, below + above))
