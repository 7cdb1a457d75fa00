# SPDX-License-Identifier: Apache-2.0
"""What the reference model of a run says of its data: log-probabilities of targets.

Those of the rows of evaluations are computed once, before the first step. So are those
of all rows with ``preference.reference=precomputed``, by the weights that the run
begins with. Each checkpoint has these, as no later weights can compute them again.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any, Final

import jax
import numpy as np

from tessera.errors import CheckpointMismatchError, DataChangedError
from tessera.train.config.step_config import batch_spec
from tessera.train.data import Corpus
from tessera.train.data.batches import Share, validation_batches, validation_order
from tessera.train.data.corpus import Source
from tessera.train.data.packing import Batch, PackedRows
from tessera.train.loop.build_run import BATCH, Run
from tessera.train.loop.console import log
from tessera.train.loop.host_data_sharding import on_every_host
from tessera.train.loop.run_objective import PRECOMPUTED
from tessera.train.loop.train_state import TrainState

FILE: Final = "reference.npz"
_FINGERPRINTS: Final = "fingerprints"
# Seconds between two lines that say how far it is.
_EVERY: Final = 30.0


def step_batch(run: Run, batch: Batch) -> dict[str, jax.Array]:
    """This process's rows of a step on their devices, ``[accumulation, B, S]``."""
    steps = run.config.training.gradient_accumulation_steps
    folded = {n: a.reshape(steps, -1, a.shape[-1]) for n, a in batch.items()}
    return run.host_shard.to_global(folded, batch_spec(run.step_config), dim=1)


def with_reference(run: Run, state: TrainState, batch: dict[str, Any]) -> Any:
    """The batch of a step with the log-probabilities of its targets as ``reference``.

    Args:
      run: The run; one without a reference model leaves the batch as it is.
      state: Has the parameters that the reference model has.
      batch: Arrays ``[accumulation, B, S]``.
    """
    if run.score_reference is None or "reference" in batch:
        return batch
    assert run.reference != PRECOMPUTED, "the first weights have scored its rows"
    rows = {name: batch[name] for name in BATCH}
    values = run.score_reference(run.reference_params(state), rows)
    return batch | {"reference": values}


def scored_data(
    run: Run,
    corpus: Corpus,
    state: TrainState,
    resumed: Path | None,
    should_continue: Callable[[], bool],
    on_phase: Callable[[], None],
) -> Corpus | None:
    """The corpus, whose rows have ``reference`` where they are scored once.

    It is f32 [rows, S] in nats, on the host of each process; 0 without a target.

    Args:
      run: The run.
      corpus: Its data.
      state: Has the parameters of the reference model.
      resumed: The folder of the checkpoint that it resumes from, or None.
      should_continue: Asked before each batch.
      on_phase: Called again and again, as this may take hours.

    Returns:
      None where the run stops meanwhile.

    Raises:
      TesseraError: T802 and T803, as ``read_scores`` does.
    """
    if run.score_reference is None:
        return corpus
    if (once := run.reference == PRECOMPUTED) and resumed is not None:
        return read_scores(resumed, run, corpus)
    assert not (once and int(state.step)), "the weights of the beginning are gone"
    training, shard, size = run.config.training, run.host_shard, run.rows_per_step
    steps = training.gradient_accumulation_steps
    share = Share(size, shard.index, shard.count, steps)
    limit = None if once else training.validation_sequences
    parts, arrays = _parts(run, corpus), dict[str, np.ndarray]()
    done, total, said = 0, sum(map(len, parts.values())), -inf
    for name, rows in parts.items():
        order = validation_order(len(rows), limit)
        arrays[name] = np.zeros((len(rows), training.sequence_length), np.float32)
        batches = validation_batches(rows, share, prefetch=corpus.prefetch, limit=limit)
        with closing(batches):
            for at, batch in zip(range(0, len(order), size), batches, strict=True):
                if (now := monotonic()) > said + _EVERY:
                    said = now
                    on_phase()
                    if once:
                        log.info(
                            "the reference model scored %d of %d rows", done, total
                        )
                if not should_continue():
                    return None
                chosen = order[at : at + size]
                arrays[name][chosen] = _scores(run, state, batch)[: len(chosen)]
                done += len(chosen)
    if once:
        log.info("the reference model scored all rows")
    return _with_scores(corpus, arrays)


def _scores(run: Run, state: TrainState, batch: Batch) -> np.ndarray:
    """Those of all rows of a step, [rows, S], by this process's part of them."""
    assert run.score_reference is not None, "a reference model scores them"
    placed = step_batch(run, batch)
    found = on_every_host(run.score_reference(run.reference_params(state), placed))
    return found.reshape(run.rows_per_step, -1)


def write_scores(folder: Path, run: Run, corpus: Corpus) -> None:
    """Write what ``scored_data`` gave to a file in the folder of a checkpoint.

    Raises:
      OSError: It cannot be written.
    """
    parts = _parts(run, corpus)
    prints = json.dumps({name: rows.fingerprint for name, rows in parts.items()})
    arrays: Any = {name: rows.arrays["reference"] for name, rows in parts.items()}
    arrays[_FINGERPRINTS] = np.str_(prints)
    with (folder / FILE).open("wb") as file:
        np.savez(file, **arrays)


def read_scores(folder: Path, run: Run, corpus: Corpus) -> Corpus:
    """The corpus with what ``write_scores`` wrote.

    Raises:
      CheckpointMismatchError: [T802] the checkpoint has none.
      DataChangedError: [T803] they are of other rows.
    """
    if not (folder / FILE).exists():
        raise CheckpointMismatchError(
            "the checkpoint has no log-probabilities of the weights that its run "
            "began with",
            got=f"preference.reference={PRECOMPUTED}, and no {folder / FILE}",
            fix="write preference.reference=copy, if its run kept one; or begin with "
            "its weights: tessera export RUN weights.safetensors, and "
            "training.init_from=weights.safetensors training.resume=none",
        )
    with np.load(folder / FILE, allow_pickle=False) as file:
        saved, parts = json.loads(str(file[_FINGERPRINTS])), _parts(run, corpus)
        changed = [
            f"{name}: {saved.get(name)} -> {rows.fingerprint}"
            for name, rows in parts.items()
            if saved.get(name) != rows.fingerprint
        ]
        if changed:
            raise DataChangedError(
                "the reference model scored other rows, and its weights are gone",
                got="\n".join(changed),
                fix="use the data and the training.sequence_length of the checkpoint, "
                "or begin with its weights: tessera export",
            )
        return _with_scores(corpus, {name: file[name] for name in parts})


def _parts(run: Run, corpus: Corpus) -> dict[str, PackedRows]:
    """The rows that are scored once, by name."""
    has_all = run.reference == PRECOMPUTED and not run.config.training.eval_only
    return {
        f"{side} of {source.name}": getattr(source, side)
        for source in corpus.sources
        for side in ("validation_rows", "train_rows")[: 1 + has_all]
    }


def _with_scores(corpus: Corpus, arrays: Mapping[str, np.ndarray]) -> Corpus:
    sources = list[Source]()
    for source in corpus.sources:
        new: Any = {
            side: getattr(source, side).with_arrays(reference=arrays[name])
            for side in ("validation_rows", "train_rows")
            if (name := f"{side} of {source.name}") in arrays
        }
        sources.append(replace(source, **new))
    return replace(corpus, sources=tuple(sources))
