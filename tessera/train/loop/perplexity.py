# SPDX-License-Identifier: Apache-2.0
"""The perplexity of a model on documents, with its standard error.

Documents are independent and tokens within one are not, so the standard error is over
documents: the mean loss is a ratio of two sums over them, whose variance follows from
the delta method (Cochran, Sampling Techniques, 1977, chapter 6).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

import jax
import numpy as np
from jaxtyping import Array, Float

from tessera.foundations.labels import IGNORE_INDEX
from tessera.foundations.tree import Tree
from tessera.jax_compat.workarounds import CorrectJit
from tessera.mesh import Mesh
from tessera.train.loop.log_likelihood import row_placement, stacked, target_row
from tessera.train.models.model import Batch, Model
from tessera.train.models.partition_rules import Placement

# Rows of one call of the program, which computes them one after another.
_ROWS = 16


@dataclass(frozen=True)
class Perplexity:
    """The loss of some documents.

    Attributes:
      documents: Documents with at least one token to predict.
      tokens: Tokens that were predicted.
      nats: Cross-entropy per token.
      nats_error: Its standard error; NaN for one document.
    """

    documents: int
    tokens: int
    nats: float
    nats_error: float

    @property
    def value(self) -> float:
        """The perplexity."""
        return float(np.exp(self.nats))

    @property
    def error(self) -> float:
        """The standard error of the perplexity."""
        return self.value * self.nats_error


def perplexity(
    model: Model,
    params: Tree,
    documents: Iterable[np.ndarray],
    length: int,
    mesh: Mesh | None = None,
) -> Perplexity:
    """Evaluate documents, each in windows of ``length`` tokens that do not overlap.

    A token is predicted from those before it in its window. The first token of a
    document is predicted from none and does not count.

    Args:
      model: The model; rows do not depend on each other.
      params: As from ``model.init``.
      documents: The token ids of each, int ``[tokens]``, separator included.
      length: Tokens of a window.
      mesh: The mesh of the parameters. Activations are sharded over ``tp`` only.
    """
    place = row_placement(model, mesh)
    sums: dict[int, np.ndarray] = {}
    windows = _windows(documents, length)
    while rows := list(islice(windows, _ROWS)):
        numbers = [number for number, _ in rows]
        batch = stacked([row for _, row in rows], _ROWS)
        losses = np.asarray(_row_losses(model, place, params, batch), np.float64)
        counts = (batch["targets"] != IGNORE_INDEX).sum(axis=1)
        for number, loss, count in zip(numbers, losses, counts, strict=False):
            sums[number] = sums.get(number, np.zeros(2)) + np.array([loss, count])
    return _summary(np.array(list(sums.values())).reshape(-1, 2))


@partial(CorrectJit, static_argnums=(0, 1))
def _row_losses(
    model: Model, place: Placement, params: Tree, batch: Batch
) -> Float[Array, " rows"]:
    """The summed loss of each row; one at a time, so that no loss is of two rows."""

    def loss(row: Batch) -> Array:
        one = {name: array[None] for name, array in row.items()}
        return model.loss(params, one, place, chunk="auto")[1]["loss"]

    return jax.lax.map(loss, batch)


def _windows(
    documents: Iterable[np.ndarray], length: int
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """The number of each window's document, and its row."""
    for number, ids in enumerate(documents):
        for start in range(0, len(ids) - 1, length):
            context, targets = (
                ids[start : start + 1],
                ids[start + 1 : start + length + 1],
            )
            yield number, target_row(context, targets, length)


def _summary(sums: np.ndarray) -> Perplexity:
    """From the nats and the tokens of each document, ``[documents, 2]``."""
    documents, (nats, tokens) = len(sums), sums.sum(axis=0)
    mean, error = nats / tokens if tokens else np.nan, np.nan
    if documents > 1:
        residuals = sums[:, 0] - mean * sums[:, 1]
        variance = documents / (documents - 1) * (residuals**2).sum() / tokens**2
        error = np.sqrt(variance)
    return Perplexity(documents, int(tokens), float(mean), float(error))
