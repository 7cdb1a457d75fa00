# SPDX-License-Identifier: Apache-2.0
"""The fused loss on one device: chunk after chunk of its tokens.

A chunk's logits are made, give their losses and their own gradients, and are gone. Of
the matmuls each contracts one dim of two-dim operands. That of the weight's gradient
takes the token rows as the leading dim of both operands and has the vocabulary last,
the form that XLA runs fastest on CPU (JAX 0.10.2).

Dims: N tokens, C tokens of a chunk, D width, V vocabulary; per device.
"""

from dataclasses import dataclass
from math import prod
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from tessera.ops.attention.blockwise import varying_as

_LOGITS: Final = 16 << 20
_MOST_LOGITS: Final = 1 << 30


def chunk_rows(tokens: int, vocabulary: int, platform: str) -> int:
    """How many tokens of a device make a chunk, from the bytes of its f32 logits.

    Up to 16 MiB, which on CPU is the fastest: they are still in a cache when they are
    read again. Elsewhere up to an eighth of all, but no more than 1 GiB: a matmul of
    few rows waits for the weight to be read. At least 128 rows, or 1024.

    Args:
      tokens: Of one device.
      vocabulary: The part of it that one device has.
      platform: As JAX calls it: ``cpu``, ``gpu`` or ``tpu``.

    Example:
      >>> chunk_rows(2048, 32_768, "cpu"), chunk_rows(32_768, 131_072, "gpu")
      (128, 2048)
    """
    row, least = 4 * vocabulary, 128 if platform == "cpu" else 1024
    rows = max(_LOGITS // row, least)
    if platform != "cpu":
        rows = max(rows, min(tokens // 8, _MOST_LOGITS // row))
    return max(min(rows, tokens), 1)


@dataclass(frozen=True)
class Terms:
    """What the loss of a token is made of, and how it is computed.

    Attributes:
      ignore_index: Label of tokens that do not count.
      label_smoothing: The part of each target that is spread over the vocabulary.
      z_loss: Weight of the squared log of the softmax's denominator.
      soft_cap: Logits x become ``soft_cap * tanh(x / soft_cap)``; None leaves them.
      vocab_dim: Which dim of the weight is the vocabulary.
      grain: What gradients by logits are multiplied by before they are rounded, and
        sums of them divided by after; a power of two.
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    soft_cap: float | None = None
    vocab_dim: int = 0
    grain: float = 1.0


class Head(NamedTuple):
    """What makes logits of tokens.

    Attributes:
      weight: ``[V, D]``, or ``[D, V]`` with ``vocab_dim=1``.
      bias: ``[V]`` or None.
    """

    weight: Array
    bias: Array | None = None


class Chunk(NamedTuple):
    """Some tokens: ``[C, D]``, ``[C]``, and the cotangents of their losses or None."""

    hidden: Array
    labels: Array
    seeds: Array | None = None


class Gradients(NamedTuple):
    """Gradients of the losses' sum: by tokens in order, and f32 by the head."""

    hidden: Array
    head: Head


def losses(
    terms: Terms, axes: tuple[str, ...], rows: int, head: Head, tokens: Chunk
) -> Array:
    """The loss of each token, f32 ``[N]``.

    Args:
      terms: What it is made of.
      axes: Mesh axes, manual here, that split the vocabulary.
      rows: Tokens of a chunk.
      head: The device's part of the vocabulary.
      tokens: All tokens of the device.
    """

    def one(_: None, chunk: Chunk) -> tuple[None, Array]:
        return None, _Softmax(terms, axes, head, chunk).losses()

    return _over_chunks(terms, one, None, tokens, rows)[1]


def losses_and_gradients(
    terms: Terms, axes: tuple[str, ...], rows: int, head: Head, tokens: Chunk
) -> tuple[Array, Gradients]:
    """The same, with the gradients of their sum, weighted by any cotangents.

    Those by tokens are summed over ``axes``; those by the head, which has a part of
    the vocabulary, have nothing to be summed with there.
    """
    V, D = _sizes(terms, head)

    def one(sums: Head, chunk: Chunk) -> tuple[Head, Any]:
        softmax = _Softmax(terms, axes, head, chunk)
        slopes = softmax.slopes()
        narrow = slopes.astype(chunk.hidden.dtype)
        # [D, C] @ [C, V]; [C, V] @ [V, D].
        by_weight = sums.weight + _dot(chunk.hidden, narrow, 0, 0)
        by_hidden = _dot(narrow, head.weight, 1, terms.vocab_dim) / terms.grain
        by_bias = None if sums.bias is None else sums.bias + slopes.sum(axis=0)
        return Head(by_weight, by_bias), (softmax.losses(), by_hidden)

    begin = Head(
        varying_as(head.weight, jnp.zeros((D, V), jnp.float32)),
        None if head.bias is None else varying_as(head.bias, jnp.zeros(V, jnp.float32)),
    )
    sums, (found, by_hidden) = _over_chunks(terms, one, begin, tokens, rows)
    by_hidden = lax.psum(by_hidden, axes) if axes else by_hidden
    by_weight = (sums.weight if terms.vocab_dim else sums.weight.T) / terms.grain
    by_bias = None if sums.bias is None else sums.bias / terms.grain
    return found, Gradients(by_hidden, Head(by_weight, by_bias))


def _sizes(terms: Terms, head: Head) -> tuple[int, int]:
    """V and D."""
    return head.weight.shape[terms.vocab_dim], head.weight.shape[1 - terms.vocab_dim]


def _dot(left: Array, right: Array, contracted: int, other: int) -> Array:
    dims = (((contracted,), (other,)), ((), ()))
    return lax.dot_general(left, right, dims, preferred_element_type=jnp.float32)


class _Softmax:
    """The softmax of one chunk's logits, of which a device has some columns."""

    def __init__(
        self, terms: Terms, axes: tuple[str, ...], head: Head, chunk: Chunk
    ) -> None:
        self.terms, self.seeds = terms, chunk.seeds
        logits = _dot(chunk.hidden, head.weight, 1, 1 - terms.vocab_dim)
        if head.bias is not None:
            logits = logits + head.bias.astype(jnp.float32)
        self._bent: Array | None = None
        if terms.soft_cap is not None:
            self._bent = jnp.tanh(logits / terms.soft_cap)
            logits = self._bent * terms.soft_cap
        highest = logits.max(axis=-1)
        own, parts = logits.shape[-1], prod(lax.axis_size(axis) for axis in axes)
        first, self.vocabulary = 0, own * parts
        if axes:
            highest = lax.pmax(highest, axes)
            first = lax.axis_index(axes) * own
        # Relative to the largest, so that rounding is that of the loss.
        scores = logits - highest[:, None]
        self._shares = jnp.exp(scores)
        columns = lax.broadcasted_iota(chunk.labels.dtype, scores.shape, 1)
        place = chunk.labels - jnp.asarray(first, chunk.labels.dtype)
        self._hits = columns == place[:, None]
        sums = [self._shares.sum(-1), jnp.where(self._hits, scores, 0.0).sum(-1)]
        if terms.label_smoothing:
            sums.append(scores.sum(-1))
        self._total, chosen, *of_all = lax.psum(sums, axes) if axes else sums
        log_total = jnp.log(self._total)
        self.log_sum = log_total + highest
        self._nll = log_total - chosen
        self._of_all = [log_total - s / self.vocabulary for s in of_all]
        self._counts = chunk.labels != terms.ignore_index
        self._legal = (chunk.labels >= 0) & (chunk.labels < self.vocabulary)

    def losses(self) -> Array:
        """f32 ``[C]``; 0 where ignored, NaN where the label is no word."""
        terms, found = self.terms, self._nll
        for of_all in self._of_all:
            share = terms.label_smoothing
            found = (1.0 - share) * found + share * of_all
        if terms.z_loss:
            found = found + terms.z_loss * self.log_sum**2
        found = jnp.where(self._legal, found, jnp.nan)
        return jnp.where(self._counts, found, 0.0)

    def slopes(self) -> Array:
        """Gradients by the logits, f32 ``[C, V]``, times cotangents and the grain."""
        terms = self.terms
        weight = jnp.where(self._legal & self._counts, jnp.float32(terms.grain), 0.0)
        if self.seeds is not None:
            weight = weight * self.seeds
        share = weight / self._total
        if terms.z_loss:
            share = share * (1.0 + 2.0 * terms.z_loss * self.log_sum)
        target = (1.0 - terms.label_smoothing) * weight
        slopes = self._shares * share[:, None]
        slopes = slopes - jnp.where(self._hits, target[:, None], 0.0)
        if terms.label_smoothing:
            spread = terms.label_smoothing / self.vocabulary * weight
            slopes = slopes - spread[:, None]
        if self._bent is not None:
            slopes = slopes * (1.0 - self._bent * self._bent)
        return slopes


def _over_chunks(
    terms: Terms, function: Any, carry: Any, tokens: Chunk, rows: int
) -> Any:
    """``lax.scan`` over chunks of at most ``rows``, as even as they can be.

    What fills up the last one counts for nothing.
    """
    count = tokens.hidden.shape[0]
    chunks = max(-(-count // rows), 1)
    if chunks == 1:
        return function(carry, tokens)
    rows = -(-count // chunks)
    fill = chunks * rows - count

    def cut(array: Array, value: int = 0) -> Array:
        padding = ((0, fill), *((0, 0) for _ in array.shape[1:]))
        array = jnp.pad(array, padding, constant_values=value) if fill else array
        return array.reshape(chunks, rows, *array.shape[1:])

    def joined(array: Array) -> Array:
        return array.reshape(chunks * rows, *array.shape[2:])[:count]

    seeds = None if tokens.seeds is None else cut(tokens.seeds)
    cuts = Chunk(cut(tokens.hidden), cut(tokens.labels, terms.ignore_index), seeds)
    carry, found = lax.scan(function, carry, cuts)
    return carry, jax.tree.map(joined, found)
