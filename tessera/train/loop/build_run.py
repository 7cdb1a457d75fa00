# SPDX-License-Identifier: Apache-2.0
"""``Run``: the model, mesh, data and compiled step that a ``Config`` describes."""

import hashlib
import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from tessera.analysis.flops import count
from tessera.errors import ShardDivisibilityError
from tessera.graph.compile_stages import Compiled
from tessera.graph.function import Function
from tessera.graph.pipelining import Schedule
from tessera.mesh import Mesh
from tessera.ops.loss_scale import LossScale
from tessera.train.config.batch_sizes import with_batch_sizes
from tessera.train.config.layout_checks import build_model
from tessera.train.config.optimizer_config import unusual_rate
from tessera.train.config.post_training_config import POLICY, PREFERENCE
from tessera.train.config.recipes import RANDOM_WEIGHTS, tunes_nothing
from tessera.train.config.run_config import Config, data_parallel_groups
from tessera.train.config.setting_conflicts import numerics_problems
from tessera.train.config.setting_fields import raise_all
from tessera.train.config.settings_checks import rollout_problems
from tessera.train.config.step_config import StepConfig, batch_spec
from tessera.train.data import Corpus, load
from tessera.train.data.prompts import PromptCorpus
from tessera.train.data.tokenization import tokenizer_fingerprint
from tessera.train.data.vocabulary import check_tokens
from tessera.train.files.hub import PREFIX
from tessera.train.loop import optimizer_offload
from tessera.train.loop.device_checks import (
    check_compilable,
    check_fp8,
    check_state_fits,
    with_idle_devices,
)
from tessera.train.loop.host_data_sharding import HostShard
from tessera.train.loop.layout_notes import layout_notes
from tessera.train.loop.optimizers import make_optimizer
from tessera.train.loop.pipelined_model import schedule_of
from tessera.train.loop.run_objective import (
    ADAPTERS_OFF,
    COPY,
    check_pairs,
    objective_of,
    reference_of,
)
from tessera.train.loop.scores import make_score_step
from tessera.train.loop.spikes import SpikeGuard
from tessera.train.loop.step import layouts_of_state, make_eval_step, make_train_step
from tessera.train.loop.train_state import TrainState, abstract_state
from tessera.train.models.families.published_files import Published
from tessera.train.models.model import Model
from tessera.train.models.partition_rules import Placement
from tessera.train.models.weights import check_weights
from tessera.train.objectives.objective import Objective

BATCH: Final = ("tokens", "targets", "segment_ids", "positions")


@dataclass(frozen=True)
class Run:
    """A run as its configuration describes it, before its first array.

    Attributes:
      config: What was asked for, with the microbatches of a global batch on the mesh.
      mesh: Where it runs; it may be abstract, which is enough for a dry run.
    """

    config: Config
    mesh: Mesh

    def __post_init__(self) -> None:
        """Derive the microbatches; raises T503 where the mesh cannot share a batch."""
        config = with_batch_sizes(self.config, self.mesh.shape)
        object.__setattr__(self, "config", config)

    @cached_property
    def model(self) -> Model:
        """The model, without arrays."""
        return build_model(self.config, self.mesh)

    @cached_property
    def schedule(self) -> Schedule | None:
        """The order of the pipeline, where an axis ``pp`` of the mesh runs one."""
        training = self.config.training
        if training.numerics == "deterministic":
            return None
        return schedule_of(
            self.mesh,
            training.pipeline_schedule,
            training.pipeline_chunks,
            training.gradient_accumulation_steps,
        )

    @cached_property
    def step_config(self) -> StepConfig:
        """What the step is made of."""
        training = self.config.training
        optimizer, learning_rate = make_optimizer(
            self.config.optimizer,
            steps=training.steps,
            clip_norm=training.clip_norm,
            world_size=Placement(self.mesh).size("batch"),
        )
        if training.eval_only:  # a state without arrays beside the parameters
            optimizer = optax.identity()
            training = replace(training, offload_optimizer=False, on_spike="none")
        guard = None
        if training.on_spike != "none":
            threshold, window = training.spike_threshold, training.spike_window
            guard = SpikeGuard(training.on_spike, threshold, window)
        return StepConfig(
            model=self.model,
            optimizer=optimizer,
            learning_rate=learning_rate,
            mesh=self.mesh,
            accumulation=training.gradient_accumulation_steps,
            sync_every=training.sync_gradients_every,
            reduces_narrow=training.precision.reduces_narrow,
            zero_stage=training.zero_stage,
            offload_optimizer=training.offload_optimizer,
            schedule=self.schedule,
            gathers_once=training.pipeline_gather == "step",
            reduction_parts=(
                training.reduction_parts
                if training.numerics == "deterministic"
                else None
            ),
            # By chunks, XLA sums in other orders on other meshes (JAX 0.12).
            loss_chunk=training.loss_chunk if training.numerics == "fast" else "none",
            objective=self.objective,
            keeps_reference=self.reference == COPY,
            spikes=guard,
        )

    @cached_property
    def objective(self) -> Objective:
        """What the step differentiates."""
        return objective_of(self.config, self.rows_per_step)

    @property
    def reference(self) -> str | None:
        """The reference model: see ``reference_of``."""
        return reference_of(self.config, self.objective, self.model)

    @cached_property
    def score_reference(self) -> Function | None:
        """Log-probabilities of a batch under the reference model, if there is one."""
        if self.reference is None:
            return None
        drops = self.reference == ADAPTERS_OFF
        return make_score_step(
            self.step_config, temperature=self._temperature, drops_adapters=drops
        )

    @cached_property
    def score_policy(self) -> Function | None:
        """Log-probabilities under the policy, where steps learn from an older one."""
        if "old" not in self.objective.arrays:
            return None
        if self.reference == COPY:  # the same program, of other parameters
            return self.score_reference
        return make_score_step(self.step_config, temperature=self._temperature)

    @property
    def _temperature(self) -> float:
        is_policy = self.config.training.objective == POLICY
        return self.config.grpo.temperature if is_policy else 1.0

    @property
    def rollout_form(self) -> str | None:
        """What decides the numbers of a rollout beside its completions, of a policy."""
        training, grpo = self.config.training, self.config.grpo
        if training.objective != POLICY:
            return None
        names = sorted({*BATCH, *self.objective.arrays} - {"reference"})
        sizes = self.rows_per_step, grpo.steps_per_rollout, training.sequence_length
        rules = grpo.algorithm, grpo.group_size, grpo.max_completion, grpo.truncated
        return repr((names, *sizes, *rules, grpo.temperature))

    def reference_params(self, state: TrainState) -> Any:
        """What ``score_reference`` takes of a state."""
        return state.params if state.reference is None else state.reference

    @cached_property
    def loss_scale(self) -> LossScale | None:
        """The loss scale to begin with; fp16 alone has one."""
        narrow = self.config.training.precision.computation == "float16"
        return LossScale.dynamic() if narrow else None

    @cached_property
    def step(self) -> Function:
        """The training step: ``(state, batch) -> (state, metrics)``."""
        return make_train_step(self.step_config, self.abstract_state)

    @cached_property
    def compiled(self) -> Compiled:
        """The compiled step, which its first call finds; or the only evaluation."""
        if self.config.training.eval_only:
            return self._compiled_evaluation
        return self.step.compile(self.abstract_state, self.abstract_batch)

    @cached_property
    def flops(self) -> int:
        """Floating-point operations of one step, on all devices together."""
        return count(self.compiled.traced.graph.program).total

    @cached_property
    def evaluate(self) -> Function:
        """The loss of one batch: ``(params, batch) -> (summed loss, tokens)``."""
        return make_eval_step(self.step_config)

    def compile_others(self, corpus: Corpus) -> None:
        """Compile what a run computes beside its steps before the first of them.

        A run that is asked to end cannot do so in the middle of a compilation.
        """
        is_policy = self.config.training.objective == POLICY
        if corpus.has_validation and not is_policy:
            _ = self._compiled_evaluation
        _ = self.compiled_scores

    @cached_property
    def compiled_scores(self) -> dict[str, Compiled]:
        """The programs that score rows of a step's batch, by the model that does."""
        training = self.config.training
        if training.eval_only and training.objective == POLICY:
            return {}
        state = self.abstract_state
        rows = {name: self.abstract_batch[name] for name in BATCH}
        programs = {
            "reference": (self.score_reference, self.reference_params(state)),
            "policy": (self.score_policy, state.params),
        }
        return {
            name: score.compile(params, rows)
            for name, (score, params) in programs.items()
            if score is not None
        }

    @cached_property
    def _compiled_evaluation(self) -> Compiled:
        rows = self.config.rows_per_evaluation(self.mesh.shape)
        shape = rows, self.config.training.sequence_length
        batch = self._abstract_rows(shape, self.validation_spec)
        return self.evaluate.compile(self.abstract_state.params, batch)

    @property
    def validation_spec(self) -> PartitionSpec:
        """The layout of the arrays of a batch that is evaluated."""
        return PartitionSpec(self.step_config.data_axes or None)

    def step_fingerprint(self) -> tuple[str, dict[str, str]]:
        """A fingerprint of the lowered step, and how often it has each operation.

        Processes whose fingerprints differ would exchange numbers of other programs.
        """
        text = self.compiled.traced.lower().as_text()
        kinds = Counter(re.findall(r"\b(?:stablehlo|sdy)\.\w+", text))
        counts = {kind: str(number) for kind, number in sorted(kinds.items())}
        return hashlib.sha256(text.encode()).hexdigest()[:16], counts

    def data_fingerprint(self, corpus: Corpus) -> tuple[str, dict[str, str]]:
        """A fingerprint of the data and of the tokenizer, and those of their parts."""
        tokenizer = tokenizer_fingerprint(self.config.data.tokenizer_name)
        parts = corpus.fingerprint_parts() | {"tokenizer": tokenizer}
        return corpus.fingerprint, parts

    @cached_property
    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and layouts of the state; nothing is allocated."""
        config, guard = self.step_config, self.step_config.spikes
        shapes = replace(
            abstract_state(self.model, config.optimizer, loss_scale=self.loss_scale),
            spikes=None if guard is None else guard.abstract_window,
            reference=self.model.abstract() if config.keeps_reference else None,
        )
        specs, mesh = layouts_of_state(config, self.loss_scale), self.mesh.compile_mesh
        moments_at = optimizer_offload.shardings(
            mesh, specs.optimizer, shapes.optimizer, on_host=config.offload_optimizer
        )
        shardings = jax.tree.map(partial(NamedSharding, mesh), specs)
        shardings = replace(shardings, optimizer=moments_at)
        return jax.tree.map(optimizer_offload.placed_struct, shapes, shardings)

    def fresh_parts(self) -> dict[str, Any]:
        """What a new state has beside parameters and moments, by field."""
        # Copied: a step donates its state, but the run keeps its own.
        scale = jax.tree.map(jnp.copy, self.loss_scale)
        guard = self.step_config.spikes
        window = None if guard is None else guard.empty_window()
        parts = {"loss_scale": scale, "spikes": window}
        return jax.device_put(parts, NamedSharding(self.mesh.jax, PartitionSpec()))

    @property
    def abstract_batch(self) -> dict[str, Any]:
        """Shapes, dtypes and layouts of one step's batch."""
        training = self.config.training
        rows = self.config.rows_per_microbatch(self.mesh.shape)
        steps = training.gradient_accumulation_steps
        shape = steps, rows, training.sequence_length
        return self._abstract_rows(shape, batch_spec(self.step_config))

    def _abstract_rows(self, shape: tuple[int, ...], spec: PartitionSpec) -> Any:
        sharding = NamedSharding(self.mesh.compile_mesh, spec)
        struct = partial(jax.ShapeDtypeStruct, shape, sharding=sharding)
        others = dict.fromkeys(self.objective.arrays, struct(jnp.float32))
        return dict.fromkeys(BATCH, struct(jnp.int32)) | others

    def layout_notes(self) -> list[str]:
        """What a reader of the settings would not expect, one sentence each."""
        return [*layout_notes(self)]

    def warnings(self, published: Published | None = None) -> list[str]:
        """What is legal and likely a mistake, one sentence each.

        Args:
          published: What the folder of the weights says beside them.
        """
        training, found = self.config.training, list[str | None]()
        if training.init_from is None:
            found.append(RANDOM_WEIGHTS if tunes_nothing(self.config) else None)
        elif not training.eval_only:
            groups = data_parallel_groups(self.mesh.shape)
            whole = not self.model.frozen
            found.append(unusual_rate(self.config.optimizer, groups, trains_all=whole))
        grpo = self.config.grpo
        if grpo.server is not None and grpo.server_weights is None:
            found.append(
                "grpo.server keeps the weights that it was started with, and all "
                "completions are of these; grpo.server_weights=sglang:/shared/policy "
                "gives it those of the run before each rollout"
            )
        length, config = training.sequence_length, self.config.model.config
        found.append((published or Published()).excess_length(length, config))
        return [text for text in found if text]

    def check(self) -> None:
        """Raise what does not fit before anything is compiled or written.

        Raises:
          HeadCountError: [T402] the heads cannot be divided over ``tp``.
          ShardDivisibilityError: [T201] a parameter cannot be split over its axes.
          HostMemoryError: [T703] there is no host memory to offload to.
          SettingConflictError: [T507] numerics cannot be deterministic here, or the
            devices have no fp8.
          BatchSizeError: [T503] a step cannot be cut into its parts.
          WeightFileError: [T805] the file to begin with has other parameters.
          DeviceCountError: [T702] the mesh has too many devices to compile for here.
          DeviceMemoryError: [T509] the devices do not hold the state.
        """
        training = self.config.training
        # A size of -1 is known only now.
        problems = [*numerics_problems(self.config, self.mesh.shape)]
        if training.objective == POLICY:
            problems += rollout_problems(self.config, self.mesh.shape)
        raise_all(problems)
        check_compilable(self.mesh)
        if training.precision.fp8:
            check_fp8(self.mesh)
        try:
            self.model.layouts(self.mesh)
        except ShardDivisibilityError as error:
            raise with_idle_devices(error, self.mesh) from error
        begins_with, is_dry = self.config.training.init_from, training.dry_run
        # A dry run downloads no weights.
        if begins_with and not (is_dry and begins_with.startswith(PREFIX)):
            check_weights(begins_with, self.model)
        if self.step_config.offload_optimizer:
            optimizer_offload.check_host_memory(self.mesh)
        if not (is_dry or self.mesh.is_abstract):
            check_state_fits(self.abstract_state, self.mesh)

    def load_data(self) -> Corpus:
        """Read and pack the data, and see that it makes batches.

        Raises:
          TesseraError: T601 to T608, as ``data.load`` says; T604 and T605 also for the
            text that the sample at the end continues.
          EmptyDataError: [T602] there are fewer rows than one step takes.
          SettingConflictError: [T507] the loss compares answers, and some are single.
          BatchSizeError: [T503] a batch cannot be divided over the processes.
        """
        training = self.config.training
        is_policy, length = training.objective == POLICY, training.sequence_length
        corpus = load(
            self.config.data,
            sequence_length=self.config.longest_prompt if is_policy else length,
            seed=training.seed,
            vocab_size=self.model.vocab_size,
        )
        if is_policy:
            corpus = PromptCorpus(**vars(corpus))
            self._check_prompt(corpus)
            return corpus
        if training.objective == PREFERENCE:
            check_pairs(corpus, self.config.preference.loss)
        part = 0, 1
        if not self.mesh.is_abstract:
            part = self.host_shard.index, self.host_shard.count
        # The loop would raise the same errors, but after the step was compiled.
        if not training.eval_only:
            self._check_prompt(corpus)
            corpus.train(
                self.rows_per_step,
                *part,
                microbatches=training.gradient_accumulation_steps,
            ).close()
        corpus.validation(self.config.rows_per_evaluation(self.mesh.shape), *part)
        return corpus

    def _check_prompt(self, corpus: Corpus) -> None:
        """See that the model has the tokens that the sample at the end continues."""
        training, tokenizer = self.config.training, corpus.tokenizer
        if training.sample_length and tokenizer.kind != "synthetic":
            text = training.sample_prompt
            ids, size = tokenizer.encode(text), self.model.vocab_size
            check_tokens("training.sample_prompt", text, ids, tokenizer, size)

    @property
    def rows_per_step(self) -> int:
        """Sequences that one optimizer step learns from."""
        return self.config.rows_per_step(self.mesh.shape)

    @cached_property
    def host_shard(self) -> HostShard:
        """Which rows of each batch this process reads."""
        return HostShard.of(self.mesh, self.step_config.data_axes)
