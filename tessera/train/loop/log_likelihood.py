# SPDX-License-Identifier: Apache-2.0
"""Log-likelihoods of continuations: what benchmarks compare a model's answers by."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from tessera.errors import OperandError
from tessera.foundations.labels import IGNORE_INDEX
from tessera.foundations.tree import Tree
from tessera.jax_compat.workarounds import CorrectJit
from tessera.mesh import AnyMesh
from tessera.ops.losses import cross_entropy
from tessera.train.data.packing import PackedRows, join
from tessera.train.models.model import Batch, Model
from tessera.train.models.partition_rules import Placement

Ids: TypeAlias = Sequence[int] | np.ndarray
Row: TypeAlias = dict[str, np.ndarray]

_SHORTEST: Final = 32


def bucket(length: int, most: int) -> int:
    """The length to which rows are padded: few of them, so few programs are compiled.

    Example:
      >>> [bucket(length, 100) for length in (1, 33, 64, 65, 100)]
      [32, 64, 64, 100, 100]
    """
    return min(max(_SHORTEST, 1 << (length - 1).bit_length()), most)


def log_likelihoods(
    model: Model,
    params: Tree,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    max_length: int,
    batch_size: int = 1,
    mesh: AnyMesh | None = None,
) -> list[tuple[float, bool]]:
    """The log-likelihood of each continuation after its context.

    A context that is too long loses its first tokens. Rows of similar lengths are
    computed together; padding on the right is another document.

    Args:
      model: The model; rows do not depend on each other.
      params: As from ``model.init``.
      pairs: Token ids of contexts and continuations, at least one of each.
      max_length: The most tokens that the model reads at a time.
      batch_size: Rows of one call. Their logits are float32 ``[rows, length, V]``.
      mesh: The mesh of the parameters. Activations are sharded over ``tp`` only.

    Returns:
      For each pair nats, summed over the continuation, and whether each of its tokens
      is the most likely one.

    Raises:
      OperandError: [T401] a context or continuation is empty, or a continuation longer
        than ``max_length``.
    """
    for context, continuation in pairs:
        if not context or not 1 <= len(continuation) <= max_length:
            raise OperandError(
                "a continuation cannot be scored",
                got=f"{len(context)} tokens of context, {len(continuation)} of the "
                f"continuation, max_length = {max_length}",
                fix="use at least one token of each, and a larger max_length if the "
                "model has it",
            )
    # Rows are whole: only tp shards activations.
    place = model.place(mesh)
    place = replace(place, whole=place.whole | {"batch", "context", "sequence"})
    lengths = [min(len(c) + len(k) - 1, max_length) for c, k in pairs]
    order = sorted(range(len(pairs)), key=lengths.__getitem__, reverse=True)
    results = [(0.0, True)] * len(pairs)
    for start in range(0, len(order), batch_size):
        numbers = order[start : start + batch_size]
        length = bucket(lengths[numbers[0]], max_length)
        rows = [target_row(*pairs[number], length) for number in numbers]
        batch = _stacked(rows, batch_size)
        sums, greedy = map(np.asarray, _scores(model, place, params, batch))
        for number, nats, is_greedy in zip(numbers, sums, greedy, strict=False):
            results[number] = float(nats), bool(is_greedy)
    return results


def _stacked(rows: Sequence[Row], count: int) -> Row:
    """A batch of ``count`` rows; those that are missing are padding."""
    padding = target_row((0,), (), len(rows[0]["tokens"]))
    rows = [*rows, *[padding] * (count - len(rows))]
    return {name: np.stack([row[name] for row in rows]) for name in padding}


def target_row(context: Ids, continuation: Ids, length: int) -> Row:
    """A row whose targets are those of the continuation alone.

    Args:
      context: Token ids, at least one; the first are left out where they do not fit.
      continuation: Token ids, at most ``length``.
      length: Of the row; its padding is a segment of its own.
    """
    ids = np.array([*context, *continuation][-(length + 1) :], np.int32)
    learned = np.arange(ids.size) >= ids.size - len(continuation)
    stream = join([(ids, learned)], separator=None, vocab_size=2**31)
    return PackedRows(stream, length, keep_tail=True)[0]


@partial(CorrectJit, static_argnums=(0, 1))
def _scores(
    model: Model, place: Placement, params: Tree, batch: Batch
) -> tuple[Float[Array, " rows"], Bool[Array, " rows"]]:
    logits = model.logits(params, batch, place).astype(jnp.float32)
    targets = batch["targets"]
    losses = cross_entropy(logits, targets, reduction="none")
    is_likeliest = (jnp.argmax(logits, axis=-1) == targets) | (targets == IGNORE_INDEX)
    return -losses.sum(axis=1), is_likeliest.all(axis=1)
