# SPDX-License-Identifier: Apache-2.0
"""A layer of experts on explicit weights, which ``op.moe`` and the models share.

On a mesh it is one SPMD region over every axis. Tokens are split over the axes of the
batch, among them those of the experts, which split data outside of this layer. Each
device routes its own tokens and sends them to the devices of their experts.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AbstractMesh
from jax.sharding import Mesh as JaxMesh
from jax.sharding import PartitionSpec as P

from tessera.jax_compat.traces import manual_axes
from tessera.ops.moe.dropless import dropless
from tessera.ops.moe.experts import Weights, sum_of_results
from tessera.ops.moe.routing import (
    RouterStatistics,
    RoutingOptions,
    route,
    statistics,
)
from tessera.ops.operand_layouts import map_free_axes
from tessera.ops.wide_gradients import with_wide_gradient

Axes = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ExpertLayout:
    """The mesh axes that split each dim; tuples are outer first, empty ones split none.

    Attributes:
      mesh: The mesh of the layer; None leaves all of it to XLA.
      batch: Axes of the batch, which include ``experts``.
      sequence: Axes of the sequence.
      experts: Axes of the experts; over two axes every exchange takes two hops.
      hidden: Axes of the experts' hidden dim.
      embed: Axes of the weights' model dim, over which the layer gathers them.
    """

    mesh: JaxMesh | AbstractMesh | None = None
    batch: Axes = ()
    sequence: Axes = ()
    experts: Axes = ()
    hidden: Axes = ()
    embed: Axes = ()

    @property
    def axes(self) -> frozenset[str]:
        """All axes of the layout."""
        split = (self.batch, self.sequence, self.experts, self.hidden, self.embed)
        return frozenset(axis for axes in split for axis in axes)

    @property
    def tokens(self) -> P:
        """The layout of ``[B, S, D]`` activations."""
        return P(self.batch or None, self.sequence or None)

    @property
    def weights(self) -> Weights:
        """The layout of each weight, as a PartitionSpec."""
        experts, embed, hidden = (
            axes or None for axes in (self.experts, self.embed, self.hidden)
        )
        columns = P(experts, embed, hidden)
        down, bias = P(experts, hidden, embed), P(experts, hidden)
        biases = P(), bias, bias, P(experts)
        return Weights(P(), columns, columns, down, *biases)


def expert_layer(
    x_BSD: Array,
    weights: Weights,
    options: RoutingOptions,
    layout: ExpertLayout,
) -> tuple[Array, RouterStatistics]:
    """Send each token through the experts that its router chooses.

    It may be called in an SPMD region over axes that split nothing here, such as those
    of a pipeline, and uses the other axes.

    Args:
      x_BSD: Global ``[B, S, D]``; per device B and S divided by their axes.
      weights: Global. The matrices of experts are cast to the dtype of ``x`` before
        they are gathered, and their gradients are added up over devices in their own.
      options: For the router.
      layout: How all of these are sharded. The axes must divide the dims.

    Returns:
      ``[B, S, D]`` in the dtype and the layout of ``x``, and the statistics of all
      tokens of all devices, replicated.
    """
    if layout.mesh is None:
        return _on_device(x_BSD, weights, options, ExpertLayout())
    manual = set(manual_axes())
    assert not manual & layout.axes, f"{manual} are manual already: {layout}"
    region = map_free_axes(
        partial(_on_device, options=options, layout=layout),
        layout.mesh,
        (layout.tokens, layout.weights),
        (layout.tokens, P()),
    )
    return region(x_BSD, weights)


def _on_device(
    x_BSD: Array, weights: Weights, options: RoutingOptions, layout: ExpertLayout
) -> tuple[Array, RouterStatistics]:
    """The layer on one device: its tokens, its experts."""
    weights = _gathered(weights, layout.embed, x_BSD.dtype)
    if layout.hidden and weights.down_bias is not None:
        # Once, and not by each device of the sum.
        is_first = lax.axis_index(layout.hidden) == 0
        once = jnp.where(is_first, weights.down_bias, 0)
        weights = weights._replace(down_bias=once)
    routes = route(x_BSD, weights.router, options, weights.router_bias)
    x_TD, flat = jax.tree.map(_merge_sequences, (x_BSD, routes))
    out = dropless(x_TD, flat, weights, options, layout.experts).reshape(x_BSD.shape)
    if layout.hidden:
        # At the end, where it is [B, S, D] and not one row per assignment.
        out = sum_of_results(out, layout.hidden)
    return out, statistics(routes, (*layout.batch, *layout.sequence))


def _merge_sequences(array: Array) -> Array:
    return array.reshape(-1, array.shape[-1])


def _gathered(weights: Weights, axes: Axes, dtype: Any) -> Weights:
    """All-gather the weights of these experts; reduce-scatter their gradients."""

    def gathered(weight: Array, dim: int) -> Array:
        gather = partial(_gather, axes, dim)
        if weight.dtype == dtype:
            return gather(weight)
        return with_wide_gradient(partial(gather, dtype=dtype), gather, weight)

    return weights._replace(
        gate=gathered(weights.gate, 1),
        up=gathered(weights.up, 1),
        down=gathered(weights.down, 2),
    )


def _gather(axes: Axes, dim: int, weight: Array, dtype: Any = None) -> Array:
    if dtype is not None:
        weight = weight.astype(dtype)
    return lax.all_gather(weight, axes, axis=dim, tiled=True) if axes else weight
