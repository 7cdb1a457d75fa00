# SPDX-License-Identifier: Apache-2.0
"""Context-parallel attention in an SPMD region: choice of the variant, and gradient.

Layers with global attention and layers with a window communicate differently. Which
kind a layer is may be known only at run time, by a flag that is scanned with its
parameters: the choice is inside the differentiated function, so that one set of
residuals is saved and not one for each variant.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from tessera.ops.attention.context_parallel_residuals import KeyExchange, Residuals
from tessera.ops.attention.halo import Gather, Halo
from tessera.ops.attention.ring import Ring
from tessera.ops.attention.zigzag import ContextSharding
from tessera.ops.operand_layouts import map_free_axes
from tessera.ops.rematerialization import ATTENTION_RESIDUALS
from tessera.tracing import casts, scope

# More than the distance of any two tokens of a sequence.
NO_WINDOW: Final = int(np.iinfo(np.int32).max)


@dataclass(frozen=True)
class LayerVariants:
    """The variants of context-parallel attention that the layers of a model use.

    Attributes:
      unwindowed: For layers that attend to the whole sequence.
      windowed: For layers with a window; None where it is the same.
      window: How many positions back these attend, including a query's own; None where
        no layer has a window.
    """

    unwindowed: KeyExchange
    windowed: KeyExchange | None = None
    window: int | None = None

    @classmethod
    def of(
        cls, sharding: ContextSharding, length: int, window: int | None = None
    ) -> "LayerVariants":
        """The variants for sequences of ``length`` tokens over all devices.

        Raises:
          ShardDivisibilityError: [T201] the devices' chunks do not divide them.
        """
        unwindowed = (Gather if sharding.divergent else Ring)(sharding)
        rows = sharding.arrangement.chunk_length(length)
        if window is None or not sharding.causal or window - 1 > rows:
            return cls(unwindowed, None, window)
        return cls(unwindowed, Halo(sharding, window - 1), window)


def wire_of(dtype: Any) -> str | None:
    """The dtype that the matmuls of an open ``autocast`` round operands to, or None.

    Operands that are rounded after they are received may be rounded before.
    """
    narrow = casts.current_autocast()
    # Plain JAX takes no notice of autocast, and neither do its matmuls.
    is_cast = scope.current() is not None and narrow in casts.AUTOCAST_DTYPES
    return narrow if is_cast and dtype == jnp.float32 else None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_on_device(
    variants: LayerVariants,
    q: Array,
    k: Array,
    v: Array,
    segments: Array | None = None,
    sees_all: Array | None = None,
) -> Array:
    """The output of this device's queries, in an SPMD region.

    Args:
      variants: The variants.
      q: ``[B, S, H, K]``, scaled; S are the tokens of this device.
      k: ``[B, S, G, K]``, G dividing H.
      v: ``[B, S, G, K]``.
      segments: int32 ``[B, n · S]``, of all tokens in the order of the devices; a token
        attends to those of its own segment.
      sees_all: bool scalar, the same on every device: whether this layer has no window.
        None where all layers are alike.

    Returns:
      ``[B, S, H, K]`` in the dtype of ``q``.
    """
    return _forward(variants, q, k, v, segments, sees_all)[0]


def _forward(variants: LayerVariants, *operands: Any) -> Any:
    *_, segments, sees_all = operands
    out, residuals = _run(variants, "forward", operands[:-1], sees_all)
    out = checkpoint_name(out, ATTENTION_RESIDUALS)
    lse = checkpoint_name(residuals.lse, ATTENTION_RESIDUALS)
    return out, (out, residuals._replace(lse=lse), segments, sees_all)


def _backward(
    variants: LayerVariants,
    residuals: tuple[Array, Residuals, Array | None, Array | None],
    dout: Array,
) -> Any:
    out, saved, segments, sees_all = residuals
    gradients = _run(variants, "backward", (saved, out, dout, segments), sees_all)
    return *gradients, None, None


attend_on_device.defvjp(_forward, _backward)


def _run(
    variants: LayerVariants, name: str, operands: Sequence[Any], sees_all: Array | None
) -> Any:
    """The forward or backward pass of the variant for this layer."""

    def run(variant: KeyExchange, window: Any) -> Any:
        return getattr(variant, name)(*operands, jnp.int32(window))

    window = NO_WINDOW if variants.window is None else variants.window
    if sees_all is None:
        return run(variants.windowed or variants.unwindowed, window)
    if variants.windowed is None:
        return run(variants.unwindowed, jnp.where(sees_all, NO_WINDOW, window))
    # Devices agree on the flag, so that all of them run the same collectives.
    windowed = variants.windowed
    return lax.cond(
        sees_all,
        lambda: run(variants.unwindowed, NO_WINDOW),
        lambda: run(windowed, window),
    )


def attend_in_region(
    variants: LayerVariants,
    mesh: Any,
    spec: PartitionSpec,
    operands: tuple[Array, Array, Array],
    segments: Array | None = None,
    sees_all: Array | None = None,
) -> Array:
    """:func:`attend_on_device` of global arrays, in an SPMD region over every axis.

    Args:
      variants: The variants.
      mesh: A JAX mesh; inside an SPMD region over some axes, the mesh of that region is
        used, and ``spec`` names the other axes.
      spec: Layout of queries, keys, values and of the output.
      operands: Queries, keys and values, ``[B, S, heads, K]``.
      segments: int32 ``[B, S]``, or None.
      sees_all: bool scalar, or None.
    """
    # Arguments that are None have no leaves, so their spec is not used.
    specs = (spec, spec, spec, PartitionSpec(spec[0]), PartitionSpec())

    def body(*blocks: Any) -> Array:
        return attend_on_device(variants, *blocks)

    return map_free_axes(body, mesh, specs, spec)(*operands, segments, sees_all)
