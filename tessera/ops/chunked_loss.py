# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of a linear layer, chunk by chunk, as one ``custom_vjp``.

With a large vocabulary, the logits and their gradients are the largest arrays of a
step. Here the tokens pass chunk by chunk through the last matmul, the softmax and,
where the loss is differentiated, the matmuls of the gradients: three matmuls as always,
nothing is recomputed, and the residuals are as large as the gradients. The backward
pass multiplies them by the cotangent of the loss. On a mesh every device does so with
its own tokens and its own part of the vocabulary.

JAX has no such loss: its autodiff of a chunked forward pass would save the logits of
every chunk or recompute them.

Dims: N tokens, C tokens of a chunk, D width, V vocabulary; per device.

Source: the order of Liger Kernel, arXiv 2410.10989; vocabulary-parallel, arXiv
1909.08053.
"""

from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from tessera import scope
from tessera.labels import IGNORE_INDEX
from tessera.mesh import Mesh
from tessera.ops.attention.blockwise import varying_alike, varying_as
from tessera.ops.losses import Reduction, as_labels, reduced
from tessera.ops.operand_layouts import is_traced, map_free_axes, region_mesh
from tessera.shard_spec import axes_of_dims

_CHUNK_BYTES: Final = 16 << 20
_LARGEST_CHUNK_BYTES: Final = 1 << 29


@dataclass(frozen=True)
class Terms:
    """The terms of a token's loss, and how it is computed.

    Attributes:
      ignore_index: Label of tokens to ignore.
      label_smoothing: The part of each target that is spread over the vocabulary.
      z_loss: Weight of the squared log of the softmax's denominator.
      soft_cap: Logits x become ``soft_cap * tanh(x / soft_cap)``; None leaves them.
      vocab_dim: The dim of the weight that is the vocabulary.
      gradient_scale: Factor of the logits' gradients before they are rounded to the
        dtype of the operands; sums of them are divided by it. A power of two.
    """

    ignore_index: int = IGNORE_INDEX
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    soft_cap: float | None = None
    vocab_dim: int = 0
    gradient_scale: float = 1.0


class Head(NamedTuple):
    """The last layer, which computes the logits.

    Attributes:
      weight: ``[V, D]``, or ``[D, V]`` with ``vocab_dim=1``. It may be wider than
        ``hidden``: it is cast to that dtype, and its gradient is not.
      bias: ``[V]`` or None.
    """

    weight: Any
    bias: Any = None


@dataclass(frozen=True)
class Split:
    """How the operands are sharded over a mesh.

    Attributes:
      mesh: The mesh.
      tokens: Layout of the labels, and of ``hidden`` but for its last dim.
      vocabulary: Axes that split the vocabulary, outer first.
      weight: Layout in which the weight is stored, and in which it is cast.
    """

    mesh: Mesh
    tokens: PartitionSpec
    vocabulary: tuple[str, ...] = ()
    weight: PartitionSpec | None = None

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Axes that split the tokens."""
        return tuple(axis for axes in axes_of_dims(self.tokens, 0) for axis in axes)


def fused_loss(
    terms: Terms,
    head: Head,
    hidden: Array,
    labels: Array,
    split: Split | None,
    reduction: Reduction = "mean",
    chunk_size: int | None = None,
) -> Array:
    """``op.fused_linear_cross_entropy`` of operands that are known to be valid.

    Args:
      terms: The terms of a token's loss.
      head: Weight and bias.
      hidden: ``[..., D]``.
      labels: ``[...]``.
      split: Their layouts; None leaves them to the compiler.
      reduction: ``mean``, ``sum`` or ``none``.
      chunk_size: Tokens of a device in a chunk; None is the default.
    """
    labels = as_labels(labels)
    if hidden.dtype == jnp.float16 or scope.current_autocast() == "float16":
        # The probability of one word among many underflows in fp16.
        terms = replace(terms, gradient_scale=1024.0)
    if split and split.mesh.axis_size((*split.token_axes, *split.vocabulary)) == 1:
        split = None
    hidden, weight, bias, labels = varying_alike(hidden, *head, labels)
    dtypes = hidden.dtype.name, weight.dtype.name
    call = _Call(terms, split, chunk_size, dtypes, reduction == "none")
    operands = _Operands(hidden, Head(weight, bias), labels)
    traced = is_traced(*jax.tree.leaves(operands))
    loss = (_loss if traced else _compiled_loss)(call, operands)
    if reduction == "none":
        return loss
    return reduced(loss, labels != terms.ignore_index, reduction)


@dataclass(frozen=True)
class _Call:
    """The static arguments of a call.

    Attributes:
      terms: The terms of a token's loss.
      split: How the operands are sharded, where they are.
      chunk_size: Tokens of a device in a chunk; None is the default.
      dtypes: Those of ``hidden`` and of the head.
      per_token: Whether each token's loss is a result, or their sum.
    """

    terms: Terms
    split: Split | None
    chunk_size: int | None
    dtypes: tuple[str, str]
    per_token: bool

    @property
    def vocabulary_axes(self) -> tuple[str, ...]:
        """Axes that split the vocabulary."""
        return self.split.vocabulary if self.split else ()


class _Operands(NamedTuple):
    """The arrays of a call, or their gradients.

    Attributes:
      hidden: ``[..., D]``.
      head: Weight and bias.
      labels: ``[...]``.
      cotangents: ``[...]``, those of the losses, where each has its own.
    """

    hidden: Any
    head: Head
    labels: Any = None
    cotangents: Any = None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(call: _Call, operands: _Operands) -> Array:
    """The loss of each token, or their sum."""
    losses, _ = _sharded(call, operands, differentiate=False)
    return losses if call.per_token else losses.sum()


def _forward(call: _Call, operands: _Operands) -> tuple[Array, _Operands]:
    if call.per_token:  # each with a cotangent that only the backward pass knows
        return _sharded(call, operands, differentiate=False)[0], operands
    losses, gradients = _sharded(call, operands, differentiate=True)
    return losses.sum(), gradients


def _backward(call: _Call, residuals: _Operands, cotangent: Array) -> Any:
    if call.per_token:
        operands = residuals._replace(cotangents=cotangent)
        _, gradients = _sharded(call, operands, differentiate=True)
    else:
        gradients = jax.tree.map(cotangent.__mul__, residuals)
    hidden, head = gradients.hidden, gradients.head
    of_hidden, of_head = call.dtypes
    head = jax.tree.map(lambda gradient: gradient.astype(of_head), head)
    return (_Operands(hidden.astype(of_hidden), head),)


_loss.defvjp(_forward, _backward)
# Eager calls with equal static arguments share one compiled program.
_compiled_loss = jax.jit(_loss, static_argnums=0)


def _sharded(call: _Call, operands: _Operands, *, differentiate: bool) -> Any:
    """Losses laid out as the labels, and f32 gradients laid out as their operands."""
    on_device = partial(_on_device, call, differentiate)
    split = call.split
    weight = operands.head.weight.astype(operands.hidden.dtype)
    if split is not None and split.weight is not None:
        # Each device casts its shard, and what is gathered is narrow.
        weight = scope.constrain(weight, split.mesh, split.weight)
    operands = operands._replace(head=operands.head._replace(weight=weight))
    if split is None:
        return on_device(operands)
    vocabulary: Any = split.vocabulary or None
    dims = (None, vocabulary) if call.terms.vocab_dim else (vocabulary, None)
    head = Head(PartitionSpec(*dims), PartitionSpec(vocabulary))
    gradients = _Operands(split.tokens, head) if differentiate else None
    in_specs = (_Operands(split.tokens, head, split.tokens, split.tokens),)
    results = (split.tokens, gradients)
    mesh = region_mesh(split.mesh)
    losses, gradients = map_free_axes(on_device, mesh, in_specs, results)(operands)
    if gradients is not None and split.weight is not None:
        of_weight = scope.constrain(gradients.head.weight, split.mesh, split.weight)
        head = gradients.head._replace(weight=of_weight)
        # The backward pass goes on when devices have their shards of it: XLA would
        # keep the whole gradient of each until that pass ends, and send it then.
        gradients = lax.optimization_barrier(gradients._replace(head=head))
    return losses, gradients


def _on_device(call: _Call, differentiate: bool, operands: _Operands) -> Any:
    """Losses and gradients of the tokens of one device."""
    hidden, head, labels, cotangents = operands
    tokens = _Operands(
        hidden.reshape(-1, hidden.shape[-1]),
        head,
        labels.reshape(-1),
        None if cotangents is None else cotangents.reshape(-1),
    )
    losses, gradients = _chunked(call, differentiate, tokens)
    if gradients is not None:
        of_head = gradients.head
        if call.split and (axes := call.split.token_axes):
            # In the dtype that it has then. In fp16 it would underflow before the
            # loss scale multiplies it.
            if call.dtypes[1] == "bfloat16":
                of_head = jax.tree.map(lambda x: x.astype(jnp.bfloat16), of_head)
            of_head = lax.psum(of_head, axes)
        gradients = _Operands(gradients.hidden.reshape(hidden.shape), of_head)
    return losses.reshape(labels.shape), gradients


# --- one device


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
      (128, 2048)
    """
    row, fewest = 4 * vocabulary, 128 if platform == "cpu" else 512
    rows = max(_CHUNK_BYTES // row, fewest)
    if platform != "cpu":
        rows = max(rows, min(tokens // 8, _LARGEST_CHUNK_BYTES // row))
    return max(min(rows, tokens), 1)


def _chunked(call: _Call, differentiate: bool, tokens: _Operands) -> Any:
    """Losses f32 ``[N]``, and the gradients of their sum, weighted by any cotangents.

    Each matmul contracts one dim of two-dim operands. That of the weight's gradient has
    the tokens as the leading dim of both operands and the vocabulary last, the form
    that XLA runs fastest on CPU (JAX 0.10.2).

    Gradients by tokens are summed over the axes that split the vocabulary; those by the
    head are of the device's own part of it.
    """
    terms, head, axes = call.terms, tokens.head, call.vocabulary_axes
    words, width = head.weight.shape[:: -1 if terms.vocab_dim else 1]

    def one(sums: Any, chunk: _Operands) -> tuple[Any, Any]:
        losses, by_logits, by_bias = _in_parts(call, differentiate, chunk)
        if by_logits is None:
            return sums, (losses, None)
        # [D, C] @ [C, V]; [C, V] @ [V, D].
        by_weight = sums.weight + _dot(chunk.hidden, by_logits, 0, 0)
        by_hidden = _dot(by_logits, head.weight, 1, terms.vocab_dim)
        by_hidden = by_hidden / terms.gradient_scale
        by_bias = None if by_bias is None else sums.bias + by_bias
        return Head(by_weight, by_bias), (losses, by_hidden)

    def zeros(like: Array, *shape: int) -> Array:
        return varying_as(like, jnp.zeros(shape, jnp.float32))

    if not differentiate:
        return _over_chunks(call, one, None, tokens)[1][0], None
    start = Head(
        zeros(head.weight, width, words),
        None if head.bias is None else zeros(head.bias, words),
    )
    sums, (losses, by_hidden) = _over_chunks(call, one, start, tokens)
    by_hidden = lax.psum(by_hidden, axes) if axes else by_hidden
    by_weight = (
        sums.weight if terms.vocab_dim else sums.weight.T
    ) / terms.gradient_scale
    by_bias = None if sums.bias is None else sums.bias / terms.gradient_scale
    return losses, _Operands(by_hidden, Head(by_weight, by_bias))


def _in_parts(call: _Call, differentiate: bool, chunk: _Operands) -> Any:
    """The losses of a chunk, its gradients by the logits, and their sum for the bias.

    A part of the chunk has f32 logits at a time; the gradients are in the dtype of the
    operands. The fewer chunks, the seldomer the gradient of the weight is read and
    written to add to it, which on a GPU takes the time of the matmul.
    """

    def one(part: _Operands) -> tuple[Array, Array | None, Array | None]:
        losses, by_logits = _losses_of_chunk(call, differentiate, part)
        if by_logits is None:
            return losses, None, None
        by_bias = None if chunk.head.bias is None else by_logits.sum(axis=0)
        return losses, by_logits.astype(chunk.hidden.dtype), by_bias

    rows = len(chunk.hidden)
    if scope.device().platform == "cpu" or rows % 2 or not differentiate:
        return one(chunk)

    def half(tokens: tuple[Any, ...]) -> Any:
        hidden, labels, cotangents = tokens
        return one(_Operands(hidden, chunk.head, labels, cotangents))

    tokens = chunk.hidden, chunk.labels, chunk.cotangents
    halves = jax.tree.map(lambda x: x.reshape(2, rows // 2, *x.shape[1:]), tokens)
    losses, by_logits, by_bias = lax.map(half, halves)
    by_bias = None if by_bias is None else by_bias.sum(axis=0)
    return losses.reshape(rows), by_logits.reshape(rows, -1), by_bias


def _dot(left: Array, right: Array, contracted: int, other: int) -> Array:
    dims = (((contracted,), (other,)), ((), ()))
    return lax.dot_general(left, right, dims, preferred_element_type=jnp.float32)


def _losses_of_chunk(
    call: _Call, differentiate: bool, tokens: _Operands
) -> tuple[Array, Array | None]:
    """f32 losses ``[C]``, and gradients by the logits, f32 ``[C, V]``.

    The device has the logits of its own part of the vocabulary. A loss is 0 where the
    token is ignored and NaN where its label is not in the vocabulary. Gradients are
    multiplied by the cotangents and by ``gradient_scale``.
    """
    terms, head, axes = call.terms, tokens.head, call.vocabulary_axes
    logits, capped = _dot(tokens.hidden, head.weight, 1, 1 - terms.vocab_dim), None
    if head.bias is not None:
        logits = logits + head.bias.astype(jnp.float32)
    if terms.soft_cap is not None:
        capped = jnp.tanh(logits / terms.soft_cap)
        logits = capped * terms.soft_cap
    highest, first = logits.max(axis=-1), 0
    columns = logits.shape[-1]
    vocabulary = columns * prod(lax.axis_size(axis) for axis in axes)
    if axes:
        highest = lax.pmax(highest, axes)
        first = lax.axis_index(axes) * columns
    # Relative to the largest, so that rounding is that of the loss.
    scores = logits - highest[:, None]
    exponentials = jnp.exp(scores)
    labels = tokens.labels
    index = labels - jnp.asarray(first, labels.dtype)
    is_target = lax.broadcasted_iota(labels.dtype, scores.shape, 1) == index[:, None]
    sums = [exponentials.sum(-1), jnp.where(is_target, scores, 0.0).sum(-1)]
    if terms.label_smoothing:
        sums.append(scores.sum(-1))
    total, target_score, *score_sums = lax.psum(sums, axes) if axes else sums
    log_total = jnp.log(total)
    log_sum = log_total + highest
    losses = log_total - target_score
    for score_sum in score_sums:
        mean = log_total - score_sum / vocabulary
        losses = (1.0 - terms.label_smoothing) * losses + terms.label_smoothing * mean
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
    target = (1.0 - terms.label_smoothing) * weight
    gradient = exponentials * share[:, None]
    gradient = gradient - jnp.where(is_target, target[:, None], 0.0)
    if terms.label_smoothing:
        gradient = gradient - (terms.label_smoothing / vocabulary * weight)[:, None]
    if capped is not None:
        gradient = gradient * (1.0 - capped * capped)
    return losses, gradient


def _over_chunks(call: _Call, function: Any, carry: Any, tokens: _Operands) -> Any:
    """``lax.scan`` over chunks of tokens, as even as possible.

    The last chunk is padded with ignored tokens.
    """
    count, words = len(tokens.hidden), tokens.head.weight.shape[call.terms.vocab_dim]
    size = call.chunk_size or chunk_rows(count, words, scope.device().platform)
    chunks = max(-(-count // size), 1)
    if chunks == 1:
        return function(carry, tokens)
    rows = -(-count // chunks)
    padding = chunks * rows - count

    def split(array: Array, fill: int = 0) -> Array:
        if padding:
            widths = ((0, padding), *((0, 0) for _ in array.shape[1:]))
            array = jnp.pad(array, widths, constant_values=fill)
        return array.reshape(chunks, rows, *array.shape[1:])

    def join(array: Array) -> Array:
        return array.reshape(chunks * rows, *array.shape[2:])[:count]

    def one(carry: Any, chunk: Any) -> Any:
        hidden, labels, cotangents = chunk
        return function(carry, _Operands(hidden, tokens.head, labels, cotangents))

    chunked = (
        split(tokens.hidden),
        split(tokens.labels, call.terms.ignore_index),
        None if tokens.cotangents is None else split(tokens.cotangents),
    )
    carry, results = lax.scan(one, carry, chunked)
    return carry, jax.tree.map(join, results)
