# SPDX-License-Identifier: Apache-2.0
"""Every option of a run, as frozen dataclasses: ``Config`` and its groups.

``command_line.py`` composes them with Hydra from the files of ``configs/`` and the
command line; ``settings_checks.py`` says what is wrong with them. The trainer sees only
``Config``, in which no OmegaConf is left. Nothing here imports JAX.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, TypeAlias

from tessera.errors import OutputPathError
from tessera.train.config.optimizer_config import AdamWConfig, OptimizerConfig
from tessera.train.config.post_training_config import (
    NEXT_TOKEN,
    OBJECTIVES,
    GrpoConfig,
    PreferenceConfig,
)
from tessera.train.config.setting_fields import MOST_COUNT, Limits, setting
from tessera.train.data.data_config import DataConfig
from tessera.train.loop.precision import Precision, precision_of
from tessera.train.models.axis_rules import RULES
from tessera.train.models.definition import (
    DECODER,
    ModelDefinition,
    ModelOptions,
    definition_of,
)

# Sizes, then names: ((4, 2), ("fsdp", "tp")).
MeshShape: TypeAlias = tuple[tuple[int, ...], tuple[str, ...]]

MESH_AXES: Final = tuple(
    dict.fromkeys(axis for axes in RULES.values() for axis in axes)
)
# As the modules that implement them call them, which import JAX; a test compares them.
SCHEDULE_NAMES: Final = ("gpipe", "1f1b", "interleaved", "zero_bubble", "dualpipev")
CONTEXT_METHODS: Final = ("ring", "all_to_all")
GATHERS: Final = ("microbatch", "step")
ON_SPIKE: Final = ("none", "warn", "skip")
PREEMPTION_NOTICES: Final = ("none", "gce", "aws", "azure")
RESUME_DATA: Final = ("exact", "restart")
TRACKERS: Final = ("none", "wandb", "mlflow")
# The longest that anything is waited for.
A_YEAR_S: Final = 31_536_000


def _names_policies(remat: Any) -> bool:
    """Whether it has the form of ``remat``; which policies there are, JAX knows."""
    if isinstance(remat, Mapping):
        remat = [*remat, *remat.values()]
    names = remat if isinstance(remat, (list, tuple)) else [remat]
    return all(isinstance(name, str) for name in names)


@dataclass(frozen=True)
class TrainingConfig:
    """How long, on how much at a time, and what to show of it.

    Attributes:
      steps: Optimizer steps of the run; the learning rate's schedule spans them.
      seed: Of the initial parameters and of the order of the data.
      sequence_length: Tokens in a sequence.
      micro_batch_size: Sequences of one microbatch for each data-parallel group, the
        devices that see the same data; over all, this times dp times fsdp.
      gradient_accumulation_steps: Microbatches whose gradients make one optimizer step.
      global_batch_size: Sequences of one optimizer step over all devices; the number of
        microbatches follows, of at most micro_batch_size. null takes the two settings
        before.
      sync_gradients_every: Microbatches between two exchanges of gradients over the
        data axes; divides gradient_accumulation_steps. More sends less, and keeps one
        more copy of the gradients.
      mixed_precision: The dtype of computation, f32, bf16 or fp16: of activations, of
        what the backward pass keeps, and of parameters where they are used; fp8 is bf16
        whose projections multiply 8-bit operands. {computation bf16, reduction bf16}
        names the parts. Parameters, sums inside of matmuls, norms, softmax, the loss
        and, unless named, the reduction of gradients are f32.
      zero_stage: What is split over dp; 0 nothing, 1 the optimizer state, 2 also the
        gradients, 3 also the parameters. What fsdp splits is split at every stage.
      offload_optimizer: Keep the optimizer's state in the memory of the host; each step
        fetches it.
      remat: What the backward pass keeps of a layer, recomputing the rest; named keeps
        what the model names (in decoders query, key, value, attention, gate and up),
        dots the results of matmuls, none everything but element-wise values, full
        nothing, and of a pipeline's stage its input alone; other names are policies of
        jax.checkpoint_policies. A list has one for each layer, {global full, local
        none} one for each kind. On a command line auto is the first of none, dots,
        named and full that surely fits.
      loss_chunk: Tokens of which each device makes logits at a time; auto chooses by
        their bytes, none makes all at once, as auto does with deterministic numerics.
      numerics: How sums over the batch are made; fast in any order, deterministic in
        one that gives the same bits in every run and on every mesh, whose axes then
        share rows and split nothing but what is stored.
      reduction_parts: With deterministic numerics, into how many parts the rows of a
        step are cut; the same on every mesh that is to give the same bits.
      pipeline_schedule: The order of forwards and backwards over the stages of pp,
        whose microbatches are those of gradient_accumulation_steps.
      pipeline_chunks: Runs of layers on each device of pp; 1 but for interleaved,
        and 2 for dualpipev.
      pipeline_gather: When the stages of pp gather their parameters over fsdp.
        microbatch gathers a layer wherever a microbatch runs it, and reduces its
        gradient there; step gathers all layers before the first microbatch and reduces
        their gradients after the last, so that each device has both whole in between.
      clip_norm: Scale the gradients down to this global norm; null never does.
      max_skipped_steps: Steps in a row that may be skipped because their loss or
        gradients are not finite; one more ends the run. fp16 has a bound of its own,
        the smallest loss scale.
      on_spike: What becomes of a step whose loss or gradient norm is far above those of
        the last steps; none does not look, warn logs it, skip learns nothing from it.
      spike_threshold: How far above their median that is, in robust standard deviations
        of at least a hundredth of the median.
      spike_window: Accepted steps that a step is compared with; as many at the start
        of a run are never spikes.
      log_every: Steps between two log lines.
      validate_every: Steps between two validations; 0 validates after the last only.
      validation_sequences: Sequences of each source that a validation reads, the same
        ones on every mesh; null reads all.
      sample_prompt: What the sample at the end of the run continues.
      sample_length: Tokens of that sample; 0 makes none.
      objective: What is learned: the next_token of texts and answers, a preference for
        one of two answers, or a policy whose completions are rewarded. It asks for
        data=preferences or data=prompts, and the recipes preference and grpo set it.
      init_from: The parameters to begin with unless the run resumes: a safetensors
        file, or a folder of Hugging Face, as model=<folder> sets it; null makes them
        from the seed.
      trainable: Patterns of the names of the parameters that are trained, such as
        [*norm*, embedding]; the others have no gradients and no optimizer state. null
        trains all, or the adapters alone where model.lora.rank is not 0.
      frozen: Patterns of names that are not trained, although trainable has them; null
        is none.
      checkpoint_every: Steps between two checkpoints; 0 keeps one after the last step
        only, null none at all.
      keep: Newest checkpoints that are kept; null keeps all. With 1 there is no other
        when it is damaged.
      resume: What to go on from; none begins anew, auto takes the newest checkpoint in
        the run's own folder if any, and a path is a run, its checkpoints or one of
        them.
      resume_data: Where to go on in the data; exact reads the next row and refuses data
        that has changed, restart begins at the first row.
      report: Write report.html into the run's folder when it ends, as tessera report
        does.
      profile_communication: Measure what a few steps compute and send, by mesh axis;
        the table, its numbers and a trace go to the run's folder.
      profile_wait: Steps before it is begun; the first is slower than the others.
      profile_warmup: Steps that are then traced and forgotten, as in torch.profiler.
      profile_active: Steps that are measured after these.
      tracker: Where the numbers go as well: wandb is Weights & Biases, mlflow MLflow;
        see docs/guides/report.md.
      eval_only: Evaluate the validation data once with the parameters of init_from or
        resume, and stop.
      dry_run: Read the data of text and mixture, compile, print memory per device and
        collectives, and stop; also for a mesh that is not here. With a runtime.target
        it predicts the time of a step.
    """

    steps: int = setting(300, least=1, most=MOST_COUNT)
    seed: int = setting(0, least=0, most=2**32 - 1)
    sequence_length: int = setting(128, least=2, most=2**24)
    micro_batch_size: int = setting(8, least=1, most=2**20)
    gradient_accumulation_steps: int = setting(1, least=1, most=2**20)
    global_batch_size: int | None = setting(None, least=1, most=2**40)
    sync_gradients_every: int = setting(1, least=1, most=2**20)
    mixed_precision: Any = setting("f32")  # noqa: RUF009 - it gives a field
    zero_stage: int = setting(0, least=0, most=3)
    offload_optimizer: bool = setting(False)
    remat: Any = setting(  # noqa: RUF009 - it gives a field
        "named",
        test=_names_policies,
        legal="none, named, dots, full or auto, a list with one for each layer, or "
        "{global: full, local: none}",
    )
    loss_chunk: int | str = setting(
        "auto", least=1, most=MOST_COUNT, choices=("auto", "none")
    )
    numerics: str = setting("fast", choices=("fast", "deterministic"))
    reduction_parts: int = setting(
        8, least=1, most=2**20, test=lambda n: n.bit_count() == 1, legal="a power of 2"
    )
    pipeline_schedule: str = setting("1f1b", choices=SCHEDULE_NAMES)
    pipeline_chunks: int = setting(1, least=1, most=10_000)
    pipeline_gather: str = setting("microbatch", choices=GATHERS)
    clip_norm: float | None = setting(1.0, above=0)
    max_skipped_steps: int = setting(3, least=0, most=MOST_COUNT)
    on_spike: str = setting("none", choices=ON_SPIKE)
    spike_threshold: float = setting(8.0, above=0, most=1e6)
    spike_window: int = setting(128, least=4, most=2**16)
    log_every: int = setting(10, least=1, most=MOST_COUNT)
    validate_every: int = setting(100, least=0, most=MOST_COUNT)
    validation_sequences: int | None = setting(64, least=1, most=MOST_COUNT)
    sample_prompt: str = setting("def __init__(self")
    sample_length: int = setting(200, least=0, most=2**20)
    objective: str = setting(NEXT_TOKEN, choices=OBJECTIVES)
    init_from: str | None = setting(None)
    trainable: list[str] | None = setting(None)  # noqa: RUF009 - it gives a field
    frozen: list[str] | None = setting(None)  # noqa: RUF009 - it gives a field
    checkpoint_every: int | None = setting(100, least=0, most=MOST_COUNT)
    keep: int | None = setting(3, least=1, most=MOST_COUNT)
    resume: str = setting(
        "none",
        test=lambda text: text not in ("", "True", "False") and "\0" not in text,
        legal="none, auto, or the folder of a run",
    )
    resume_data: str = setting("exact", choices=RESUME_DATA)
    report: bool = setting(True)
    profile_communication: bool = setting(False)
    profile_wait: int = setting(1, least=0, most=MOST_COUNT)
    profile_warmup: int = setting(1, least=0, most=MOST_COUNT)
    profile_active: int = setting(3, least=1, most=1000)
    tracker: str = setting("none", choices=TRACKERS)
    eval_only: bool = setting(False)
    dry_run: bool = setting(False)

    @property
    def precision(self) -> Precision:
        """The dtypes that ``mixed_precision`` names.

        Raises:
          SettingValueError: [T502] there are no such parts or dtypes.
        """
        return precision_of(self.mixed_precision)


@dataclass(frozen=True)
class RuntimeConfig:
    """The machine.

    Attributes:
      target: A machine that a dry run compiles for, such as h100:2x8, hosts and devices
        of each, or v5e:4x4; null is this machine.
      target_compiler: native is the target's own compiler; cpu stands in for one that
        is not installed, and its figures are not the target's.
      platform: What to run on; auto takes what JAX prefers. On cpu, the devices that
        the mesh asks for are simulated.
      compile_cache: A folder, private to the user, of compiled programs, which a later
        run of the same source lines takes from there; null takes
        JAX_COMPILATION_CACHE_DIR if that is given.
      max_steps_in_flight: Steps that may be queued before the loop waits for the first;
        more hides more of Python's time and holds more memory.
      verify_every: Steps between two that are repeated with the devices in another
        order and compared bit for bit, which finds devices that compute wrong values;
        null never does. It needs deterministic numerics, holds two copies of this
        process's part of the state in the memory of the host, and compiles the step
        once more.
      rendezvous_timeout: Seconds that processes wait for each other, at the start and
        to compare what they compiled.
      heartbeat_timeout: Seconds until a process without a sign of life counts as dead.
      shutdown_timeout: Seconds that a process that is done waits for the others.
      startup_deadline: Seconds for reading data and making or restoring the state; null
        is no limit. At a deadline the process shows its stacks and the phase of every
        rank, and ends with code 124.
      compile_deadline: Seconds for compiling the step; null is no limit.
      step_deadline: Seconds for one step; null is no limit.
      evaluation_deadline: Seconds for one evaluation, and for the sample at the end;
        null is no limit.
      rollout_deadline: Seconds for the completions of one rollout, or of one
        evaluation; null is no limit.
      save_deadline: Seconds for what a checkpoint lets the loop wait; null is no limit.
      grace_period: Seconds from SIGTERM to the end of the process, in which it saves;
        less than its scheduler and the launcher's --grace leave it.
      max_run_time: Seconds from the start of the process, or of the launcher, until the
        run stops as by SIGTERM, before its grace period; null is no limit.
      preemption_notice: Which cloud's metadata service tells that the machine is taken
        away; a notice stops the run as SIGTERM does.
    """

    target: str | None = setting(None)
    target_compiler: str = setting("native", choices=("native", "cpu"))
    platform: str = setting("auto", choices=("auto", "cpu", "gpu", "tpu"))
    compile_cache: str | None = setting(None)
    max_steps_in_flight: int = setting(8, least=1, most=64)
    verify_every: int | None = setting(None, least=1, most=MOST_COUNT)
    rendezvous_timeout: float = setting(300.0, above=0, most=A_YEAR_S)
    heartbeat_timeout: int = setting(100, least=1, most=A_YEAR_S)
    shutdown_timeout: int = setting(300, least=1, most=A_YEAR_S)
    startup_deadline: float | None = setting(1800.0, above=0, most=A_YEAR_S)
    compile_deadline: float | None = setting(3600.0, above=0, most=A_YEAR_S)
    step_deadline: float | None = setting(900.0, above=0, most=A_YEAR_S)
    evaluation_deadline: float | None = setting(3600.0, above=0, most=A_YEAR_S)
    rollout_deadline: float | None = setting(3600.0, above=0, most=A_YEAR_S)
    save_deadline: float | None = setting(3600.0, above=0, most=A_YEAR_S)
    grace_period: float = setting(25.0, above=0, most=A_YEAR_S)
    max_run_time: float | None = setting(None, above=0, most=A_YEAR_S)
    preemption_notice: str = setting("none", choices=PREEMPTION_NOTICES)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model, and the mesh that it is spread over.

    Attributes:
      name: What the model is called; the files of ``configs/model`` set it.
      mesh_shape: Sizes and names of the mesh's axes: any of dp, fsdp, ep_outer, ep, cp,
        tp and pp, outermost first. One size may be -1: as many as there are devices.
      sequence_parallel: Split norms and residuals along the sequence over tp.
      context_parallel: How attention sees sequences that cp splits: keys and values go
        round a ring, or all_to_all exchanges them for heads.
      definition: decoder, or a kind of model that a module of yours registers; see
        docs/guides/own-model.md.
      config: The model's sizes; on the command line they stand beside the others.
    """

    name: str
    mesh_shape: MeshShape = ((1, 1), ("fsdp", "tp"))
    sequence_parallel: bool = False
    context_parallel: str = setting("ring", choices=CONTEXT_METHODS)
    definition: str = DECODER
    config: Any

    @property
    def kind(self) -> ModelDefinition:
        """The definition that ``definition`` names.

        Raises:
          UnknownModelError: [T403] there is none in this process.
        """
        return definition_of(self.definition)

    @property
    def num_devices(self) -> int:
        """Devices that the mesh takes at least: a size of -1 counts as 1."""
        return prod(size for size in self.mesh_shape[0] if size != -1)


@dataclass(frozen=True)
class Config:
    """Every option of a run, from the configuration files and the command line.

    Attributes:
      name: Names the folder of the run's output.
      model: See ``ModelConfig``.
      training: See ``TrainingConfig``.
      data: See ``DataConfig``.
      optimizer: See ``OptimizerConfig`` and its subclasses.
      runtime: See ``RuntimeConfig``.
      recipe: Whose values the settings have that neither the command line nor another
        file gives.
      preference: See ``PreferenceConfig``.
      grpo: See ``GrpoConfig``.
      rewards: What scores the completions of a policy; see docs/guides/own-rewards.md.
    """

    name: str = field(
        metadata=Limits(
            test=re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}").fullmatch,
            legal="letters, digits, '.', '_' and '-', beginning with a letter or "
            "digit, at most 100",
            error=OutputPathError,
        )
    )
    model: ModelConfig
    training: TrainingConfig = field(default_factory=TrainingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=AdamWConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    recipe: str = setting(
        "none", test=lambda name: isinstance(name, str), legal="the name of a file"
    )
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    rewards: list[str] | None = setting(None)  # noqa: RUF009 - it gives a field

    @property
    def model_options(self) -> ModelOptions:
        """What the groups ``model`` and ``training`` say of the model."""
        chunks = self.training.pipeline_chunks
        # With other chunks the schedule is refused.
        is_v = self.training.pipeline_schedule == "dualpipev" and chunks == 2
        return ModelOptions(
            sequence_parallel=self.model.sequence_parallel,
            context_parallel=self.model.context_parallel,
            remat=self.training.remat,
            pipeline_chunks=chunks,
            pipeline_placement="v" if is_v else "loop",
            loss_chunk=self.training.loss_chunk,
            dtype=self.training.precision.activations,
            fp8=self.training.precision.fp8,
        )

    @property
    def longest_prompt(self) -> int:
        """The most tokens of a prompt whose completions are rewarded."""
        return self.training.sequence_length + 1 - self.grpo.max_completion

    def rows_per_microbatch(self, sizes: Mapping[str, int]) -> int:
        """Sequences of one microbatch over the whole mesh."""
        return self.training.micro_batch_size * data_parallel_groups(sizes)

    def rows_per_step(self, sizes: Mapping[str, int]) -> int:
        """Sequences that one optimizer step learns from."""
        if self.training.global_batch_size is not None:
            return self.training.global_batch_size
        accumulated = self.training.gradient_accumulation_steps
        return self.rows_per_microbatch(sizes) * accumulated

    def rows_per_evaluation(self, sizes: Mapping[str, int]) -> int:
        """Sequences of one batch of a validation.

        With deterministic numerics those of a step, so that every mesh adds as many at
        a time.
        """
        if self.training.numerics == "deterministic":
            return self.rows_per_step(sizes)
        return self.rows_per_microbatch(sizes)


def data_parallel_groups(sizes: Mapping[str, int]) -> int:
    """Into how many parts mesh axes of these sizes split a batch."""
    return prod(sizes.get(axis, 1) for axis in RULES["batch"])
