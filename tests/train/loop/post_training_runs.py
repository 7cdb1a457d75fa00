# SPDX-License-Identifier: Apache-2.0
"""Short runs of a small model that learn from pairs and from rewards."""

import dataclasses
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tessera.train.checkpoints.choose_checkpoint import choose
from tessera.train.checkpoints.saving import Checkpoints
from tessera.train.config.optimizer_config import SgdConfig
from tessera.train.config.post_training_config import (
    POLICY,
    PREFERENCE,
    GrpoConfig,
    PreferenceConfig,
)
from tessera.train.config.run_config import Config, ModelConfig, TrainingConfig
from tessera.train.data.data_config import DataConfig, SyntheticConfig
from tessera.train.loop.build_run import Run
from tessera.train.loop.console import Console
from tessera.train.loop.metrics import MetricWriter
from tessera.train.loop.rollout_batches import RolloutBatches
from tessera.train.loop.run_folder import SAMPLES, open_run_folder
from tessera.train.loop.train_state import TrainState, init_state
from tessera.train.loop.training_loop import Callbacks, Trainer
from tessera.train.rewards.rewards import Scores
from tessera.train.rollouts.completions import Completion, RolloutStopped
from tests.train.loop.short_runs import CONFIG, run_of

ONE = ((1,), ("fsdp",))
TWO_BY_TWO = ((2, 2), ("fsdp", "tp"))
LENGTH = 16
ROWS = 4
SEPARATOR = 256


def preference_run(loss: str = "dpo", mesh: Any = ONE, **training: Any) -> Run:
    """A run whose step is plain SGD, on four rows in two microbatches."""
    fields: dict[str, Any] = {
        "steps": 3,
        "sequence_length": LENGTH,
        "global_batch_size": ROWS,
        "micro_batch_size": 2 * ROWS // 4 // max(mesh[0][0], 1),
        "objective": PREFERENCE,
        "sample_length": 0,
    }
    model, preference = training.pop("model", {}), training.pop("preference", {})
    return run_of(
        Config(
            name="pairs",
            model=ModelConfig(
                **{"name": "small", "mesh_shape": mesh, "config": CONFIG, **model}
            ),
            training=TrainingConfig(**{**fields, **training}),
            data=DataConfig(name="synthetic", synthetic=SyntheticConfig(tokens=4000)),
            optimizer=SgdConfig(learning_rate=0.5, warmup_steps=0, schedule="constant"),
            preference=PreferenceConfig(loss=loss, beta=0.5, **preference),
        )
    )


def pairs_run(
    path: str,
    reference: str,
    mesh: Any = ONE,
    data: dict[str, Any] | None = None,
    **training: Any,
) -> Run:
    """The same on pairs of answers, of which a tenth is for validation."""
    run = preference_run(mesh=mesh, preference={"reference": reference}, **training)
    fields = {"name": "preferences", "path": path, "validation_fraction": 0.1}
    chosen = DataConfig(**{**fields, **(data or {})})
    return Run(dataclasses.replace(run.config, data=chosen), run.mesh)


def begun(run: Run, seed: int = 0) -> TrainState:
    """Its state before the first step."""
    config = run.step_config
    state = init_state(
        run.model,
        config.optimizer,
        jax.random.key(seed),
        run.mesh,
        zero_stage=config.zero_stage,
        offload_optimizer=config.offload_optimizer,
        keeps_reference=config.keeps_reference,
    )
    return dataclasses.replace(state, **run.fresh_parts())


def write_pairs(path: Path, count: int = 60) -> str:
    """Sums of two digits, with a right answer and a wrong one."""
    draw = np.random.default_rng(0)
    lines = [
        {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + c)}
        for a, b, c in draw.integers(1, 9, (count, 3)).tolist()
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def train_pairs(
    run: Run,
    folder: Path,
    resume: str = "none",
    should_continue: Callable[[], bool] = lambda: True,
) -> Trainer:
    """What ``run_training.py`` does with preferences."""
    corpus, choice = run.load_data(), choose(resume, folder)
    choice.check(run, corpus, "")
    opened = open_run_folder(folder, "", choice.own_step)
    with (
        MetricWriter(opened) as writer,
        Console(opened.log, stream=io.StringIO(), terminal=False) as console,
        Checkpoints(run, choice.root, "", choice.own_step) as checkpoints,
    ):
        trainer = Trainer(
            *(run, corpus, console, writer, None, checkpoints, choice.checkpoint),
            callbacks=Callbacks(should_continue=should_continue),
        )
        trainer.train()
    return trainer


def placed(run: Run, rows: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """Rows ``[N, S]`` as the batch of a step."""
    steps = run.config.training.gradient_accumulation_steps
    return {
        name: jax.device_put(
            array.reshape(steps, -1, array.shape[-1]), run.abstract_batch[name].sharding
        )
        for name, array in rows.items()
    }


def write_prompts(path: Path, count: int = 40) -> str:
    """Sums of two digits, with their answers."""
    draw = np.random.default_rng(0)
    lines = [
        {"prompt": f"{a}+{b}=", "answer": str(a + b)}
        for a, b in draw.integers(0, 10, (count, 2)).tolist()
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def policy_run(
    path: str, mesh: Any = ONE, grpo: dict[str, Any] | None = None, **training: Any
) -> Run:
    """A run that learns from the rewards of completions of up to six bytes."""
    fields: dict[str, Any] = {
        "steps": 4,
        "sequence_length": LENGTH,
        "global_batch_size": 8,
        "micro_batch_size": 4 // max(mesh[0][0], 1),
        "objective": POLICY,
        "sample_length": 0,
        "checkpoint_every": 1,
    }
    data = DataConfig(name="prompts", path=path, validation_fraction=0.1)
    return run_of(
        Config(
            name="sums",
            model=ModelConfig(name="small", mesh_shape=mesh, config=CONFIG),
            training=TrainingConfig(**{**fields, **training}),
            data=data,
            optimizer=SgdConfig(learning_rate=0.5, warmup_steps=0, schedule="constant"),
            grpo=GrpoConfig(**{"group_size": 4, "max_completion": 6, **(grpo or {})}),
            rewards=["tests.train.loop.post_training_runs:unused"],
        )
    )


class ScriptedSampler:
    """Writes what it is told after each prompt; counts its calls."""

    def __init__(self, write: Callable[[int, Sequence[int]], list[int]]) -> None:
        self.write, self.keys = write, list[Any]()

    def complete(
        self, params: Any, prompts: Any, keys: jax.Array, *, should_continue: Any
    ) -> list[Completion]:
        del params
        if not should_continue():
            raise RolloutStopped
        self.keys.append(np.asarray(jax.random.key_data(keys)).tolist())
        made = [np.array(self.write(*pair), np.int32) for pair in enumerate(prompts)]
        return [
            Completion(
                ids, np.full(ids.size, -1, np.float32), SEPARATOR in ids.tolist()
            )
            for ids in made
        ]


class ScriptedRewards:
    """Scores completions in this process, by a function of each text."""

    names = ("scripted",)

    def __init__(self, score: Callable[[Any], float]) -> None:
        self._score, self.seen = score, list[Any]()

    def score(self, prompts: Any, completions: Any, columns: Any) -> Scores:
        self.seen.append((prompts, completions, columns))
        total = np.array([self._score(text) for text in completions], np.float64)
        return Scores(self.names, total[:, None], total, np.isnan(total), ("a note",))

    def close(self) -> None:
        self.seen.append("closed")


def digits(text: str) -> float:
    """The share of digits, which a few steps raise."""
    return sum(one.isdigit() for one in text) / max(len(text), 1)


def train_policy(
    run: Run,
    folder: Path,
    resume: str = "none",
    *,
    score: Callable[[Any], float] = digits,
    sampler: Any = None,
    should_continue: Callable[[Trainer], bool] = lambda _: True,
) -> Trainer:
    """What ``run_training.py`` does, with rewards of this process."""
    corpus, choice = run.load_data(), choose(resume, folder)
    choice.check(run, corpus, "")
    opened = open_run_folder(folder, "", choice.own_step)
    with (
        MetricWriter(opened) as writer,
        Console(opened.log, stream=io.StringIO(), terminal=False) as console,
        Checkpoints(run, choice.root, "", choice.own_step) as checkpoints,
        RolloutBatches(
            *(run, corpus, ScriptedRewards(score), corpus.columns),
            *(lambda phase, step: None, folder / SAMPLES),
        ) as batches,
    ):
        if sampler is not None:
            vars(vars(batches)["_writer"])["_sampler"] = sampler
        trainer = Trainer(
            *(run, corpus, console, writer, None, checkpoints, choice.checkpoint),
            callbacks=Callbacks(
                source=batches, should_continue=lambda: should_continue(trainer)
            ),
        )
        trainer.train()
    return trainer


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
