# SPDX-License-Identifier: Apache-2.0
"""The cross-entropy of a linear layer on one device, by chunks of tokens.

With its gradients, where they are asked for, which the same pass over the chunks
computes; ``linear_loss_vjp.py`` makes one differentiable loss of it.

Dims: N tokens, C tokens of a chunk, D width, V vocabulary; per device.

Source: the order of Liger Kernel, arXiv 2410.10989; vocabulary-parallel, arXiv
1909.08053.
"""

from dataclasses import dataclass
from math import prod
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from tessera.foundations.labels import IGNORE_INDEX
from tessera.mesh import Mesh
from tessera.ops.attention.blockwise import varying_as
from tessera.shard_spec import axes_of_dims
from tessera.tracing import scope

_CHUNK_BYTES: Final = 16 << 20
_LARGEST_CHUNK_BYTES: Final = 1 << 29


@dataclass(frozen=True)
class Terms:
    """The terms of a token's loss, and how it is computed.

    Attributes:
      ignore_index: Label of tokens to ignore.
      z_loss: Weight of the squared log of the softmax's denominator.
      soft_cap: Logits x become ``soft_cap * tanh(x / soft_cap)``; None leaves them.
      vocab_dim: The dim of the weight that is the vocabulary.
      words: Rows of the vocabulary; the weight may have more, as padding, which have no
        probability and no gradient. None is all.
      gradient_scale: Factor of the logits' gradients before they are rounded to the
        dtype of the operands; sums of them are divided by it. A power of two.
    """

    ignore_index: int = IGNORE_INDEX
    z_loss: float = 0.0
    soft_cap: float | None = None
    vocab_dim: int = 0
    words: int | None = None
    gradient_scale: float = 1.0


@dataclass(frozen=True)
class LossLayout:
    """How the operands are sharded over a mesh.

    Attributes:
      mesh: The mesh.
      tokens: Layout of the labels, and of ``hidden`` but for its last dim.
      vocabulary: Axes that split the vocabulary, outer first.
      weight: Layout in which the weight is stored, and in which it is cast.
      sums: Dtype in which devices add up the gradient of the weight.
    """

    mesh: Mesh
    tokens: PartitionSpec
    vocabulary: tuple[str, ...] = ()
    weight: PartitionSpec | None = None
    sums: str = "float32"

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Axes that split the tokens."""
        return tuple(axis for axes in axes_of_dims(self.tokens, 0) for axis in axes)


@dataclass(frozen=True)
class LossCall:
    """The static arguments of a call.

    Attributes:
      terms: The terms of a token's loss.
      split: How the operands are sharded, where they are.
      chunk_size: Tokens of a device in a chunk; None is the default.
      dtypes: Those of ``hidden`` and of the weight.
      per_token: Whether each token's loss is a result, or their sum.
    """

    terms: Terms
    split: LossLayout | None
    chunk_size: int | None
    dtypes: tuple[str, str]
    per_token: bool

    @property
    def vocabulary_axes(self) -> tuple[str, ...]:
        """Axes that split the vocabulary."""
        return self.split.vocabulary if self.split else ()


class LossOperands(NamedTuple):
    """The arrays of a call, or their gradients.

    Attributes:
      hidden: ``[..., D]``.
      weight: ``[V, D]``, or ``[D, V]`` with ``vocab_dim=1``. It may be wider than
        ``hidden``: it is cast to that dtype, and its gradient is not.
      labels: ``[...]``.
      cotangents: ``[...]``, those of the losses, where each has its own.
    """

    hidden: Any
    weight: Any
    labels: Any = None
    cotangents: Any = None


def chunk_rows(tokens: int, vocabulary: int, platform: str) -> int:
    """The number of tokens in a chunk of a device, from the bytes of its f32 logits.

    Up to 16 MiB, which is fastest on CPU, where they stay in cache until they are read
    again. Elsewhere up to an eighth of all logits, but at most 512 MiB: a matmul of few
    rows is bound by reading the weight. At least 128 rows, or 512.

    Args:
      tokens: Of one device.
      vocabulary: The part of it that one device has.
      platform: As JAX calls it: ``cpu``, ``gpu`` or ``tpu``.

    Example:
      >>> chunk_rows(2048, 32_768, "cpu"), chunk_rows(32_768, 131_072, "gpu")
      (128, 1024)
    """
    row, fewest = 4 * vocabulary, 128 if platform == "cpu" else 512
    rows = max(_CHUNK_BYTES // row, fewest)
    if platform != "cpu":
        rows = max(rows, min(tokens // 8, _LARGEST_CHUNK_BYTES // row))
    return max(min(rows, tokens), 1)


def chunked(call: LossCall, differentiate: bool, tokens: LossOperands) -> Any:
    """Losses f32 ``[N]``, and the gradients of their sum, weighted by any cotangents.

    Each matmul contracts one dim of two-dim operands. That of the weight's gradient has
    the tokens as the leading dim of both operands and the vocabulary last, the form
    that XLA runs fastest on CPU (JAX 0.10.2).

    Gradients by tokens are summed over the axes that split the vocabulary; that by the
    weight is of the device's own part of it.
    """
    terms, axes = call.terms, call.vocabulary_axes
    words, width = tokens.weight.shape[:: -1 if terms.vocab_dim else 1]

    def one(total: Any, chunk: LossOperands) -> tuple[Any, Any]:
        losses, by_logits = _in_parts(call, differentiate, chunk)
        if by_logits is None:
            return total, (losses, None)
        # [D, C] @ [C, V]; [C, V] @ [V, D].
        by_weight = _dot(chunk.hidden, by_logits, 0, 0)
        by_hidden = _dot(by_logits, tokens.weight, 1, terms.vocab_dim)
        return total + by_weight, (losses, by_hidden / terms.gradient_scale)

    if not differentiate:
        return _over_chunks(call, one, None, tokens)[1][0], None
    start = varying_as(tokens.weight, jnp.zeros((width, words), jnp.float32))
    total, (losses, by_hidden) = _over_chunks(call, one, start, tokens)
    by_hidden = lax.psum(by_hidden, axes) if axes else by_hidden
    by_weight = total if terms.vocab_dim else total.T
    return losses, LossOperands(by_hidden, by_weight / terms.gradient_scale)


def _in_parts(
    call: LossCall, differentiate: bool, chunk: LossOperands
) -> tuple[Array, Array | None]:
    """The losses of a chunk, and its gradients by the logits.

    A part of the chunk has f32 logits at a time; the gradients are in the dtype of the
    operands. The fewer chunks, the seldomer the gradient of the weight is read and
    written to add to it, which on a GPU takes the time of the matmul.
    """

    def one(part: LossOperands) -> tuple[Array, Array | None]:
        losses, by_logits = _losses_of_chunk(call, differentiate, part)
        if by_logits is None:
            return losses, None
        return losses, by_logits.astype(chunk.hidden.dtype)

    rows = len(chunk.hidden)
    if scope.device().platform == "cpu" or rows % 2 or not differentiate:
        return one(chunk)

    def half(tokens: LossOperands) -> Any:
        return one(tokens._replace(weight=chunk.weight))

    def split(array: Array) -> Array:
        return array.reshape(2, rows // 2, *array.shape[1:])

    halves = jax.tree.map(split, chunk._replace(weight=None))
    losses, by_logits = lax.map(half, halves)
    return losses.reshape(rows), by_logits.reshape(rows, -1)


def _dot(left: Array, right: Array, contracted: int, other: int) -> Array:
    dims = (((contracted,), (other,)), ((), ()))
    return lax.dot_general(left, right, dims, preferred_element_type=jnp.float32)


def _losses_of_chunk(
    call: LossCall, differentiate: bool, tokens: LossOperands
) -> tuple[Array, Array | None]:
    """f32 losses ``[C]``, and gradients by the logits, f32 ``[C, V]``.

    The device has the logits of its own part of the vocabulary. A loss is 0 where the
    token is ignored and NaN where its label is not in the vocabulary. Gradients are
    multiplied by the cotangents and by ``gradient_scale``.
    """
    terms, axes = call.terms, call.vocabulary_axes
    logits, capped = _dot(tokens.hidden, tokens.weight, 1, 1 - terms.vocab_dim), None
    if terms.soft_cap is not None:
        capped = jnp.tanh(logits / terms.soft_cap)
        logits = capped * terms.soft_cap
    columns = logits.shape[-1]
    first = lax.axis_index(axes) * columns if axes else 0
    padded = columns * prod(lax.axis_size(axis) for axis in axes)
    vocabulary = padded if terms.words is None else terms.words
    if vocabulary < padded:
        logits = _without_padding(logits, first, vocabulary)
    highest = logits.max(axis=-1)
    highest = lax.pmax(highest, axes) if axes else highest
    # Relative to the largest, so that rounding is that of the loss.
    scores = logits - highest[:, None]
    exponentials = jnp.exp(scores)
    labels = tokens.labels
    index = labels - jnp.asarray(first, labels.dtype)
    is_target = lax.broadcasted_iota(labels.dtype, scores.shape, 1) == index[:, None]
    sums = [exponentials.sum(-1), jnp.where(is_target, scores, 0.0).sum(-1)]
    total, target_score = lax.psum(sums, axes) if axes else sums
    log_total = jnp.log(total)
    log_sum = log_total + highest
    losses = log_total - target_score
    if terms.z_loss:
        losses = losses + terms.z_loss * log_sum**2
    counts = labels != terms.ignore_index
    is_legal = (labels >= 0) & (labels < vocabulary)
    losses = jnp.where(counts, jnp.where(is_legal, losses, jnp.nan), 0.0)
    if not differentiate:
        return losses, None
    weight = jnp.where(is_legal & counts, jnp.float32(terms.gradient_scale), 0.0)
    if tokens.cotangents is not None:
        weight = weight * tokens.cotangents
    share = weight / total
    if terms.z_loss:
        share = share * (1.0 + 2.0 * terms.z_loss * log_sum)
    gradient = exponentials * share[:, None]
    gradient = gradient - jnp.where(is_target, weight[:, None], 0.0)
    if capped is not None:
        gradient = gradient * (1.0 - capped * capped)
    return losses, gradient


def _without_padding(logits: Array, first: Array | int, words: int) -> Array:
    """Logits of the words from ``first`` on; -inf where there are no such words."""
    index = first + lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    return jnp.where(index < words, logits, -jnp.inf)


def _over_chunks(
    call: LossCall, function: Any, carry: Any, tokens: LossOperands
) -> Any:
    """``lax.scan`` over chunks of tokens, as even as possible.

    The last chunk is padded with ignored tokens.
    """
    count, words = len(tokens.hidden), tokens.weight.shape[call.terms.vocab_dim]
    size = call.chunk_size or chunk_rows(count, words, scope.device().platform)
    number = max(-(-count // size), 1)
    if number == 1:
        return function(carry, tokens)
    rows = -(-count // number)
    padding = number * rows - count

    def split(array: Array, fill: int = 0) -> Array:
        if padding:
            widths = ((0, padding), *((0, 0) for _ in array.shape[1:]))
            array = jnp.pad(array, widths, constant_values=fill)
        return array.reshape(number, rows, *array.shape[1:])

    def join(array: Array) -> Array:
        return array.reshape(number * rows, *array.shape[2:])[:count]

    def one(carry: Any, chunk: LossOperands) -> Any:
        return function(carry, chunk._replace(weight=tokens.weight))

    hidden = split(tokens.hidden)
    labels = split(tokens.labels, call.terms.ignore_index)
    cotangents = jax.tree.map(split, tokens.cotangents)
    chunks = LossOperands(hidden, None, labels, cotangents)
    carry, results = lax.scan(one, carry, chunks)
    return carry, jax.tree.map(join, results)
