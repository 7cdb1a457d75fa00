# SPDX-License-Identifier: Apache-2.0
"""Selects the attention of a layer: global or windowed, whole or sharded sequences.

A layer attends to the whole sequence before a token, or to a window of it. Which of the
two is a traced flag that is scanned with the layer's parameters. If a mesh axis shards
the sequence, ``tessera.ops.attention`` communicates keys and values; no device builds a
mask of the whole sequence.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int

from tessera.jax_compat.traces import manual_axes
from tessera.mesh import Mesh
from tessera.ops.attention.all_to_all import attend_by_heads
from tessera.ops.attention.context_parallel_variants import (
    NO_WINDOW,
    LayerVariants,
    attend_in_region,
    wire_of,
)
from tessera.ops.attention.dispatch import Device
from tessera.ops.attention.flash import flash_attention
from tessera.ops.attention.zigzag import ContextSharding
from tessera.ops.operand_layouts import map_free_axes, region_mesh
from tessera.train.models.decoder.config import DecoderConfig
from tessera.train.models.decoder.layers import HEADS, Attend
from tessera.train.models.partition_rules import Method, Placement

# From whether a layer is global to its attention.
LayerAttention: TypeAlias = Callable[[Bool[Array, ""]], Attend]


def layer_attention(
    config: DecoderConfig,
    length: int,
    segment_ids: Int[Array, "batch seq"] | None,
    place: Placement,
) -> LayerAttention:
    """The attention of a model's layers for sequences of ``length`` tokens.

    Args:
      config: The model's sizes, for the window and the soft cap.
      length: Tokens of a sequence, over all devices.
      segment_ids: A token attends to its own segment, a run of equal ids; in the order
        in which devices hold the sequence.
      place: The mesh and layout of the model.

    Raises:
      ShardDivisibilityError: [T201] the devices of ``cp`` cannot share the sequence.
    """
    if place.arrangement is None or place.context_parallel == "all_to_all":
        return _whole_attention(config, length, segment_ids, place)
    return _sharded_attention(config, length, segment_ids, place)


def _whole_attention(
    config: DecoderConfig,
    length: int,
    segment_ids: Int[Array, "batch seq"] | None,
    place: Placement,
) -> LayerAttention:
    axes = () if place.arrangement is None else place.axes("context")
    if axes and segment_ids is not None:
        # Four bytes a token: every device needs those of whole sequences.
        segment_ids = place.constrain(segment_ids, "batch", None)

    def attend(
        q_BSHK: Array, k_BTGK: Array, v_BTGK: Array, *sinks_H: Array, window: Any
    ) -> Array:
        is_traced = isinstance(window, jax.Array)  # then a region takes it as well
        fixed, traced = (None, window) if is_traced else (window, None)

        def on_device(
            q: Array, k: Array, v: Array, segment_ids: Any, traced: Any, *sinks: Array
        ) -> Array:
            def of_heads(*operands: Array) -> Array:
                out_BHSK = flash_attention(
                    *(jnp.swapaxes(x, 1, 2) for x in operands),
                    causal=True,
                    scale=1.0,
                    window=fixed if traced is None else traced,
                    soft_cap=config.attention_soft_cap,
                    segment_ids=segment_ids,
                    sinks=sinks[0] if sinks else None,
                )
                return jnp.swapaxes(out_BHSK, 1, 2)

            if axes:
                return attend_by_heads(of_heads, axes[0], q, k, v)
            return of_heads(q, k, v)

        operands = q_BSHK, k_BTGK, v_BTGK, segment_ids, traced, *sinks_H
        if not (axes or _runs_per_device(place)):
            return place.constrain(on_device(*operands), *HEADS)
        layout = place.resolve(HEADS, q_BSHK.shape, "queries")
        rows, heads = PartitionSpec(*layout[:1]), PartitionSpec(*layout[2:3])
        specs = layout, layout, layout, rows, PartitionSpec(), *(heads for _ in sinks_H)
        assert place.mesh is not None
        region = region_mesh(place.mesh)
        return map_free_axes(on_device, region, specs, layout)(*operands)

    def select(is_global: Bool[Array, ""]) -> Attend:
        if config.window is None or config.window >= length:
            return partial(attend, window=None)
        if "global" not in config.layer_kinds:
            return partial(attend, window=config.window)
        if _supports_traced_windows():
            window = jnp.where(is_global, NO_WINDOW, config.window)
            return partial(attend, window=window)
        branches = (partial(attend, window=None), partial(attend, window=config.window))
        return partial(lax.cond, is_global, *branches)

    return select


def _supports_traced_windows() -> bool:
    """Whether attention on this device is as fast with a window that is traced.

    The kernels of GPUs and TPUs are compiled for one window, so the program has one for
    each kind of layer.
    """
    return Device.here().platform not in ("cuda", "tpu")


def _runs_per_device(place: Placement) -> bool:
    """Whether attention runs in an SPMD region: XLA cannot split all kernels.

    It can split cuDNN's, but not where it has only some axes, as in a pipeline's stage.
    """
    mesh = place.mesh
    if mesh is None or mesh.size == 1 or mesh.explicit_axes:
        return False
    return not _supports_traced_windows()


def _sharded_attention(
    config: DecoderConfig,
    length: int,
    segment_ids: Int[Array, "batch seq"] | None,
    place: Placement,
) -> LayerAttention:
    arrangement, mesh = place.arrangement, place.mesh
    assert arrangement is not None
    assert mesh is not None
    (axis,) = place.axes("context")
    if segment_ids is not None:
        # Four bytes a token: every device needs those of all keys it receives.
        segment_ids = place.constrain(segment_ids, "batch", None)

    def attend(q_BSHK: Any, k_BTGK: Any, v_BTGK: Any, is_global: Any) -> Array:
        wire = wire_of(q_BSHK.dtype)
        # In a pipeline's stage, other devices may be elsewhere in the program.
        divergent = bool(manual_axes())
        sharding = ContextSharding(
            axis,
            arrangement,
            wire=wire,
            divergent=divergent,
            soft_cap=config.attention_soft_cap,
        )
        plan = LayerVariants.of(sharding, length, config.window)
        layout = place.resolve(HEADS, q_BSHK.shape, "queries")
        operands = q_BSHK, k_BTGK, v_BTGK
        return attend_in_region(
            plan, region_mesh(mesh), layout, operands, segment_ids, is_global
        )

    def select(is_global: Bool[Array, ""]) -> Attend:
        return partial(attend, is_global=is_global)

    return select


def context_note(window: int | None, method: Method, mesh: Mesh) -> str:
    """How sequences are sharded over ``cp``, for the summary of a run."""
    cp = mesh.shape["cp"]
    how = {
        "ring": f"in zigzag order; its {cp} devices pass keys and values around a ring",
        "all_to_all": f"and exchanged for heads among its {cp} devices",
    }[method]
    if method == "ring" and mesh.shape.get("pp", 1) > 1:
        how = f"in zigzag order; stages gather the keys and values of its {cp} devices"
    note = f"sequences are sharded over 'cp' {how}"
    if window is not None and method == "ring":
        note += f"; local layers exchange only a halo of {window - 1} tokens, if "
        note += "chunks are that long"
    return note
