# SPDX-License-Identifier: Apache-2.0
"""``op.cross_entropy``: softmax cross-entropy with integer labels."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from tessera.errors import OperandError

Reduction = Literal["mean", "sum", "none"]


def cross_entropy(
    logits: Any,
    labels: Any,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> jax.Array:
    """Negative log-likelihood of integer labels under a softmax of the logits.

    Equivalent to ``-jax.nn.log_softmax(logits)[label]``, computed in f32 whatever the
    dtype of the logits. The label's logit is taken by comparison, not by gathering, so
    logits that are split over the vocabulary are never collected on one device.

    Args:
      logits: ``[..., V]`` floating-point.
      labels: ``[...]`` integers in ``[0, V)``, or ``ignore_index``.
      ignore_index: Label of positions that do not count.
      reduction: ``mean`` over the positions that count (0 where none does), ``sum``
        over them, or ``none``: one value for each position, 0 where ignored.
      label_smoothing: The part of each target that is spread evenly over the
        vocabulary, from 0 to 1 (arXiv 1512.00567).

    Returns:
      f32 scalar, or ``[...]`` f32 with ``reduction="none"``, in nats. A label outside
      the vocabulary gives NaN rather than a plausible number.

    Raises:
      OperandError: [T401] the shapes or dtypes do not fit.

    Example:
      >>> print(cross_entropy(jnp.zeros((2, 4)), jnp.array([1, -100])).round(4))
      1.3863
    """
    logits, labels = jnp.asarray(logits), jnp.asarray(labels)
    _check(logits, labels, reduction, label_smoothing)
    scores = logits.astype(jnp.float32)
    # Relative to the largest, so that rounding is that of the loss, not of the logits.
    scores -= jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    log_total = jnp.log(jnp.exp(scores).sum(axis=-1))
    # Bytes cannot count a large vocabulary, nor unsigned numbers hold -100.
    labels = labels.astype(jnp.int64 if labels.dtype.itemsize == 8 else jnp.int32)
    vocabulary = jax.lax.broadcasted_iota(labels.dtype, scores.shape, scores.ndim - 1)
    chosen = jnp.where(vocabulary == labels[..., None], scores, 0.0).sum(-1)
    counts = labels != ignore_index
    legal = (labels >= 0) & (labels < scores.shape[-1])
    losses = log_total - chosen
    if label_smoothing:
        of_all = log_total - scores.mean(axis=-1)
        losses = (1.0 - label_smoothing) * losses + label_smoothing * of_all
    losses = jnp.where(legal, losses, jnp.nan)
    losses = jnp.where(counts, losses, 0.0)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / jnp.maximum(counts.sum(dtype=jnp.float32), 1.0)


def _check(
    logits: jax.Array, labels: jax.Array, reduction: str, label_smoothing: float
) -> None:
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
    if reduction not in ("mean", "sum", "none"):
        raise OperandError(
            f"there is no reduction {reduction!r}", fix="use 'mean', 'sum' or 'none'"
        )
    if not 0.0 <= label_smoothing <= 1.0:
        raise OperandError(
            "label_smoothing is a part of each target",
            got=f"label_smoothing={label_smoothing}",
            fix="use a number from 0 to 1",
        )
