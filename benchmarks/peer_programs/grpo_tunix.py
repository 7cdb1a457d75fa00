# SPDX-License-Identifier: Apache-2.0
"""GRPO with google-tunix, as its documentation writes it.

python grpo_tunix.py SETTING_AS_JSON
"""

import itertools
import json
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from grpo_setting import PADDING, SEPARATOR, TEXT, Phases, Setting, Turns, digits
from tunix.models.gemma3 import model as gemma
from tunix.models.gemma3.params_safetensors import create_model_from_safe_tensors
from tunix.rl import common
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.sft.metrics_logger import MetricsLoggerOptions


class Bytes:
    """Tessera's tokenizer of bytes, with the methods that Tunix calls.

    Attributes:
      decoded: Tokens of all completions.
    """

    def __init__(self) -> None:
        self.decoded = 0

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Any, **_: Any) -> str:
        self.decoded += len(ids)
        return bytes(i for i in ids if i < SEPARATOR).decode(errors="replace")

    def bos_id(self) -> int:
        return SEPARATOR

    def eos_id(self) -> int:
        return SEPARATOR

    def pad_id(self) -> int:
        return PADDING


def model_of(folder: str, mesh: jax.sharding.Mesh) -> nnx.Module:
    """The model of a folder, in f32."""
    sizes = json.loads((Path(folder) / "config.json").read_text())
    config = gemma.ModelConfig(
        num_layers=sizes["num_hidden_layers"],
        num_embed=sizes["vocab_size"],
        embed_dim=sizes["hidden_size"],
        hidden_dim=sizes["intermediate_size"],
        num_heads=sizes["num_attention_heads"],
        head_dim=sizes["head_dim"],
        num_kv_heads=sizes["num_key_value_heads"],
        sliding_window_size=sizes["sliding_window"],
        local_base_frequency=10_000,
        global_base_frequency=1_000_000,
        param_dtype=jnp.float32,
    )
    return create_model_from_safe_tensors(folder, config, mesh, jnp.float32)


def cluster_of(setting: Setting, mesh: jax.sharding.Mesh, actor: nnx.Module) -> Any:
    """The model with its sampler and its optimizer."""
    rate = setting.learning_rate
    adamw = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.0)
    logs = MetricsLoggerOptions(f"{setting.folder}/tunix", flush_every_n_steps=20)
    tokens = setting.prompt_tokens + setting.completion_tokens
    config = ClusterConfig(
        role_to_mesh=dict.fromkeys((Role.ACTOR, Role.ROLLOUT), mesh),
        training_config=RLTrainingConfig(
            actor_optimizer=optax.chain(optax.clip_by_global_norm(1.0), adamw),
            eval_every_n_steps=setting.steps + 1,
            max_steps=setting.steps,
            metrics_logging_options=logs,
        ),
        rollout_config=RolloutConfig(
            max_tokens_to_generate=setting.completion_tokens,
            max_prompt_length=setting.prompt_tokens,
            kv_cache_size=tokens,
            temperature=1.0,
            top_p=1.0,
            top_k=None,
        ),
    )
    return RLCluster(actor=actor, tokenizer=Bytes(), cluster_config=config)


def log_prob(model: nnx.Module, length: int) -> float:
    """Of ``TEXT``, in a row as long as in training."""
    tokens = np.full((1, length), PADDING, np.int32)
    tokens[0, : len(TEXT)] = [*TEXT]
    begin = np.array([[SEPARATOR]])
    given = *nnx.split(model), begin, tokens, PADDING, SEPARATOR
    values = common.compute_per_token_logps(*given)
    return float(values[0, : len(TEXT)].sum())


def main(given: str) -> None:
    out, sys.stdout = sys.stdout, sys.stderr
    setting = Setting(**json.loads(given))
    axes = "fsdp", "tp"
    automatic = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh(tuple(setting.mesh), axes, axis_types=automatic)
    with mesh:
        actor = model_of(setting.model, mesh)
        cluster = cluster_of(setting, mesh, actor)
    turns = Turns(out)
    phases = Phases(turns)
    tokenizer = cluster.tokenizer.tokenizer

    def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        phases.enter("reward")
        values = digits(prompts, completions, **columns)
        length, tokenizer.decoded = tokenizer.decoded / setting.rows, 0
        turns.note(reward=float(np.mean(values)), length=length)
        phases.enter("step")
        return values

    lines = Path(setting.data).read_text().splitlines()
    texts = [json.loads(line)["prompt"] for line in lines]

    def batches() -> Iterator[dict[str, Any]]:
        endless = itertools.cycle(texts)
        while True:
            jax.block_until_ready(nnx.state(actor))
            phases.enter("rollout")
            few = itertools.islice(endless, setting.prompts)
            yield {"prompts": np.array([*few])}

    learner = GRPOLearner(
        rl_cluster=cluster,
        reward_fns=[reward],
        algo_config=GRPOConfig(
            num_generations=setting.group, num_iterations=1, beta=0.0, epsilon=0.2
        ),
    )
    with mesh:
        turns.answer(
            {
                "version": f"google-tunix {version('google-tunix')}",
                "jax": jax.__version__,
                "log_prob": log_prob(actor, setting.completion_tokens),
            }
        )
        learner.train(batches())


if __name__ == "__main__":
    main(sys.argv[1])
