# SPDX-License-Identifier: Apache-2.0
"""``op.fused_linear_cross_entropy``: cross-entropy without materializing the logits.

This module checks the operands and reads their layouts; ``linear_loss_vjp`` computes.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from tessera.foundations.labels import IGNORE_INDEX
from tessera.ops.linear_loss_chunks import LossLayout, Terms
from tessera.ops.linear_loss_vjp import fused_loss
from tessera.ops.losses import Reduction, check_settings
from tessera.ops.operand_checks import raise_problems
from tessera.ops.operand_layouts import as_array, layout_of
from tessera.shard_spec import axes_of_dims


def fused_linear_cross_entropy(  # noqa: PLR0913
    hidden: Any,
    weight: Any,
    labels: Any,
    *,
    vocab_dim: int = 0,
    ignore_index: int = IGNORE_INDEX,
    reduction: Reduction = "mean",
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    chunk_size: int | None = None,
) -> Array:
    """``cross_entropy(hidden @ weight.T, labels)`` in little memory.

    Sums and the softmax are f32 whatever the dtype of the operands. Gradients are
    computed together with the loss, and only where it is differentiated; with
    ``reduction="none"`` each token has its own cotangent, and the backward pass
    recomputes the logits.

    The layouts of the operands say how they are sharded over a mesh: the tokens by that
    of ``hidden``, or else of ``labels``, the vocabulary by that of ``weight``. Each
    device then processes its own tokens in chunks and all-reduces its part of the
    softmax, three numbers per token. A weight that is sharded along D is gathered once.
    A value computed in a trace has no known layout, unless it was constrained to one:
    then XLA decides, and may all-reduce the weight's gradient in every chunk.

    Args:
      hidden: ``[..., D]`` floating-point.
      weight: ``[V, D]`` in the dtype of ``hidden``, such as a table of embeddings.
      labels: ``[...]`` integers in ``[0, V)``, or ``ignore_index``.
      vocab_dim: 1 for a weight ``[D, V]``.
      ignore_index: Label of tokens to ignore.
      reduction: As in ``cross_entropy``: ``mean`` over the tokens that are not
        ignored, ``sum`` or ``none``.
      z_loss: Weight of the squared log of the softmax's denominator, which is added to
        the loss of each token (arXiv 2204.02311); 1e-4 is usual.
      soft_cap: Logits x become ``soft_cap * tanh(x / soft_cap)``; None leaves them.
      chunk_size: Tokens per chunk of each device. By default the logits of a chunk
        take 16 MiB on CPU, of at least 128 tokens; elsewhere an eighth of all logits,
        between 16 MiB and 512 MiB, of at least 512 tokens.

    Returns:
      f32 scalar, or ``[...]`` f32 with ``reduction="none"``, in nats. A label outside
      the vocabulary gives NaN.

    Raises:
      OperandError: [T401] shapes, dtypes or settings that do not fit.

    Example:
      >>> hidden, table = jnp.ones((2, 3, 8)), jnp.zeros((50, 8))
      >>> labels = jnp.array([[0, 1, 2], [3, 4, -100]])
      >>> print(fused_linear_cross_entropy(hidden, table, labels).round(4))
      3.912

    Source: arXiv 2410.10989, 2411.09009.
    """
    split = _split_of(hidden, weight, labels, vocab_dim)
    hidden, weight, labels = as_array(hidden), as_array(weight), as_array(labels)
    check_settings("fused_linear_cross_entropy", reduction, z_loss)
    _check(hidden, weight, labels, vocab_dim, soft_cap, chunk_size)
    terms = Terms(ignore_index, z_loss, soft_cap, vocab_dim)
    return fused_loss(terms, weight, hidden, labels, split, reduction, chunk_size)


def _split_of(
    hidden: Any, weight: Any, labels: Any, vocab_dim: int
) -> LossLayout | None:
    """How the operands are sharded, by their layouts; None where these do not say.

    Replicated labels say nothing about tokens that are computed in a trace.
    """
    of_tokens, of_words = layout_of(hidden), layout_of(weight)
    if of_tokens is None:
        of_tokens = layout_of(labels)
        if of_tokens is not None and not any(axes_of_dims(of_tokens[1], 0)):
            of_tokens = None
    known = of_tokens or of_words
    if known is None:
        return None
    mesh, count = known[0], len(jnp.shape(labels))
    tokens = PartitionSpec(*(of_tokens[1] if of_tokens else ())[:count])
    token_axes = {axis for axes in axes_of_dims(tokens, count) for axis in axes}
    words = axes_of_dims(of_words[1], 2)[vocab_dim] if of_words else ()
    words = tuple(axis for axis in words if axis not in token_axes)
    if of_tokens is None and mesh.axis_size(words) < mesh.size:
        return None
    return LossLayout(mesh, tokens, words)


def _check(
    hidden: Array,
    weight: Array,
    labels: Array,
    vocab_dim: int,
    soft_cap: float | None,
    chunk_size: int | None,
) -> None:
    problems = list[tuple[str, str]]()
    if hidden.dtype != weight.dtype or not jnp.issubdtype(hidden.dtype, jnp.floating):
        problems.append(
            (
                f"dtypes {hidden.dtype.name}, {weight.dtype.name}",
                "cast the operands to one floating-point dtype first",
            )
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        problems.append((f"labels of dtype {labels.dtype.name}", "pass class numbers"))
    if not hidden.ndim or hidden.shape[:-1] != labels.shape:
        problems.append(
            (
                f"hidden {hidden.shape}, labels {labels.shape}",
                f"pass labels of shape {hidden.shape[:-1]}",
            )
        )
    if vocab_dim not in (0, 1):
        problems.append((f"vocab_dim={vocab_dim}", "use 0 for [V, D], 1 for [D, V]"))
    elif weight.ndim != 2 or weight.shape[1 - vocab_dim] not in hidden.shape[-1:]:
        problems.append(_weight_problem(hidden, weight, vocab_dim))
    if soft_cap is not None and not soft_cap > 0:
        problems.append((f"soft_cap={soft_cap}", "use a positive soft_cap, or None"))
    if chunk_size is not None and chunk_size < 1:
        problems.append((f"chunk_size={chunk_size}", "use 1 or more, or None"))
    raise_problems(
        "fused_linear_cross_entropy takes tokens [..., D], a weight [V, D] and "
        "labels [...]",
        problems,
    )


def _weight_problem(hidden: Array, weight: Array, vocab_dim: int) -> tuple[str, str]:
    width = hidden.shape[-1:]
    shape = "(V, D)" if vocab_dim == 0 else "(D, V)"
    fix = f"pass a weight {shape} with D = {width[0] if width else '?'}"
    if weight.ndim == 2 and weight.shape[vocab_dim : vocab_dim + 1] == width:
        fix = f"pass vocab_dim={1 - vocab_dim}: its dim {vocab_dim} has that size"
    return f"hidden {hidden.shape}, weight {weight.shape}, vocab_dim={vocab_dim}", fix
