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

Source: the order of Liger Kernel, arXiv 2410.10989; vocabulary-parallel, arXiv
1909.08053.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from tessera.jax_compat.workarounds import CorrectJit
from tessera.ops.attention.blockwise import varying_alike
from tessera.ops.linear_loss_chunks import (
    LossCall,
    LossLayout,
    LossOperands,
    Terms,
    chunked,
)
from tessera.ops.losses import Reduction, as_labels, reduced
from tessera.ops.operand_layouts import is_traced, map_free_axes, region_mesh
from tessera.shard_spec import axes_of_dims, spec_of_axes
from tessera.tracing import casts, scope


def fused_loss(
    terms: Terms,
    weight: Array,
    hidden: Array,
    labels: Array,
    split: LossLayout | None,
    reduction: Reduction = "mean",
    chunk_size: int | None = None,
) -> Array:
    """``op.fused_linear_cross_entropy`` of operands that are known to be valid.

    Args:
      terms: The terms of a token's loss.
      weight: As in ``LossOperands``.
      hidden: ``[..., D]``.
      labels: ``[...]``.
      split: Their layouts; None leaves them to the compiler.
      reduction: ``mean``, ``sum`` or ``none``.
      chunk_size: Tokens of a device in a chunk; None is the default.
    """
    labels = as_labels(labels)
    if hidden.dtype == jnp.float16 or casts.current_autocast() == "float16":
        # The probability of one word among many underflows in fp16.
        terms = replace(terms, gradient_scale=1024.0)
    if split and split.mesh.axis_size((*split.token_axes, *split.vocabulary)) == 1:
        split = None
    hidden, weight, labels = varying_alike(hidden, weight, labels)
    dtypes = hidden.dtype.name, weight.dtype.name
    call = LossCall(terms, split, chunk_size, dtypes, reduction == "none")
    operands = LossOperands(hidden, weight, labels)
    traced = is_traced(*jax.tree.leaves(operands))
    loss = (_loss if traced else _compiled_loss)(call, operands)
    if reduction == "none":
        return loss
    return reduced(loss, labels != terms.ignore_index, reduction)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(call: LossCall, operands: LossOperands) -> Array:
    """The loss of each token, or their sum."""
    losses, _ = _sharded(call, operands, differentiate=False)
    return losses if call.per_token else losses.sum()


def _forward(call: LossCall, operands: LossOperands) -> tuple[Array, LossOperands]:
    if call.per_token:  # each with a cotangent that only the backward pass knows
        return _sharded(call, operands, differentiate=False)[0], operands
    losses, gradients = _sharded(call, operands, differentiate=True)
    return losses.sum(), gradients


def _backward(call: LossCall, residuals: LossOperands, cotangent: Array) -> Any:
    if call.per_token:
        operands = residuals._replace(cotangents=cotangent)
        _, gradients = _sharded(call, operands, differentiate=True)
    else:

        def scaled(gradient: Array) -> Array:
            return cotangent * gradient.astype(cotangent.dtype)

        gradients = jax.tree.map(scaled, residuals)
    of_hidden, of_weight = call.dtypes
    hidden = gradients.hidden.astype(of_hidden)
    return (LossOperands(hidden, gradients.weight.astype(of_weight)),)


_loss.defvjp(_forward, _backward)
# Eager calls with equal static arguments share one compiled program.
_compiled_loss = CorrectJit(_loss, static_argnums=0)


def _sharded(call: LossCall, operands: LossOperands, *, differentiate: bool) -> Any:
    """Losses laid out as the labels, and f32 gradients laid out as their operands."""
    weight = operands.weight.astype(operands.hidden.dtype)
    if call.split is not None and call.split.weight is not None:
        # Each device casts its shard, and what is gathered is narrow.
        weight = scope.constrain(weight, call.split.mesh, call.split.weight)
    if is_transposed := _gathers_last_dim(call):
        call, weight = _transposed(call), weight.T
    split = call.split
    on_device = partial(_on_device, call, differentiate)
    operands = operands._replace(weight=weight)
    if split is None:
        return on_device(operands)
    vocabulary: Any = split.vocabulary or None
    dims = (None, vocabulary) if call.terms.vocab_dim else (vocabulary, None)
    words = PartitionSpec(*dims)
    gradients = LossOperands(split.tokens, words) if differentiate else None
    in_specs = (LossOperands(split.tokens, words, split.tokens, split.tokens),)
    results = (split.tokens, gradients)
    mesh = region_mesh(split.mesh)
    losses, gradients = map_free_axes(on_device, mesh, in_specs, results)(operands)
    if gradients is not None and split.weight is not None:
        of_weight = scope.constrain(gradients.weight, split.mesh, split.weight)
        of_weight = of_weight.T if is_transposed else of_weight
        # The backward pass goes on when devices have their shards of it: XLA would
        # keep the whole gradient of each until that pass ends, and send it then.
        gradients = lax.optimization_barrier(gradients._replace(weight=of_weight))
    return losses, gradients


def _gathers_last_dim(call: LossCall) -> bool:
    """Whether devices gather the weight along its last dim, on GPUs.

    NCCL concatenates along the outermost dim in memory, so the gathered weight is
    transposed there. XLA would copy all of it to have it in order for the loop over
    chunks; computing with the transposed weight needs no copy.
    """
    if call.split is None or call.split.weight is None:
        return False
    stored = axes_of_dims(call.split.weight, 2)
    gathered = [set(axes) - set(call.vocabulary_axes) for axes in stored]
    return scope.device().platform == "gpu" and not gathered[0] and bool(gathered[1])


def _transposed(call: LossCall) -> LossCall:
    """The call for the transposed weight."""
    assert call.split is not None
    assert call.split.weight is not None
    stored = spec_of_axes(reversed(axes_of_dims(call.split.weight, 2)))
    split = replace(call.split, weight=stored)
    terms = replace(call.terms, vocab_dim=1 - call.terms.vocab_dim)
    return replace(call, split=split, terms=terms)


def _on_device(call: LossCall, differentiate: bool, operands: LossOperands) -> Any:
    """Losses and gradients of the tokens of one device."""
    hidden, weight, labels, cotangents = operands
    labels, cotangents = jax.tree.map(jnp.ravel, (labels, cotangents))
    flat = hidden.reshape(-1, hidden.shape[-1])
    tokens = LossOperands(flat, weight, labels, cotangents)
    losses, gradients = chunked(call, differentiate, tokens)
    if gradients is not None:
        of_weight = gradients.weight
        if call.split and (axes := call.split.token_axes):
            of_weight = lax.psum(of_weight.astype(call.split.sums), axes)
        gradients = LossOperands(gradients.hidden.reshape(hidden.shape), of_weight)
    return losses.reshape(operands.labels.shape), gradients
