# SPDX-License-Identifier: Apache-2.0
"""``op.cross_entropy``: softmax cross-entropy with integer labels."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from tessera.errors import OperandError
from tessera.foundations.labels import IGNORE_INDEX
from tessera.ops.operand_layouts import as_array

Reduction = Literal["mean", "sum", "none"]


def cross_entropy(
    logits: Any,
    labels: Any,
    *,
    ignore_index: int = IGNORE_INDEX,
    reduction: Reduction = "mean",
    z_loss: float = 0.0,
) -> jax.Array:
    """Negative log-likelihood of integer labels under a softmax of the logits.

    Equivalent to ``-jax.nn.log_softmax(logits)[label]``, computed in f32 whatever the
    dtype of the logits. The logit of the label is selected by comparison: logits that
    are sharded over the vocabulary are never gathered on one device.

    Args:
      logits: ``[..., V]`` floating-point.
      labels: ``[...]`` integers in ``[0, V)``, or ``ignore_index``.
      ignore_index: Label of positions to ignore.
      reduction: ``mean`` over the positions that are not ignored (0 if there are
        none), ``sum`` over them, or ``none``: one value per position, 0 where ignored.
      z_loss: Weight of the squared log of the softmax's denominator, which is added to
        each position's loss (arXiv 2204.02311); 1e-4 is usual.

    Returns:
      f32 scalar, or ``[...]`` f32 with ``reduction="none"``, in nats. A label outside
      the vocabulary gives NaN.

    Raises:
      OperandError: [T401] the shapes or dtypes are not valid.

    Example:
      >>> print(cross_entropy(jnp.zeros((2, 4)), jnp.array([1, -100])).round(4))
      1.3863
    """
    logits, labels = as_array(logits), as_array(labels)
    _check(logits, labels)
    check_settings("cross_entropy", reduction, z_loss)
    scores = logits.astype(jnp.float32)
    # Relative to the largest, so that rounding is that of the loss, not of the logits.
    highest = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    scores -= highest
    log_total = jnp.log(jnp.exp(scores).sum(axis=-1))
    labels = as_labels(labels)
    vocabulary = jax.lax.broadcasted_iota(labels.dtype, scores.shape, scores.ndim - 1)
    target_score = jnp.where(vocabulary == labels[..., None], scores, 0.0).sum(-1)
    counts = labels != ignore_index
    is_legal = (labels >= 0) & (labels < scores.shape[-1])
    losses = log_total - target_score
    if z_loss:
        losses = losses + z_loss * (log_total + highest[..., 0]) ** 2
    losses = jnp.where(is_legal, losses, jnp.nan)
    losses = jnp.where(counts, losses, 0.0)
    if reduction == "none":
        return losses
    return reduced(losses.sum(), counts, reduction)


def as_labels(labels: jax.Array) -> jax.Array:
    """Labels in a dtype that holds every index of a vocabulary and ``IGNORE_INDEX``."""
    return labels.astype(jnp.int64 if labels.dtype.itemsize == 8 else jnp.int32)


def reduced(total: jax.Array, counts: jax.Array, reduction: Reduction) -> jax.Array:
    """The ``sum`` or ``mean`` of losses, from their sum and which of them count."""
    if reduction == "sum":
        return total
    return total / jnp.maximum(counts.sum(dtype=jnp.float32), 1.0)


def _check(logits: jax.Array, labels: jax.Array) -> None:
    if logits.shape[:-1] != labels.shape or not logits.ndim:
        raise OperandError(
            "cross_entropy needs one label for each row of logits",
            got=f"logits {logits.shape}, labels {labels.shape}",
            fix=f"pass labels of shape {logits.shape[:-1]}",
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise OperandError(
            "cross_entropy takes labels as integers",
            got=f"labels of dtype {labels.dtype.name}",
            fix="pass class numbers; take argmax of one-hot labels first",
        )
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise OperandError(
            "cross_entropy takes logits as floating-point numbers",
            got=f"logits of dtype {logits.dtype.name}",
            fix="pass unnormalized scores, before any softmax",
        )


def check_settings(name: str, reduction: str, z_loss: float) -> None:
    """Raise [T401] for an option of the loss ``name`` that is out of range."""
    if reduction not in ("mean", "sum", "none"):
        raise OperandError(
            f"there is no reduction {reduction!r}", fix="use 'mean', 'sum' or 'none'"
        )
    if not 0.0 <= z_loss < float("inf"):
        raise OperandError(
            f"the z_loss of {name} is not a finite weight of 0 or more",
            got=f"z_loss={z_loss}",
            fix="use 0 or a positive number, such as 1e-4",
        )
