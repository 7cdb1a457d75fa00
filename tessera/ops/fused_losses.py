# SPDX-License-Identifier: Apache-2.0
"""``op.fused_linear_cross_entropy``: the loss of logits that never exist as a whole.

Over a large vocabulary logits and their gradients are the largest arrays of a step.
Here tokens go chunk by chunk through the last matmul, the softmax and, where the loss
is differentiated, the matmuls of the gradients at once (``fused_losses_chunks``): three
matmuls as always, nothing is computed twice, and what is kept is as large as what the
gradients are of. The backward pass multiplies them by the loss's cotangent.

On a mesh every device does so with its own tokens and its own part of the vocabulary.

Source: the order of Liger Kernel, arXiv 2410.10989; vocabulary-parallel, arXiv
1909.08053.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from tessera import _jax, scope
from tessera.errors import OperandError
from tessera.mesh import Mesh, manual_axes
from tessera.ops.attention.blockwise import varying_alike
from tessera.ops.fused_losses_chunks import (
    Chunk,
    Gradients,
    Head,
    Terms,
    chunk_rows,
    losses,
    losses_and_gradients,
)
from tessera.ops.losses import Reduction, as_labels, check_settings, reduced
from tessera.ops.operand_layouts import as_array, layout_of, region_mesh
from tessera.spec import axes_of_dims, is_padded

Given: TypeAlias = tuple[Array, Head, Array]


def fused_linear_cross_entropy(  # noqa: PLR0913
    hidden: Any,
    weight: Any,
    labels: Any,
    *,
    bias: Any = None,
    vocab_dim: int = 0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    chunk_size: int | None = None,
) -> Array:
    """``cross_entropy(hidden @ weight.T + bias, labels)`` in little memory.

    Sums and the softmax are f32 whatever the dtype of the operands. Gradients are
    computed beside the loss and only where it is differentiated; with
    ``reduction="none"`` each token has a cotangent of its own, and the logits are
    computed once more.

    How the operands are split over a mesh is read from their layouts: tokens from that
    of ``hidden`` or else of ``labels``, the vocabulary from that of ``weight``. Each
    device then takes its own tokens in chunks and sums its part of the softmax with
    the others', three numbers a token. A weight that is split along D is put together
    once. Of a value that is computed in a trace no layout is known, unless it was given
    one: then the compiler decides, and may sum the weight's gradient in every chunk.

    Args:
      hidden: ``[..., D]`` floating-point.
      weight: ``[V, D]`` in the dtype of ``hidden``, such as a table of embeddings.
      labels: ``[...]`` integers in ``[0, V)``, or ``ignore_index``.
      bias: ``[V]`` in the same dtype, or None.
      vocab_dim: 1 for a weight ``[D, V]``.
      ignore_index: Label of tokens that do not count.
      reduction: As in ``cross_entropy``: ``mean`` over those that count, ``sum`` or
        ``none``.
      label_smoothing: The part of each target that is spread over the vocabulary.
      z_loss: Weight of the squared log of the softmax's denominator, which is added to
        each token's loss (arXiv 2204.02311); 1e-4 is usual.
      soft_cap: Logits x become ``soft_cap * tanh(x / soft_cap)``; None leaves them.
      chunk_size: Tokens of each device in a chunk. By default so many that their logits
        take 16 MiB on CPU, where 128 are the least; elsewhere an eighth of all logits,
        from 16 MiB to 1 GiB, where 1024 are the least.

    Returns:
      f32 scalar, or ``[...]`` f32 with ``reduction="none"``, in nats. A label outside
      the vocabulary gives NaN rather than a plausible number.

    Raises:
      OperandError: [T401] shapes, dtypes or settings that do not fit.

    Example:
      >>> hidden, table = jnp.ones((2, 3, 8)), jnp.zeros((50, 8))
      >>> labels = jnp.array([[0, 1, 2], [3, 4, -100]])
      >>> print(fused_linear_cross_entropy(hidden, table, labels).round(4))
      3.912

    Source: arXiv 2410.10989, 2411.09009.
    """
    given = (hidden, weight, labels, bias)
    split = _split(hidden, weight, labels, vocab_dim)
    hidden, weight, labels = (as_array(x) for x in given[:3])
    bias = None if bias is None else as_array(bias)
    check_settings("fused_linear_cross_entropy", reduction, label_smoothing, z_loss)
    _check(hidden, weight, labels, bias, vocab_dim, soft_cap, chunk_size)
    terms = Terms(ignore_index, label_smoothing, z_loss, soft_cap, vocab_dim)
    return fused_loss(
        terms, Head(weight, bias), hidden, labels, split, reduction, chunk_size
    )


@dataclass(frozen=True)
class Split:
    """How the operands lie on a mesh.

    Attributes:
      mesh: The mesh.
      tokens: Layout of the labels, and of ``hidden`` but for its last dim.
      vocabulary: Axes that split the vocabulary, outer first.
    """

    mesh: Mesh
    tokens: PartitionSpec
    vocabulary: tuple[str, ...] = ()

    def axes_of_tokens(self, ndim: int) -> tuple[str, ...]:
        """Axes that split labels of so many dims."""
        return tuple(axis for axes in axes_of_dims(self.tokens, ndim) for axis in axes)


def fused_loss(
    terms: Terms,
    head: Head,
    hidden: Array,
    labels: Array,
    split: Split | None,
    reduction: Reduction = "mean",
    chunk_size: int | None = None,
) -> Array:
    """:func:`fused_linear_cross_entropy` of arrays that are known to fit and to lie so.

    Args:
      terms: What the loss of a token is.
      head: Weight and bias.
      hidden: ``[..., D]``.
      labels: ``[...]``.
      split: Their layouts; None leaves them to the compiler.
      reduction: As above.
      chunk_size: Tokens of a device in a chunk; None is the default.
    """
    labels = as_labels(labels)
    if hidden.dtype == jnp.float16 or scope.current_autocast() == "float16":
        # One of many words has a share that fp16 would round to nothing.
        terms = replace(terms, grain=1024.0)
    hidden, weight, bias, labels = varying_alike(hidden, *head, labels)
    call = _Call(terms, split, chunk_size, hidden.dtype.name)
    given = hidden, Head(weight, bias), labels
    traced = any(
        isinstance(_jax.underlying(x), jax.core.Tracer) for x in jax.tree.leaves(given)
    )
    if reduction == "none":
        return (_each if traced else _compiled_each)(call, *given)
    total = (_total if traced else _compiled_total)(call, *given)
    return reduced(total, labels != terms.ignore_index, reduction)


@dataclass(frozen=True)
class _Call:
    """What a call asks for, besides its arrays."""

    terms: Terms
    split: Split | None
    chunk_size: int | None
    dtype: str

    def losses(self, hidden: Array, head: Head, labels: Array) -> Array:
        """The loss of each token, laid out as the labels."""

        def on_device(hidden: Array, head: Head, labels: Array) -> Array:
            tokens = Chunk(hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1))
            rows = self._rows(tokens, head)
            found = losses(self.terms, self._vocabulary, rows, head, tokens)
            return found.reshape(labels.shape)

        return self._spread(on_device, labels.ndim, (0, 1, 0), 0)(hidden, head, labels)

    def gradients(
        self, hidden: Array, head: Head, labels: Array, seeds: Array | None
    ) -> tuple[Array, Gradients]:
        """The same, and f32 gradients laid out as what they are of."""
        axes = () if self.split is None else self.split.axes_of_tokens(labels.ndim)

        def on_device(
            hidden: Array, head: Head, labels: Array, seeds: Array | None
        ) -> tuple[Array, Array, Head]:
            tokens = Chunk(
                hidden.reshape(-1, hidden.shape[-1]),
                labels.reshape(-1),
                None if seeds is None else seeds.reshape(-1),
            )
            rows = self._rows(tokens, head)
            found, slopes = losses_and_gradients(
                self.terms, self._vocabulary, rows, head, tokens
            )
            by_head = slopes.head
            if self._is_spread and axes:
                by_head = jax.lax.psum(by_head, axes)
            by_hidden = slopes.hidden.reshape(hidden.shape)
            return found.reshape(labels.shape), by_hidden, by_head

        region = self._spread(on_device, labels.ndim, (0, 1, 0, 0), (0, 0, 1))
        found, by_hidden, by_head = region(hidden, head, labels, seeds)
        return found, Gradients(by_hidden, by_head)

    @property
    def _vocabulary(self) -> tuple[str, ...]:
        return self.split.vocabulary if self.split and self._is_spread else ()

    @property
    def _is_spread(self) -> bool:
        """Whether devices have different tokens or words."""
        if self.split is None:
            return False
        entries = [axis for axes in axes_of_dims(self.split.tokens, 0) for axis in axes]
        return self.split.mesh.axis_size((*entries, *self.split.vocabulary)) > 1

    def _rows(self, tokens: Chunk, head: Head) -> int:
        count = tokens.hidden.shape[0]
        if self.chunk_size is not None:
            return min(self.chunk_size, max(count, 1))
        words = head.weight.shape[self.terms.vocab_dim]
        return chunk_rows(count, words, jax.default_backend())

    def _spread(
        self, on_device: Callable[..., Any], ndim: int, given: Any, found: Any
    ) -> Callable[..., Any]:
        """``on_device`` by every device; 0 stands for what is of tokens, 1 of words."""
        if not self._is_spread:
            return on_device
        assert self.split is not None
        parts: Any = self.split.vocabulary or None
        dims = (None, parts) if self.terms.vocab_dim else (parts, None)
        head: Any = (PartitionSpec(*dims), PartitionSpec(parts))
        specs = {0: self.split.tokens, 1: Head(*head)}
        manual = manual_axes()
        home = region_mesh(self.split.mesh)
        if manual:
            home = jax.sharding.get_abstract_mesh()
        return jax.shard_map(
            on_device,
            mesh=home,
            in_specs=jax.tree.map(specs.get, given),
            out_specs=jax.tree.map(specs.get, found),
            axis_names=set(home.axis_names) - set(manual),
            check_vma=False,
        )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _total(call: _Call, hidden: Array, head: Head, labels: Array) -> Array:
    """The sum of all losses."""
    return call.losses(hidden, head, labels).sum()


def _total_forward(
    call: _Call, hidden: Array, head: Head, labels: Array
) -> tuple[Array, Gradients]:
    found, gradients = call.gradients(hidden, head, labels, None)
    return found.sum(), gradients


def _total_backward(call: _Call, kept: Gradients, seed: Array) -> Any:
    return *_narrow(call, jax.tree.map(seed.__mul__, kept)), None


_total.defvjp(_total_forward, _total_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _each(call: _Call, hidden: Array, head: Head, labels: Array) -> Array:
    """Every loss by itself."""
    return call.losses(hidden, head, labels)


def _each_forward(call: _Call, *given: Any) -> tuple[Array, Given]:
    return call.losses(*given), given


def _each_backward(call: _Call, given: Given, seeds: Array) -> Any:
    return *_narrow(call, call.gradients(*given, seeds)[1]), None


_each.defvjp(_each_forward, _each_backward)
# Calls that are alike share a program where nothing is traced around them.
_compiled_total = jax.jit(_total, static_argnums=0)
_compiled_each = jax.jit(_each, static_argnums=0)


def _narrow(call: _Call, gradients: Gradients) -> Gradients:
    """Gradients in the dtype of what they are of."""

    def narrow(array: Array) -> Array:
        return array.astype(call.dtype)

    return jax.tree.map(narrow, gradients)


def _split(hidden: Any, weight: Any, labels: Any, vocab_dim: int) -> Split | None:
    """How operands lie on a mesh, as far as their layouts tell; None where they do not.

    Labels that are whole on every device say nothing of tokens that are computed.
    Blocks of what is stored padded differ in size: XLA splits the work then.
    """
    of_tokens, of_words = layout_of(hidden), layout_of(weight)
    if any(
        is_padded(x.shape, *of)
        for x, of in zip((hidden, weight), (of_tokens, of_words), strict=True)
        if of
    ):
        return None
    if of_tokens is None:
        of_tokens = layout_of(labels)
        if of_tokens is not None and not any(axes_of_dims(of_tokens[1], 0)):
            of_tokens = None
    known = of_tokens or of_words
    if known is None:
        return None
    mesh, count = known[0], len(jnp.shape(labels))
    tokens = PartitionSpec(*(of_tokens[1] if of_tokens else ())[:count])
    taken = {axis for axes in axes_of_dims(tokens, count) for axis in axes}
    words = axes_of_dims(of_words[1], 2)[vocab_dim] if of_words else ()
    words = tuple(axis for axis in words if axis not in taken)
    if of_tokens is None and mesh.axis_size(words) < mesh.size:
        return None
    return Split(mesh, tokens, words)


def _check(
    hidden: Array,
    weight: Array,
    labels: Array,
    bias: Array | None,
    vocab_dim: int,
    soft_cap: float | None,
    chunk_size: int | None,
) -> None:
    wrong = list[tuple[str, str]]()
    arrays = [hidden, weight] if bias is None else [hidden, weight, bias]
    dtypes = {array.dtype for array in arrays}
    if len(dtypes) > 1 or not jnp.issubdtype(hidden.dtype, jnp.floating):
        wrong.append(
            (
                "dtypes " + ", ".join(array.dtype.name for array in arrays),
                "cast the operands to one floating-point dtype first",
            )
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        wrong.append((f"labels of dtype {labels.dtype.name}", "pass class numbers"))
    if not hidden.ndim or hidden.shape[:-1] != labels.shape:
        wrong.append(
            (
                f"hidden {hidden.shape}, labels {labels.shape}",
                f"pass labels of shape {hidden.shape[:-1]}",
            )
        )
    if vocab_dim not in (0, 1):
        wrong.append((f"vocab_dim={vocab_dim}", "use 0 for [V, D], 1 for [D, V]"))
    elif weight.ndim != 2 or weight.shape[1 - vocab_dim] not in hidden.shape[-1:]:
        wrong.append(_wrong_weight(hidden, weight, vocab_dim))
    elif bias is not None and bias.shape != (weight.shape[vocab_dim],):
        wrong.append(
            (f"bias {bias.shape}", f"pass one of shape {(weight.shape[vocab_dim],)}")
        )
    if soft_cap is not None and not soft_cap > 0:
        wrong.append((f"soft_cap={soft_cap}", "use a positive soft_cap, or None"))
    if chunk_size is not None and chunk_size < 1:
        wrong.append((f"chunk_size={chunk_size}", "use 1 or more, or None"))
    if wrong:
        raise OperandError(
            "fused_linear_cross_entropy takes tokens [..., D], a weight [V, D] and "
            "labels [...]",
            got="\n".join(got for got, _ in wrong),
            fix="\n".join(fix for _, fix in wrong),
        )


def _wrong_weight(hidden: Array, weight: Array, vocab_dim: int) -> tuple[str, str]:
    width = hidden.shape[-1:]
    turned = weight.ndim == 2 and weight.shape[vocab_dim : vocab_dim + 1] == width
    form = "(V, D)" if vocab_dim == 0 else "(D, V)"
    fix = f"pass a weight {form} with D = {width[0] if width else '?'}"
    if turned:
        fix = f"pass vocab_dim={1 - vocab_dim}: its dim {vocab_dim} has that size"
    return f"hidden {hidden.shape}, weight {weight.shape}, vocab_dim={vocab_dim}", fix
