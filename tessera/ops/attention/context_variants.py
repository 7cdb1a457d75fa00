# SPDX-License-Identifier: Apache-2.0
"""Attention over spread sequences on one device, in the form that fits.

A layer that sees the whole sequence and one that sees a window send different things.
Which of them a layer is may be known only at run time, by a flag that is scanned with
its parameters: the choice is inside the differentiated function, so that one set of
residuals is kept and not one for each form.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from tessera import scope
from tessera.mesh import manual_axes
from tessera.ops.attention.all_to_all import AllToAll
from tessera.ops.attention.context_residuals import Form, Kept
from tessera.ops.attention.gather import Gather
from tessera.ops.attention.halo import Halo
from tessera.ops.attention.ring import Ring
from tessera.ops.attention.zigzag import Spread

Method: TypeAlias = Literal["ring", "all_to_all"]
METHODS: Final = ("ring", "all_to_all")
# Further than any two tokens of a sequence are apart.
NO_WINDOW: Final = int(np.iinfo(np.int32).max)


@dataclass(frozen=True)
class Plan:
    """How the layers of a model attend over spread sequences.

    Attributes:
      wide: What layers that see the whole sequence do.
      near: What layers with a window do; None where it is the same.
      window: Tokens that these see, their own included; None where no layer has one.
    """

    wide: Form
    near: Form | None = None
    window: int | None = None

    @classmethod
    def of(
        cls,
        method: Method,
        spread: Spread,
        length: int,
        window: int | None = None,
    ) -> "Plan":
        """The plan for sequences of ``length`` tokens over all devices.

        Raises:
          ShardDivisibilityError: [T201] the devices' chunks do not divide them.
        """
        ring = Gather if spread.alone else Ring
        wide = (AllToAll if method == "all_to_all" else ring)(spread)
        rows = spread.arrangement.chunk_length(length)
        if window is None or not spread.causal or window - 1 > rows:
            return cls(wide, None, window)
        return cls(wide, Halo(spread, window - 1), window)


def wire_of(dtype: Any) -> str | None:
    """The dtype that the matmuls of an open ``autocast`` round operands to, or None.

    What is rounded after the way may as well be rounded before.
    """
    narrow = scope.current_autocast()
    # Plain JAX takes no notice of autocast, and neither do its matmuls.
    narrows = scope.current() is not None and narrow in scope.AUTOCAST_DTYPES
    return narrow if narrows and dtype == jnp.float32 else None


def attend_spread(
    plan: Plan,
    q: Array,
    k: Array,
    v: Array,
    segments: Array | None = None,
    sees_all: Array | None = None,
) -> Array:
    """What the queries of this device read, in a manual region.

    Args:
      plan: The ways there are.
      q: ``[B, S, H, K]``, scaled; S are the tokens of this device.
      k: ``[B, S, G, K]``, G dividing H.
      v: ``[B, S, G, K]``.
      segments: int32 ``[B, n · S]``, of all tokens in the order of the devices; a token
        sees those of its own segment.
      sees_all: bool scalar, the same on every device: whether this layer has no
        window. None where all layers are alike.

    Returns:
      ``[B, S, H, K]`` in the dtype of ``q``.
    """
    return _attend(plan, q, k, v, segments, sees_all)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    plan: Plan,
    q: Array,
    k: Array,
    v: Array,
    segments: Array | None,
    sees_all: Array | None,
) -> Array:
    return _forward(plan, q, k, v, segments, sees_all)[0]


def _forward(
    plan: Plan,
    q: Array,
    k: Array,
    v: Array,
    segments: Array | None,
    sees_all: Array | None,
) -> Any:
    out, kept = _chosen(plan, "forward", (q, k, v, segments), sees_all)
    return out, (out, kept, segments, sees_all)


def _backward(
    plan: Plan,
    residuals: tuple[Array, Kept, Array | None, Array | None],
    gradient: Array,
) -> Any:
    out, kept, segments, sees_all = residuals
    operands = kept, out, gradient, segments
    return *_chosen(plan, "backward", operands, sees_all), None, None


_attend.defvjp(_forward, _backward)


def _chosen(
    plan: Plan, name: str, operands: Sequence[Any], sees_all: Array | None
) -> Any:
    """The forward or backward pass of the form that this layer takes."""

    def run(form: Form, window: Any) -> Any:
        return getattr(form, name)(*operands, jnp.int32(window))

    window = NO_WINDOW if plan.window is None else plan.window
    if sees_all is None:
        return run(plan.near or plan.wide, window)
    if plan.near is None:
        return run(plan.wide, jnp.where(sees_all, NO_WINDOW, window))
    # Devices agree on the flag, so that all of them come to the same collectives.
    near = plan.near
    return lax.cond(
        sees_all, lambda: run(plan.wide, NO_WINDOW), lambda: run(near, window)
    )


def attend_in_region(
    plan: Plan,
    mesh: Any,
    spec: PartitionSpec,
    operands: tuple[Array, Array, Array],
    segments: Array | None = None,
    sees_all: Array | None = None,
) -> Array:
    """:func:`attend_spread` of global arrays, in a region manual over every axis.

    Args:
      plan: The ways there are.
      mesh: A JAX mesh; inside a region that is manual over some axes, the mesh there
        is taken, and ``spec`` speaks of the others.
      spec: Layout of queries, keys, values and of what is read.
      operands: Queries, keys and values, ``[B, S, heads, K]``.
      segments: int32 ``[B, S]``, or None.
      sees_all: bool scalar, or None.
    """
    manual = manual_axes()
    home = jax.sharding.get_abstract_mesh() if manual else mesh
    # A part of the arguments may be None, which has no leaves and needs no spec.
    specs = (spec, spec, spec, PartitionSpec(spec[0]), PartitionSpec())

    def body(*blocks: Any) -> Array:
        return attend_spread(plan, *blocks)

    return jax.shard_map(
        body,
        mesh=home,
        in_specs=specs,
        out_specs=spec,
        axis_names=set(home.axis_names) - set(manual),
        check_vma=False,
    )(*operands, segments, sees_all)
