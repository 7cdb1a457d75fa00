# SPDX-License-Identifier: Apache-2.0
"""No setting is accepted and ignored: another value changes the run, or is refused.

For each kind of run and each setting that the step or its data is made of: with another
value than that of the run the settings are refused; or arrays, layouts, learning rates,
batches or the traced step are others; or the run says that the setting changes nothing.
What the loop alone reads is in ``tests/train/config/test_unused_settings.py``.
"""

import re
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tessera.errors import TesseraError
from tessera.train.config.command_line import compose
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.config.run_config import Config
from tessera.train.loop.build_run import Run as TrainingRun
from tests.fuzz.override_lists import SETTINGS, SMALL

ROOT = Path(__file__).parents[2]
PAIRS = ROOT / "tests" / "fuzz" / "pairs.jsonl"

BASE = (*SMALL, "model.global_every=2", "training.gradient_accumulation_steps=2")
RUNS = {
    "one device": (),
    "experts": ("model=moe_tiny", "model.mesh_shape=[[2],[ep]]"),
    "dp": ("model.mesh_shape=[[2],[dp]]",),
    "dp, alone": ("model.mesh_shape=[[1],[dp]]",),
    "fsdp and tp": ("model.mesh_shape=[[2,2],[fsdp,tp]]",),
    "tp, alone": ("model.mesh_shape=[[2,1],[dp,tp]]",),
    "cp": ("model.mesh_shape=[[2],[cp]]",),
    "pp": ("model.mesh_shape=[[2],[pp]]",),
    "pp, alone": ("model.mesh_shape=[[1],[pp]]",),
    "pp and fsdp": ("model.mesh_shape=[[2,2],[pp,fsdp]]",),
    "pp and fsdp, alone": ("model.mesh_shape=[[2,1],[pp,fsdp]]",),
    "pp, interleaved": (
        *("model.mesh_shape=[[2],[pp]]", "model.num_layers=4"),
        *("training.pipeline_schedule=interleaved", "training.pipeline_chunks=2"),
    ),
    "deterministic": (
        *("training.numerics=deterministic", "training.reduction_parts=2"),
        "model.mesh_shape=[[2],[dp]]",
    ),
    "f16": ("training.mixed_precision=fp16",),
    "only global layers": ("model.global_every=1",),
    "only local layers": ("model.global_every=9",),
    "one layer": ("model.num_layers=1", "model.global_every=9"),
    "adam": ("optimizer=adam",),
    "sgd": ("optimizer=sgd",),
    "sgd without momentum": ("optimizer=sgd", "optimizer.momentum=0"),
    "lion": ("optimizer=lion",),
    "adafactor": ("optimizer=adafactor",),
    "a constant rate": ("optimizer.schedule=constant",),
    "adapters": (
        *("model.lora.rank=2", "recipe=none"),
        "model.mesh_shape=[[2],[fsdp]]",
    ),
    "adapters on 4 bits": (
        *("model.lora.rank=2", "recipe=none", "model.lora.quantize_base=nf4"),
        *("model.d_model=64", "model.head_dim=32", "model.mlp_dim=64"),
        *("model.num_heads=2", "model.num_kv_heads=1"),
    ),
    "preferences": (
        *("training.objective=preference", "data=preferences", f"data.path={PAIRS}"),
        *("data.synthetic.tokens=2000000", "data.tokenizer=bytes"),
        "model.vocab_size=264",
    ),
    "a policy": (
        *("training.objective=policy", "data=prompts", f"data.path={PAIRS}"),
        *("data.synthetic.tokens=2000000", "data.tokenizer=bytes"),
        *("model.vocab_size=264", "rewards=[length(maximum=5)]", "grpo.group_size=2"),
        *("grpo.max_completion=4", "grpo.kl_coefficient=0.1"),
    ),
    "the standard library": (
        *("data=stdlib", "data.synthetic.tokens=2000000", "model.vocab_size=264"),
    ),
}
# Another value of each setting; where a run has it already, the second one.
OTHERS = {
    "model.sequence_parallel": ("true",),
    "model.context_parallel": ("all_to_all",),
    "model.vocab_size": ("300",),
    "model.d_model": ("32",),
    "model.num_layers": ("4", "2"),
    "model.num_heads": ("4",),
    "model.num_kv_heads": ("2",),
    "model.head_dim": ("16",),
    "model.mlp_dim": ("32",),
    "model.window": ("4",),
    "model.query_pre_attn_scalar": ("0.5",),
    "model.global_every": ("2", "1"),
    "model.rope_base_local": ("500",),
    "model.rope_base_global": ("500",),
    "model.rope_scale_global": ("8",),
    "model.layer_types": ("[local,global]", "[global,local]"),
    "model.rope_scale_local": ("8",),
    "model.rope_kind": ("llama3",),
    "model.rope_original_length": ("64",),
    "model.rope_low_rotations": ("2",),
    "model.rope_high_rotations": ("16",),
    "model.rope_dims": ("4",),
    "model.rope_short_factors": ("[1,2]",),
    "model.rope_long_factors": ("[1,2]",),
    "model.rope_truncate": ("false",),
    "model.rope_attention_factor": ("2",),
    "model.norm_epsilon": ("1e-4",),
    "model.norm_unit_offset": ("false",),
    "model.post_norms": ("false",),
    "model.qk_norm": ("false",),
    "model.qk_norm_joint": ("true",),
    "model.pre_norms": ("false",),
    "model.qkv_bias": ("true",),
    "model.output_bias": ("true",),
    "model.activation": ("silu",),
    "model.scale_embedding": ("false",),
    "model.tied_head": ("false",),
    "model.attention_sinks": ("true",),
    "model.expert_biases": ("true",),
    "model.attention_soft_cap": ("0.1",),
    "model.logit_soft_cap": ("2",),
    "model.renormalize_experts": ("false",),
    "model.definition": ("other",),
    "model.scan_unroll": ("2",),
    "model.num_experts": ("4",),
    "model.experts_per_token": ("1",),
    "model.router_balance_weight": ("0.5",),
    "model.router_z_weight": ("0.5",),
    "model.lora.rank": ("3",),
    "model.lora.alpha": ("5",),
    "model.lora.targets": ("[q_proj]",),
    "model.lora.quantize_base": ("int8",),
    "model.mesh_shape": ("[[2,2],[dp,fsdp]]",),
    "training.steps": ("7",),
    "training.seed": ("7",),
    "training.sequence_length": ("32",),
    "training.micro_batch_size": ("4",),
    "training.global_batch_size": ("8",),
    "training.gradient_accumulation_steps": ("4",),
    "training.sync_gradients_every": ("2",),
    "training.mixed_precision": ("bf16",),
    "training.zero_stage": ("1",),
    "training.offload_optimizer": ("true",),
    "training.remat": ("full",),
    "training.loss_chunk": ("4",),
    "training.numerics": ("deterministic", "fast"),
    "training.reduction_parts": ("4",),
    "training.pipeline_schedule": ("gpipe",),
    "training.pipeline_chunks": ("2", "4"),
    "training.pipeline_gather": ("step",),
    "training.clip_norm": ("0.5",),
    "training.eval_only": ("true",),
    "training.trainable": ("[embedding]",),
    "training.frozen": ("[embedding]",),
    "data.name": ("stdlib", "synthetic"),
    "data.path": ("books",),
    "data.split": ("test",),
    "data.subset": ("other",),
    "data.format": ("jsonl",),
    "data.text_key": ("body",),
    "data.messages_key": ("messages",),
    "data.loss_on": ("answers",),
    "data.prompt_key": ("question",),
    "data.chosen_key": ("better",),
    "data.rejected_key": ("worse",),
    "data.tokenizer": ("words.json",),
    "data.sources": ("{a: {path: books}}",),
    "data.validation_fraction": ("0.5",),
    "data.synthetic.tokens": ("30000",),
    "data.synthetic.vocab_size": ("50",),
    "data.synthetic.noise": ("0.5",),
    "preference.loss": ("simpo",),
    "preference.beta": ("0.5",),
    "preference.label_smoothing": ("0.25",),
    "preference.margin": ("0.25",),
    "preference.reference": ("copy", "adapters_off", "precomputed"),
    "grpo.algorithm": ("gspo",),
    "grpo.passes": ("2",),
    "grpo.temperature": ("0.5",),
    "grpo.clip_low": ("0.1",),
    "grpo.clip_high": ("0.1",),
    "grpo.kl_coefficient": ("0.5",),
    "grpo.kl_estimator": ("k1",),
    "grpo.reference": ("copy", "adapters_off"),
    "grpo.importance_cap": ("2.0",),
    "optimizer.learning_rate": ("0.5",),
    "optimizer.scale_learning_rate": ("linear",),
    "optimizer.warmup_steps": ("5",),
    "optimizer.schedule": ("linear",),
    "optimizer.final_fraction": ("0.5",),
    "optimizer.beta1": ("0.5",),
    "optimizer.beta2": ("0.5",),
    "optimizer.epsilon": ("0.5",),
    "optimizer.weight_decay": ("0.5",),
    "optimizer.momentum": ("0.5",),
    "optimizer.nesterov": ("true",),
    "optimizer.scale_by_parameter": ("false",),
    "optimizer.decay_rate": ("0.5",),
    "optimizer.clip_update": ("2",),
    "optimizer.least_dim_to_factor": ("4",),
}
# How a run is called, shown, kept, watched or begun, and not what it computes.
OF_THE_LOOP = {
    *("name", "hydra.run.dir", "model.name", "optimizer.name", "data.prefetch"),
    *("data.num_workers", "data.cache_dir", "recipe"),
    *("training.max_skipped_steps", "training.log_every", "training.validate_every"),
    *("training.validation_sequences", "training.sample_prompt", "training.keep"),
    *("training.sample_length", "training.init_from", "training.checkpoint_every"),
    *("training.resume", "training.resume_data", "training.profile_communication"),
    *("training.profile_wait", "training.profile_warmup", "training.profile_active"),
    *("training.on_spike", "training.spike_threshold", "training.spike_window"),
    *("training.dry_run", "training.tracker", "training.report", "training.objective"),
    *("grpo.group_size", "grpo.steps_per_rollout", "grpo.max_completion", "rewards"),
    *("grpo.truncated", "grpo.slots", "grpo.reward_weights", "grpo.reward_processes"),
    *("grpo.reward_time_limit", "grpo.environment", "grpo.max_turns"),
    *("grpo.server", "grpo.server_model", "grpo.server_weights", "grpo.mesh_shape"),
}
CELLS = [(run, name) for run in RUNS for name in OTHERS]


def test_every_setting_is_looked_at():
    known = {name for name, _ in SETTINGS if not name.startswith("runtime.")}
    assert known == set(OTHERS) | OF_THE_LOOP


def config_of(*overrides: str) -> Config:
    return compose([*BASE, *overrides], ROOT / "configs").config


class Run:
    """What a run computes: parts that differ where a setting has an effect."""

    def __init__(self, *overrides: str) -> None:
        self.config = config_of(*overrides)
        self.run = TrainingRun(self.config, mesh_of_shape(self.config.model.mesh_shape))
        self.run.check()

    @cached_property
    def arrays(self) -> Any:
        """Shapes, dtypes and layouts of the state and of a batch, and the rates."""
        run, rate = self.run, self.run.step_config.learning_rate
        leaves, tree = jax.tree.flatten((run.abstract_state, run.abstract_batch))
        rates = [float(rate(step)) for step in (0, 3, 6, 20, 150, 299)]
        return tree, [(leaf, leaf.sharding) for leaf in leaves], rates

    @cached_property
    def batches(self) -> Any:
        corpus = self.run.load_data()
        first = next(corpus.train(4))["tokens"]
        return first.tobytes(), corpus.fingerprint, corpus.order

    @cached_property
    def step(self) -> Any:
        """The traced step, with the values that it has inside."""
        run = self.run
        program = run.step.trace(run.abstract_state, run.abstract_batch).graph.program
        inside = [np.asarray(value).tobytes() for value in program.consts]
        return re.sub(r"0x[0-9a-f]+", "", str(program)), inside


@cache
def run_of(name: str) -> Run:
    return Run(*RUNS[name])


@pytest.mark.slow(reason="it compiles a step for each value")
@pytest.mark.fuzz(sample=6, whole=len(CELLS))
def test_another_value_changes_the_run_or_is_refused(seed):
    name, setting = CELLS[seed * 101 % len(CELLS)]
    before = run_of(name)
    for value in OTHERS[setting]:
        try:
            other = Run(*RUNS[name], f"{setting}={value}")
        except TesseraError:
            return
        if other.config != before.config:
            break
    else:
        pytest.fail(f"{setting} has no other value in {name}")
    if any(setting.rpartition(".")[2] in note for note in other.run.layout_notes()):
        return
    try:
        differs = (
            other.arrays != before.arrays
            or other.batches != before.batches
            or other.step != before.step
        )
    except TesseraError:
        return
    assert differs, f"{setting}={value} is ignored: {name}"
