# SPDX-License-Identifier: Apache-2.0
"""Adds to batches what the reference model of a run says of them."""

from typing import Any

import jax
from jax.sharding import NamedSharding

from tessera.train.config.step_config import batch_spec
from tessera.train.loop.build_run import BATCH, Run
from tessera.train.loop.train_state import TrainState


def with_reference(run: Run, state: TrainState, batch: dict[str, Any]) -> Any:
    """A batch with the log-probabilities of its targets as ``reference``.

    Args:
      run: The run; one without a reference model leaves the batch as it is.
      state: Has the parameters that the reference model has.
      batch: Arrays ``[accumulation, B, S]``, or ``[B, S]`` of an evaluation.
    """
    score, params = run.score_reference, run.reference_params(state)
    if score is None:
        return batch
    rows = {name: batch[name] for name in BATCH}
    if batch["tokens"].ndim == 3 or run.score_validation is None:
        return batch | {"reference": score(params, rows)}
    layout = NamedSharding(run.mesh.jax, batch_spec(run.step_config))
    one = jax.device_put({name: array[None] for name, array in rows.items()}, layout)
    values = run.score_validation(params, one)[0]
    return batch | {"reference": jax.device_put(values, batch["tokens"].sharding)}
