# SPDX-License-Identifier: Apache-2.0
"""``RolloutBatches``: batches of what the policy itself wrote, with its rewards."""

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import jax
import numpy as np

from tessera.train.config.step_config import batch_spec
from tessera.train.data import Corpus
from tessera.train.data.prompts import Prompt, PromptCorpus
from tessera.train.loop.build_run import BATCH, Run
from tessera.train.loop.console import log
from tessera.train.loop.host_data_sharding import on_every_host
from tessera.train.loop.position import Position, StepInput
from tessera.train.loop.reference_scores import with_reference
from tessera.train.loop.reward_models import RewardModel
from tessera.train.loop.run_folder import SAMPLES
from tessera.train.loop.train_state import TrainState
from tessera.train.loop.trajectory_writer import TrajectoryWriter, answer_of
from tessera.train.rewards.reward_names import ENVIRONMENT
from tessera.train.rewards.rewards import Rewards, Scores
from tessera.train.rollouts.completions import RolloutStopped
from tessera.train.rollouts.rollout import Rollout, learned_rows, rows_of
from tessera.train.rollouts.trajectories import Trajectory

# Completions of a rollout that are kept to be read.
_KEPT: Final = 16
_NOTHING: Final = "the rewards of each group are equal: nothing to learn"
# Folded into the keys of evaluations, which are the same after each step.
_VALIDATION: Final = 2**31 - 1


@dataclass(frozen=True)
class _Written:
    """Completions and their rewards.

    Attributes:
      prompts: One for each completion.
      trajectories: What follows them.
      texts: The completions as reward functions see them.
      scores: Their rewards.
      seconds: How long both took, by phase.
    """

    prompts: Sequence[Prompt]
    trajectories: Sequence[Trajectory]
    texts: Sequence[Any]
    scores: Scores
    seconds: Mapping[str, float]

    def numbers(self) -> dict[str, float]:
        """Metrics; the mean of no number is NaN."""
        scores, written = self.scores, [t.is_own.sum() for t in self.trajectories]
        judged = scores.total[~scores.is_missing]
        each = {
            f"reward/{name}": _mean(column[~np.isnan(column)])
            for name, column in zip(scores.names, scores.by_name.T, strict=True)
        }
        return {
            "reward": _mean(judged),
            **each,
            "reward_missing": float(scores.is_missing.mean()),
            "completion_length": float(np.mean(written)),
            "truncated_fraction": 1
            - float(np.mean([t.ended for t in self.trajectories])),
        }


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else float("nan")


class RolloutBatches(AbstractContextManager["RolloutBatches"]):
    """Samples completions of prompts, scores them, and cuts them into batches.

    Args:
      run: The run.
      corpus: Its prompts.
      rewards: What scores completions, and ends with the context of this; None where
        an environment alone does.
      columns: What it is given of each record.
      on_phase: Called with the phase that begins and the step's number.
      samples: The file that some completions are appended to; None keeps none.
      published: The files of the folder that the run began with.
    """

    def __init__(
        self,
        run: Run,
        corpus: PromptCorpus,
        rewards: Rewards | None,
        columns: Sequence[str],
        on_phase: Callable[[str, int], None],
        samples: Path | None,
        published: Mapping[str, str] | None = None,
    ) -> None:
        self._run, self._corpus, self._rewards = run, corpus, rewards
        self._on_phase, self._samples = on_phase, samples
        self._settings = run.config.grpo
        self._columns = columns
        self._said = set[str]()
        self._writer = TrajectoryWriter(run, corpus, columns, published or {})

    def __exit__(self, *_: object) -> None:
        if self._rewards is not None:
            self._rewards.close()

    def batches(
        self,
        position: Callable[[], Position],
        drain: Callable[[], None],
        should_continue: Callable[[], bool] = lambda: True,
    ) -> Generator[StepInput]:
        """See ``BatchSource``."""
        passes = self._settings.passes
        for note in self._writer.notes:
            log.info("%s", note)
        while True:
            at, numbers = position(), dict[str, float]()
            rollout, cursor = at.rollout, at.cursor
            if rollout is None or rollout.used >= passes * rollout.rows:
                drain()
                rollout, numbers = self._roll_out(at, should_continue)
                cursor = cursor.advance(rollout.rows // self._settings.group_size)
            rows, rollout = rollout.take(self._run.rows_per_step)
            placed = self._placed(rows)
            placed = with_reference(self._run, at.state, placed)
            yield StepInput(placed, cursor, numbers, rollout)

    def validate(
        self, step: int, state: TrainState, should_continue: Callable[[], bool]
    ) -> dict[str, dict[str, float]] | None:
        """Means over one completion of each of the prompts for validation."""
        if not should_continue():
            return None
        prompts = self._corpus.take_validation(
            self._run.config.training.validation_sequences
        )
        if not prompts:
            return {}
        keys = self._keys(_VALIDATION, len(prompts))
        phases = "evaluation", "evaluation"
        try:
            written = self._write(step, state, prompts, keys, should_continue, phases)
        except RolloutStopped:
            return None
        return {self._corpus.sources[0].name: written.numbers()}

    def _roll_out(
        self, at: Position, should_continue: Callable[[], bool]
    ) -> tuple[Rollout, dict[str, float]]:
        """The completions of the next prompts, and metrics of them."""
        settings, run = self._settings, self._run
        rows = run.rows_per_step * settings.steps_per_rollout
        size, first = settings.group_size, at.cursor.rows
        prompts = self._corpus.take(first, rows // size)
        repeated = [prompt for prompt in prompts for _ in range(size)]
        keys = self._keys(first, len(prompts), size)
        written = self._write(at.step + 1, at.state, repeated, keys, should_continue)
        total, is_missing = written.scores.total, written.scores.is_missing
        masks = settings.truncated == "mask"
        ended = np.array([t.ended for t in written.trajectories])
        arrays = rows_of(
            [prompt.ids for prompt in repeated],
            written.trajectories,
            run.config.training.sequence_length,
        )
        arrays = learned_rows(
            arrays,
            settings.algorithm,
            total,
            is_missing,
            ~ended & masks,
            group_size=size,
            max_tokens=settings.max_completion,
            rows_per_step=run.rows_per_step,
        )
        rollout = Rollout(arrays, run.rollout_form or "")
        self._on_phase("step", at.step + 1)
        if run.score_policy is not None:
            old = self._scored(run.score_policy, at.state.params, rollout)
            rollout = replace(rollout, arrays={**arrays, "old": old})
        self._keep(at.step + 1, written, rollout)
        groups = rollout.arrays["advantages"][:, 0].reshape(-1, size)
        varies = (groups != 0).any(axis=1)
        seconds, judged = written.seconds, total[~is_missing]
        if judged.size and not varies.any():
            self._warn_once(at.step + 1, _NOTHING)
        tokens = sum(t.is_own.sum() for t in written.trajectories)
        return rollout, written.numbers() | {
            "reward_std": float(np.std(judged)) if judged.size else float("nan"),
            "groups_without_variance": 1 - float(varies.mean()),
            "rollout_seconds": seconds["rollout"],
            "reward_seconds": seconds["reward"],
            "rollout_tokens_per_second": float(tokens / seconds["rollout"]),
        }

    def _warn_once(self, step: int, note: str) -> None:
        """Log what has not been said yet, whatever its parentheses say."""
        if (kind := note.partition(" (")[0]) not in self._said:
            log.warning("step %d: %s", step, note)
            self._said.add(kind)

    def _keys(self, first: int, count: int, size: int = 1) -> jax.Array:
        """The random key of each completion, by the numbers of its prompt and its own.

        Args:
          first: The position of the first prompt in the order of training.
          count: Prompts.
          size: Completions of each.
        """
        key = jax.random.fold_in(jax.random.key(self._run.config.training.seed), 1)
        fold = jax.vmap(jax.random.fold_in, (None, 0))
        of_prompts = fold(key, np.arange(first, first + count, dtype=np.uint32))
        of_groups = jax.vmap(fold, (0, None))(of_prompts, np.arange(size))
        return of_groups.reshape(-1)

    def _write(
        self,
        step: int,
        state: TrainState,
        prompts: Sequence[Prompt],
        keys: jax.Array,
        should_continue: Callable[[], bool],
        phases: tuple[str, str] = ("rollout", "reward"),
    ) -> _Written:
        """A completion of each prompt, and its rewards."""
        self._on_phase(phases[0], step)
        begin = perf_counter()
        trajectories = self._writer.write(state.params, prompts, keys, should_continue)
        middle = perf_counter()
        self._on_phase(phases[1], step)
        tokenizer = self._corpus.tokenizer
        answers = [
            answer_of(prompt, after, tokenizer)
            for prompt, after in zip(prompts, trajectories, strict=True)
        ]
        columns = {
            name: [prompt.columns.get(name) for prompt in prompts]
            for name in self._columns
        }
        columns["completion_ids"] = [t.tokens.tolist() for t in trajectories]
        contents = [prompt.content for prompt in prompts]
        scores = Scores.none(len(prompts))
        if self._rewards is not None:
            scores = self._rewards.score(contents, answers, columns)
        if self._run.config.grpo.environment is not None:
            of_environment = [after.reward for after in trajectories]
            scores = scores.joined(ENVIRONMENT, of_environment)
        failures = [f"the environment {t.failure}" for t in trajectories if t.failure]
        for note in (*scores.notes, *failures):
            self._warn_once(step, note)  # the metric reward_missing counts the others
        if scores.is_missing.all():
            log.warning("step %d: no completion has a reward", step)
        seconds = {"rollout": middle - begin, "reward": perf_counter() - middle}
        return _Written(prompts, trajectories, answers, scores, seconds)

    def _placed(self, rows: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """The rows of a step on their devices, ``[accumulation, B, S]``."""
        run, shard = self._run, self._run.host_shard
        steps = run.config.training.gradient_accumulation_steps
        micro = run.rows_per_step // steps
        mine = micro // shard.count
        own = slice(shard.index * mine, (shard.index + 1) * mine)
        folded = {
            name: array.reshape(steps, micro, -1)[:, own]
            for name, array in rows.items()
        }
        return shard.to_global(folded, batch_spec(run.step_config), dim=1)

    def _scored(self, score: Any, params: Any, rollout: Rollout) -> np.ndarray:
        """Log-probabilities of all rows under a policy, on the host."""
        parts = list[np.ndarray]()
        for _ in range(self._settings.steps_per_rollout):
            rows, rollout = rollout.take(self._run.rows_per_step)
            placed = self._placed({name: rows[name] for name in BATCH})
            values = on_every_host(score(params, placed))
            parts.append(values.reshape(self._run.rows_per_step, -1))
        return np.concatenate(parts)

    def _keep(self, step: int, written: _Written, rollout: Rollout) -> None:
        """Append the first completions of a rollout to the file of samples."""
        if self._samples is None:
            return
        scores, gains = written.scores, rollout.arrays["advantages"][:, 0]
        with self._samples.open("a", encoding="utf-8") as file:
            for i, after in enumerate(written.trajectories[:_KEPT]):
                rewards = dict(zip(scores.names, scores.by_name[i], strict=True))
                line = {
                    "step": step,
                    "index": i,
                    "prompt": written.prompts[i].content,
                    "completion": written.texts[i],
                    "reward": _json(scores.total[i]),
                    "rewards": {name: _json(value) for name, value in rewards.items()},
                    "advantage": _json(gains[i]),
                    "tokens": int(after.is_own.sum()),
                    "ended": after.ended,
                }
                file.write(json.dumps(line) + "\n")


def open_rollouts(
    run: Run,
    corpus: Corpus,
    on_phase: Callable[[str, int], None],
    folder: Path,
    published: Mapping[str, str],
) -> RolloutBatches | None:
    """Where the batches of a policy come from; None of other objectives.

    Args:
      run: The run.
      corpus: Its data.
      on_phase: See ``RolloutBatches``.
      folder: Of the run; the first process alone writes there.
      published: The files of the folder that the run began with.

    Raises:
      RewardError: [T720] a reward function cannot be used.
      TesseraError: As ``RewardModel`` does.
    """
    settings, names = run.config.grpo, run.config.rewards
    if not isinstance(corpus, PromptCorpus):
        return None
    reserved = {"prompts", "completions", "completion_ids"}
    columns = [n for n in corpus.columns if n not in reserved]
    rewards = None
    if names:
        has_messages = not isinstance(corpus.take(0, 1)[0].content, str)
        rewards = Rewards(
            names,
            settings.reward_weights,
            columns=(*columns, "completion_ids"),
            open_model=partial(RewardModel, run, reads_messages=has_messages),
            time_limit=settings.reward_time_limit,
            processes=settings.reward_processes,
        )
    samples = None if jax.process_index() else folder / SAMPLES
    return RolloutBatches(run, corpus, rewards, columns, on_phase, samples, published)


def _json(value: float) -> float | None:
    """A reward; None where it is missing."""
    return float(value) if np.isfinite(value) else None
