# SPDX-License-Identifier: Apache-2.0
"""What the loop does with a model beside training it: validation loss and a sample."""

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

import jax
import numpy as np

from tessera.train.data import Corpus
from tessera.train.loop.build_run import Run
from tessera.train.loop.train_state import TrainState
from tessera.train.rollouts.sampler import generate


def validation_means(
    run: Run, corpus: Corpus, state: TrainState, should_continue: Callable[[], bool]
) -> dict[str, dict[str, float]] | None:
    """Means over the first ``training.validation_sequences`` of each source.

    Which sequences that are does not depend on the rows of a batch: the last batch is
    padded with rows that have no target.

    Args:
      run: The run.
      corpus: Its data.
      state: Whose parameters.
      should_continue: Asked before each batch; False ends the evaluation.

    Returns:
      The means of the objective's sums, the loss first, by the name of the source,
      without those that have no validation text; None where the evaluation was ended.
    """
    means = dict[str, dict[str, float]]()
    names = run.step_config.objective.sum_names
    for number, source in enumerate(corpus.sources):
        sums = _validation_sums(run, corpus, number, state, should_continue)
        if sums is None:
            return None
        *totals, count = sums.tolist()
        if count:
            each = zip(names, totals, strict=True)
            means[source.name] = {name: total / count for name, total in each}
    return means


def weighted_means(
    means: Mapping[str, Mapping[str, float]], weights: Mapping[str, float]
) -> dict[str, float]:
    """``val_<name>`` over all sources, and of each, if there are several.

    Args:
      means: As from ``validation_means``.
      weights: Of all sources, by name.
    """
    numbers = dict[str, float]()
    names = next(iter(means.values()))
    for name in names:
        values = {source: each[name] for source, each in means.items()}
        shares = [weights[source] for source in values]
        numbers[f"val_{name}"] = float(np.average([*values.values()], weights=shares))
        if len(weights) > 1:
            numbers |= {f"val_{name}/{one}": value for one, value in values.items()}
    return numbers


def _validation_sums(
    run: Run,
    corpus: Corpus,
    source: int,
    state: TrainState,
    should_continue: Callable[[], bool],
) -> np.ndarray | None:
    """The sums and the count of a source; None where the evaluation was ended."""
    shard = run.host_shard
    rows = run.config.rows_per_evaluation(run.mesh.shape)
    limit = run.config.training.validation_sequences
    names, in_flight = run.step_config.objective.sum_names, deque[Any]()
    sums = np.zeros(len(names) + 1)
    with closing(
        corpus.validation(rows, shard.index, shard.count, source=source, limit=limit)
    ) as batches:
        for batch in batches:
            if not should_continue():
                return None
            placed = shard.to_global(batch, run.validation_spec, dim=0)
            result, count = run.evaluate(state.params, placed)
            # By name: a compiled function returns them in another order.
            in_flight.append([*(result[name] for name in names), count])
            # Read a few batches behind, as the metrics of steps are.
            if len(in_flight) >= run.config.runtime.max_steps_in_flight:
                sums += np.asarray(in_flight.popleft(), np.float64)
    for numbers in in_flight:
        sums += np.asarray(numbers, np.float64)
    return sums


def sample(run: Run, corpus: Corpus, state: TrainState) -> tuple[str, str]:
    """The prompt of ``training.sample_prompt``, and how the model continues it."""
    training = run.config.training
    prompt, shown = _prompt(training.sample_prompt, corpus)
    key = jax.random.fold_in(jax.random.key(training.seed), training.steps)
    ids = generate(
        run.model,
        state.params,
        prompt[None],
        training.sample_length,
        key,
        mesh=run.mesh,
        temperature=0.8,
    )
    return shown, corpus.tokenizer.decode(ids[0, len(prompt) :])


def _prompt(text: str, corpus: Corpus) -> tuple[np.ndarray, str]:
    """The tokens to continue: the separator alone where the data is not text."""
    tokenizer = corpus.tokenizer
    begin = list[int]() if tokenizer.separator is None else [tokenizer.separator]
    if tokenizer.kind == "synthetic" or not text:
        return np.array(begin or [0], np.int32), ""
    return np.concatenate([np.array(begin, np.int32), tokenizer.encode(text)]), text
