# SPDX-License-Identifier: Apache-2.0
"""What a layer's queries read: from a whole sequence, or from one that is spread.

A layer reads everything before, or a window; which of both is a flag that is scanned
with its parameters. Where a mesh axis splits the sequence, ``tessera.ops.attention``
sends what has to be sent, and nobody makes a mask of the whole.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from tessera.mesh import manual_axes
from tessera.models.gemma3_config import Gemma3Config
from tessera.models.layers import HEADS, Read
from tessera.models.partition_rules import Placement
from tessera.ops.attention.context_variants import (
    NO_WINDOW,
    Plan,
    attend_in_region,
    wire_of,
)
from tessera.ops.attention.dispatch import Device
from tessera.ops.attention.flash import flash_attention
from tessera.ops.attention.zigzag import Spread
from tessera.ops.operand_layouts import region_mesh

# From whether a layer sees everything to how it reads.
LayerRead: TypeAlias = Callable[[Bool[Array, ""]], Read]


def layer_reads(
    config: Gemma3Config,
    length: int,
    segment_ids: Int[Array, "batch seq"] | None,
    place: Placement,
) -> LayerRead:
    """How the layers of a model read sequences of ``length`` tokens.

    Args:
      config: For the window.
      length: Tokens of a sequence, over all devices.
      segment_ids: A token reads those of its own segment, which is a run of equal ids;
        in the order of the devices.
      place: Where the model runs.

    Raises:
      ShardDivisibilityError: [T201] the devices of ``cp`` cannot share the sequence.
    """
    if place.arrangement is None:
        return _from_whole(config, length, segment_ids)
    return _from_spread(config, length, segment_ids, place)


def _from_whole(
    config: Gemma3Config, length: int, segment_ids: Int[Array, "batch seq"] | None
) -> LayerRead:
    def read(q_BSHK: Array, k_BTGK: Array, v_BTGK: Array, window: Any) -> Array:
        heads_first = (jnp.swapaxes(x, 1, 2) for x in (q_BSHK, k_BTGK, v_BTGK))
        out_BHSK = flash_attention(
            *heads_first,
            causal=True,
            scale=1.0,
            window=window,
            segment_ids=segment_ids,
        )
        return jnp.swapaxes(out_BHSK, 1, 2)

    def reads(sees_all: Bool[Array, ""]) -> Read:
        if config.window >= length:
            return partial(read, window=None)
        if _windows_may_come_late():
            return partial(read, window=jnp.where(sees_all, NO_WINDOW, config.window))
        ways = (partial(read, window=None), partial(read, window=config.window))
        return partial(lax.cond, sees_all, *ways)

    return reads


def _windows_may_come_late() -> bool:
    """Whether the attention of this device is as fast with a window it does not know.

    The kernels of GPUs are compiled for one window, and those of both kinds of layers
    stand side by side in the program.
    """
    return Device.here().platform != "cuda"


def _from_spread(
    config: Gemma3Config,
    length: int,
    segment_ids: Int[Array, "batch seq"] | None,
    place: Placement,
) -> LayerRead:
    arrangement, mesh = place.arrangement, place.mesh
    assert arrangement is not None
    assert mesh is not None
    (axis,) = place.axes("context")
    if segment_ids is not None:
        # Four bytes a token: every device knows those of all keys that come by.
        segment_ids = place.constrain(segment_ids, "batch", None)

    def read(q_BSHK: Any, k_BTGK: Any, v_BTGK: Any, sees_all: Any) -> Array:
        wire = wire_of(q_BSHK.dtype)
        # In a pipeline's stage, other devices may be elsewhere in the program.
        alone = bool(manual_axes())
        spread = Spread(axis, arrangement, wire=wire, alone=alone)
        plan = Plan.of(place.context_parallel, spread, length, config.window)
        layout = place.resolve(HEADS, q_BSHK.shape, "queries")
        operands = q_BSHK, k_BTGK, v_BTGK
        return attend_in_region(
            plan, region_mesh(mesh), layout, operands, segment_ids, sees_all
        )

    def reads(sees_all: Bool[Array, ""]) -> Read:
        return partial(read, sees_all=sees_all)

    return reads
