# SPDX-License-Identifier: Apache-2.0
"""Everything that a run can be told, as values, checked before anything compiles.

``command_line.py`` composes them with Hydra from the files of ``configs/`` and the
command line. The trainer sees only ``Settings``, in which no OmegaConf is left.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lcm, prod
from typing import Any, Final, TypeAlias, cast

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
from tessera.graph.pipelining.schedules import NAMES as SCHEDULE_NAMES
from tessera.mesh import Mesh
from tessera.models.config import Gemma3Config
from tessera.models.remat import policies_of, policies_of_stage
from tessera.models.rules import RULES, Placement
from tessera.ops.attention.spread import METHODS, Method
from tessera.ops.compression import COMPRESSIONS
from tessera.training import optimizers
from tessera.training.data import config as data_config
from tessera.training.data.config import DataConfig
from tessera.training.optimizers import OptimizerConfig
from tessera.training.pipelined import schedule_of, split_of
from tessera.training.settings import as_yaml, problems_of, setting

# Sizes, then names: ((4, 2), ("fsdp", "tp")).
MeshShape: TypeAlias = tuple[tuple[int, ...], tuple[str, ...]]

MESH_AXES: Final = tuple(
    dict.fromkeys(axis for axes in RULES.values() for axis in axes)
)


@dataclass(frozen=True)
class TrainingConfig:
    """How long, on how much at a time, and what to show of it.

    Attributes:
      steps: Optimizer steps of the run; the learning rate's schedule spans them.
      seed: Of the initial parameters and of the order of the data.
      sequence_length: Tokens in a sequence.
      micro_batch_size: Sequences of one microbatch for each data-parallel group of
        devices: a group is the devices that see the same data, so it is one device
        where tp is 1, and the whole microbatch has this times dp times fsdp.
      gradient_accumulation_steps: Microbatches whose gradients make one optimizer step.
      sync_gradients_every: Microbatches between two exchanges of gradients among the
        data-parallel groups; divides gradient_accumulation_steps. More means less
        communication and one more copy of the gradients on each device.
      mixed_precision: What matmuls compute in. Parameters, optimizer state, norms,
        softmax and the loss stay f32.
      zero_stage: What is split over dp instead of copied along it; 0 nothing, 1 the
        optimizer state, 2 also the gradients, 3 also the parameters. What fsdp splits
        is split at every stage.
      offload_optimizer: Keep the optimizer's state in the memory of the host, from
        where each step fetches it for the update.
      remat: What the backward pass recomputes instead of keeping; none nothing, full
        every layer, dots all but the matmuls, or a policy of jax.checkpoint_policies by
        its name. A list has one for each layer, {global full, local none} one for each
        kind of layer.
      gradient_compression: What is sent of the gradients over dp, once in a step; none
        is all of them, bf16 and int8 round them, and top_k sends the largest and keeps
        the others for later steps.
      compression_ratio: The share of its gradients that each device sends under top_k.
      pipeline_schedule: The order of forwards and backwards over the stages of pp. The
        pipeline's microbatches are those of gradient_accumulation_steps.
      pipeline_chunks: Runs of layers on each device of pp; 1 but for interleaved.
      clip_norm: Scale the gradients down to this global norm; null never does.
      log_every: Steps between two log lines.
      validate_every: Steps between two validations; 0 validates after the last only.
      validation_batches: Batches in each validation.
      sample_prompt: What the sample at the end of the run continues.
      sample_length: Tokens of that sample; 0 makes none.
      profile_communication: Measure what a few steps compute and send, by mesh axis;
        the table, its numbers and a trace go to the run's folder.
      profile_wait: Steps before it is begun; the first is slower than the others.
      profile_warmup: Steps that are then traced and forgotten, as in torch.profiler.
      profile_active: Steps that are measured after these.
      dry_run: Compile, print memory per device and the collectives, and stop; also for
        a mesh that this machine does not have.
    """

    steps: int = setting(300, least=1)
    seed: int = setting(0, least=0, most=2**32 - 1)
    sequence_length: int = setting(128, least=2)
    micro_batch_size: int = setting(8, least=1)
    gradient_accumulation_steps: int = setting(1, least=1)
    sync_gradients_every: int = setting(1, least=1)
    mixed_precision: str = setting("f32", choices=("f32", "bf16", "fp16"))
    zero_stage: int = setting(0, least=0, most=3)
    offload_optimizer: bool = setting(False)
    remat: Any = setting("none")  # noqa: RUF009 - it gives a field
    gradient_compression: str = setting("none", choices=COMPRESSIONS)
    compression_ratio: float = setting(0.01, above=0, most=1)
    pipeline_schedule: str = setting("1f1b", choices=SCHEDULE_NAMES)
    pipeline_chunks: int = setting(1, least=1)
    clip_norm: float | None = setting(1.0, above=0)
    log_every: int = setting(10, least=1)
    validate_every: int = setting(100, least=0)
    validation_batches: int = setting(8, least=1)
    sample_prompt: str = setting("def __init__(self")
    sample_length: int = setting(200, least=0)
    profile_communication: bool = setting(False)
    profile_wait: int = setting(1, least=0)
    profile_warmup: int = setting(1, least=0)
    profile_active: int = setting(3, least=1)
    dry_run: bool = setting(False)


@dataclass(frozen=True)
class RuntimeConfig:
    """The machine.

    Attributes:
      platform: What to run on; auto takes what JAX prefers. On cpu, the devices that
        the mesh asks for are simulated.
      max_steps_in_flight: Steps that may be queued before the loop waits for the first
        of them; more hides more of Python's time and holds more memory.
      coordinator_address: Where rank 0 of several processes is, host:port; given to
        each of them with the next two. null asks the environment, as docs/launch.md
        says.
      num_processes: Processes of the run; null asks the environment.
      process_id: Which of them this one is, from 0; null asks the environment.
      rendezvous_timeout: Seconds that processes wait for each other, at the start and
        to compare what they compiled.
      heartbeat_timeout: Seconds until a process without a sign of life counts as dead.
      shutdown_timeout: Seconds that a process that is done waits for the others.
      startup_deadline: Seconds for reading data and making or restoring the state; null
        is no limit. When a deadline is over the process shows its stacks and the phase
        of every rank, and ends with code 124.
      compile_deadline: Seconds for compiling the step; null is no limit.
      step_deadline: Seconds for one step; null is no limit.
      evaluation_deadline: Seconds for one evaluation, and for the sample at the end;
        null is no limit.
      save_deadline: Seconds for what a checkpoint lets the loop wait; null is no limit.
    """

    platform: str = setting("auto", choices=("auto", "cpu", "gpu", "tpu"))
    max_steps_in_flight: int = setting(8, least=1, most=64)
    coordinator_address: str | None = setting(None)
    num_processes: int | None = setting(None, least=1)
    process_id: int | None = setting(None, least=0)
    rendezvous_timeout: float = setting(300.0, above=0)
    heartbeat_timeout: int = setting(100, least=1)
    shutdown_timeout: int = setting(300, least=1)
    startup_deadline: float | None = setting(1800.0, above=0)
    compile_deadline: float | None = setting(3600.0, above=0)
    step_deadline: float | None = setting(900.0, above=0)
    evaluation_deadline: float | None = setting(3600.0, above=0)
    save_deadline: float | None = setting(3600.0, above=0)


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The model, and the mesh that it is spread over.

    Attributes:
      name: What the model is called; the files of ``configs/model`` set it.
      mesh_shape: Sizes and names of the mesh's axes: any of dp, fsdp, ep_outer, ep, cp,
        tp and pp, in any order, outermost first. One size may be -1: as many as there
        are devices.
      sequence_parallel: Split norms and residuals along the sequence over tp.
      context_parallel: How attention sees sequences that a mesh axis cp splits: keys
        and values go round a ring, or all_to_all exchanges them for heads.
      config: The model's sizes; on the command line they stand beside the others.
    """

    name: str
    mesh_shape: MeshShape = ((1, 1), ("fsdp", "tp"))
    sequence_parallel: bool = False
    context_parallel: str = setting("ring", choices=METHODS)
    config: Gemma3Config

    @property
    def num_devices(self) -> int:
        """Devices that the mesh takes at least: a size of -1 counts as 1."""
        return prod(size for size in self.mesh_shape[0] if size != -1)


@dataclass(frozen=True)
class Settings:
    """A run: everything that the command line and the configuration files decide.

    Attributes:
      name: Names the folder of the run's output.
      model: See ``ModelSettings``.
      training: See ``TrainingConfig``.
      data: See ``DataConfig``.
      optimizer: See ``OptimizerConfig`` and its subclasses.
      runtime: See ``RuntimeConfig``.
    """

    name: str
    model: ModelSettings
    training: TrainingConfig = field(default_factory=TrainingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=optimizers.AdamWConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def rows_per_microbatch(self, mesh: Mesh) -> int:
        """Sequences of one microbatch over the whole mesh."""
        return self.training.micro_batch_size * Placement(mesh).size("batch")

    def rows_per_step(self, mesh: Mesh) -> int:
        """Sequences that one optimizer step learns from."""
        accumulated = self.training.gradient_accumulation_steps
        return self.rows_per_microbatch(mesh) * accumulated


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
        *_check_accumulation(settings.training),
        *_check_zero(settings.training),
        *_check_profile(settings.training),
        *_check_remat(settings, mesh),
        *_check_compression(settings.training, mesh),
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
