# SPDX-License-Identifier: Apache-2.0
"""``op.context_attention``: attention over sequences that are split over devices.

context_parallel   checks; on global arrays, an SPMD region
  all_to_all         heads in exchange for sequences; flash computes
  context_parallel_variants   per device: the choice of the variant
    ring, halo         what is sent, and in which order
      blockwise        what is computed
"""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from tessera.errors import CollectiveError, OperandError
from tessera.jax_compat.traces import manual_axes
from tessera.mesh import Mesh
from tessera.ops.attention.all_to_all import attend_by_heads, check_exchange
from tessera.ops.attention.blockwise import all_varying
from tessera.ops.attention.context_parallel_variants import (
    LayerVariants,
    attend_on_device,
    wire_of,
)
from tessera.ops.attention.flash import flash_attention
from tessera.ops.attention.zigzag import Arrangement, ContextSharding
from tessera.ops.operand_checks import check_one_dtype, raise_problems
from tessera.ops.operand_layouts import as_array, layout_of, map_blocks
from tessera.shard_spec import axes_of_dims

Method: TypeAlias = Literal["zigzag", "ring", "all_to_all"]


def context_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    axis: str = "cp",
    method: Method = "ring",
    causal: bool = True,
    window: int | None = None,
    segment_ids: Any = None,
) -> Array:
    """Grouped-query attention over sequences that are split over a mesh axis.

    In shapes, n is the number of devices along the axis. Per device q is ``[B, S/n, H,
    K]``, k and v are ``[B, S/n, G, K]`` and the result is as q: inside ``op.kernel``
    these are the operands. A global array is split by the layout of q, whose dim 1 is
    split over the axis; its other dims may be split over other axes.

    Query head h attends to key/value head ``h // (H / G)``; scores are divided by the
    root of K. Scores and sums are f32, whatever the dtype of the operands.

    With a causal window no longer than the chunk of a device, ``ring`` and ``zigzag``
    exchange only the halo.

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      axis: The mesh axis that splits the sequences.
      method: ``ring`` passes keys and values around a ring, which with a causal mask
        leaves the first devices idle; ``zigzag`` does the same with sequences in the
        order of :func:`zigzag`, which balances the work; ``all_to_all`` exchanges the
        sequence for heads, whose number must be a multiple of n.
      causal: Whether a query attends only to keys at or before its position.
      window: How many positions back it attends, including its own; None is all.
      segment_ids: int32 ``[B, S/n]`` per device; a token attends to those of its own
        segment.

    Raises:
      OperandError: [T401] shapes, dtypes or options that are not valid.
      HeadCountError: [T402] heads that ``all_to_all`` cannot divide over the axis.
      CollectiveError: [T206] the axis does not split dim 1 of q, or its layout is not
        known.
      ShardDivisibilityError: [T201] the devices' chunks do not divide the sequences.
      UnknownAxisError: [T103] the mesh has no such axis.

    Example:
      >>> from tessera.shard import ShardSpec, tensor
      >>> with Mesh(["cp"], devices=range(4)):
      ...     spec = ShardSpec((1,), ("cp",))
      ...     q, k, v = (tensor((1, 16, 2, 4), spec, init="ones") for _ in range(3))
      ...     context_attention(q, k, v).shape
      (1, 16, 2, 4)

    Source: arXiv 2310.01889 (ring), 2309.14509 (all-to-all), 2407.21783 (zigzag).
    """
    options = _Options(axis, method, causal, window)
    options.check()
    queries, keys, values = (as_array(x) for x in (q, k, v))
    segments = None if segment_ids is None else as_array(segment_ids)
    _check_operands(queries, keys, values, segments)
    if manual_axes():
        return _on_device(queries, keys, values, segments, options)
    mesh, spec = _layout(queries, axis)
    operands = queries, keys, values, segments
    specs = spec, spec, spec, PartitionSpec(*spec[:2])
    return map_blocks(
        _on_device, (options,), operands, mesh, specs, spec, check_vma=False
    )


def zigzag(x: Any, size: int, *, dim: int = 1) -> Array:
    """Reorder sequences so that ``size`` devices share causal attention evenly.

    Split over the devices, dim ``dim`` of the result gives device r the chunks r and
    2 · size - 1 - r of the 2 · size chunks of the sequence.

    Raises:
      ShardDivisibilityError: [T201] the dim is not a multiple of 2 · size.

    Example:
      >>> zigzag(jnp.arange(8), 2, dim=0).tolist()
      [0, 1, 6, 7, 2, 3, 4, 5]
    """
    return Arrangement("zigzag", size).apply(as_array(x), dim)


def unzigzag(x: Any, size: int, *, dim: int = 1) -> Array:
    """Undo :func:`zigzag`.

    Raises:
      ShardDivisibilityError: [T201] the dim is not a multiple of 2 · size.
    """
    return Arrangement("zigzag", size).undo(as_array(x), dim)


@dataclass(frozen=True)
class _Options:
    """The static arguments of a call."""

    axis: str
    method: Method
    causal: bool
    window: int | None

    def check(self) -> None:
        problems: list[tuple[str, str]] = []
        if self.method not in get_args(Method):
            legal = ", ".join(map(repr, get_args(Method)))
            problems.append((f"method {self.method!r}", f"use one of {legal}"))
        if self.window is not None and self.window < 1:
            problems.append(
                (f"window {self.window}", "use a window of 1 or more, or None")
            )
        if self.window is not None and not self.causal:
            problems.append(("a window with causal=False", "leave one of them out"))
        raise_problems("context_attention cannot do this", problems)


def _on_device(
    q: Array, k: Array, v: Array, segments: Array | None, options: _Options
) -> Array:
    """The output of this device's queries, in an SPMD region."""
    axis, method = options.axis, options.method
    size = lax.axis_size(axis)
    if segments is not None:
        segments = lax.all_gather(segments, axis, axis=1, tiled=True)
    q, k, v, segments = all_varying(axis, q, k, v, segments)
    if method == "all_to_all":
        check_exchange(q.shape[2], k.shape[2], size, axis)

        def attend(*operands: Array) -> Array:
            out_BHSK = flash_attention(
                *(jnp.swapaxes(x, 1, 2) for x in operands),
                causal=options.causal,
                window=options.window,
                segment_ids=segments,
            )
            return jnp.swapaxes(out_BHSK, 1, 2)

        return attend_by_heads(attend, axis, q, k, v)
    arrangement = Arrangement("zigzag" if method == "zigzag" else "contiguous", size)
    sharding = ContextSharding(axis, arrangement, options.causal, wire_of(q.dtype))
    variants = LayerVariants.of(sharding, q.shape[1] * size, options.window)
    q = q * jnp.asarray(q.shape[-1] ** -0.5, q.dtype)
    return attend_on_device(variants, q, k, v, segments)


def _layout(queries: Any, axis: str) -> tuple[Mesh, PartitionSpec]:
    """Mesh and layout of global arrays, from their queries."""
    layout = layout_of(queries)
    if layout is None:
        raise CollectiveError(
            "context_attention does not know the layout of its queries",
            got=f"{jax.typeof(queries)}",
            fix="call it inside @op.kernel, where every device has its own block, or "
            "give the queries a layout",
        )
    mesh, spec = layout
    mesh.axis_tuple(axis)
    axes = axes_of_dims(spec, 4)
    if axes[1] != (axis,) or axes[3]:
        raise CollectiveError(
            f"mesh axis {axis!r} does not split the sequences of the queries alone",
            got=f"shape {queries.shape}, layout {spec}",
            fix=f"split dim 1 over {axis!r}, and leave dim 3 whole",
        )
    return mesh, spec


def _check_operands(q: Array, k: Array, v: Array, segments: Array | None) -> None:
    fits = q.ndim == k.ndim == 4 and k.shape == v.shape
    fits = fits and q.shape[:2] == k.shape[:2] and q.shape[3] == k.shape[3]
    if not fits or q.shape[2] % k.shape[2]:
        raise OperandError(
            "context_attention takes queries [B, S, H, K], and keys and values "
            "[B, S, G, K] whose G divides H",
            got=f"queries {q.shape}, keys {k.shape}, values {v.shape}",
            fix="give all three the same B, S and K",
        )
    if segments is not None and segments.shape != q.shape[:2]:
        raise OperandError(
            "context_attention takes one segment id for each token",
            got=f"segment_ids {segments.shape}, queries {q.shape}",
            fix=f"pass segment_ids of shape {q.shape[:2]}",
        )
    check_one_dtype("context_attention", q, k, v)
