# SPDX-License-Identifier: Apache-2.0
"""Dropless experts: every assignment is computed, however popular an expert is.

An assignment is one choice of one token; those of token t are t·K … t·K + K − 1.
Assignments are sorted by expert, and so by device, since each device holds consecutive
experts.

Shapes are static and popularity is not, so devices exchange a fixed number of rows in
each of several rounds. The first round is enough for a fairly balanced router; the
rounds for the worst case, all tokens to one device, are skipped at run time unless some
device of the group has rows left. Buffers therefore have the size of one round, also in
the backward pass, which recomputes the later rounds.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from tessera.ops.moe.blocks import in_blocks
from tessera.ops.moe.experts import (
    Weights,
    all_to_all,
    batched,
    grouped,
)
from tessera.ops.moe.routing import Routes, RoutingOptions
from tessera.tracing import scope


def dropless(
    x_TD: Array,
    routes: Routes,
    weights: Weights,
    options: RoutingOptions,
    axes: tuple[str, ...],
) -> Array:
    """The weighted sum of each token's experts: ``[T, D]`` to ``[T, D]``.

    Args:
      x_TD: This device's tokens.
      routes: Of these tokens, ``[T, K]`` and ``[T, E]``.
      weights: Of this device's experts.
      options: For the size of a round, and the activation.
      axes: The axes that the experts are split over.
    """
    share = x_TD.shape[0] * options.top_k // weights.gate.shape[0]
    experts = _Experts(weights, options.activation, share)
    if not axes:
        return _without_exchange(x_TD, routes, experts)
    devices, local = lax.axis_size(axes), experts.number
    rows, rounds = round_sizes(x_TD.shape[0], devices, local, options)
    order_A = jnp.argsort(routes.experts.reshape(-1), stable=True)
    device_A = routes.experts.reshape(-1) // local
    count_P = jnp.bincount(device_A, length=devices)
    plan = _Destinations(
        expert_A=routes.experts.reshape(-1),
        order_A=order_A,
        rank_A=_inverse(order_A),
        device_A=device_A,
        count_P=count_P,
        start_P=jnp.cumsum(count_P) - count_P,
    )

    def one_round(number: Array, experts: _Experts) -> Array:
        return _round(x_TD, routes.weights, experts, plan, rows, number, axes)

    out_TD = one_round(jnp.int32(0), experts)
    if rounds == 1:
        return out_TD.astype(x_TD.dtype)
    # The devices of a group must agree on the number of rounds.
    most = lax.pmax(count_P.max(), axes)

    rest = experts._replace(share=0)  # no expert is known to have rows

    @jax.checkpoint
    def further(out_TD: Array, number: Array) -> tuple[Array, None]:
        needed = most > number * rows
        return lax.cond(
            needed, lambda: out_TD + one_round(number, rest), lambda: out_TD
        ), None

    numbers = jnp.arange(1, rounds, dtype=jnp.int32)
    return lax.scan(further, out_TD, numbers)[0].astype(x_TD.dtype)


def round_sizes(
    tokens: int, devices: int, local: int, options: RoutingOptions
) -> tuple[int, int]:
    """Rows that a device sends to each device in a round, and the most rounds.

    The choices of a token differ, so at most min(K, local) of them go to one device.

    Args:
      tokens: Of one device.
      devices: Along the experts' axes.
      local: Experts of one device.
      options: For ``top_k`` and ``buffer_factor``.

    Example:
      >>> round_sizes(64, 8, 1, RoutingOptions(top_k=2))
      (32, 2)
    """
    most = tokens * min(options.top_k, local)
    even = tokens * options.top_k / devices
    rows = min(most, math.ceil(options.buffer_factor * even))
    return rows, -(-most // rows)


class _Experts(NamedTuple):
    """This device's experts.

    Attributes:
      weights: Theirs.
      activation: Of their gates.
      share: The rows of each that a round has if all are equally popular.
    """

    weights: Weights
    activation: str
    share: int

    @property
    def number(self) -> int:
        """How many."""
        return self.weights.gate.shape[0]

    def __call__(self, rows_RD: Array, expert_R: Array) -> Array:
        """Each row through its own expert; rows of expert E are empty slots."""
        order_R = jnp.argsort(expert_R, stable=True)
        counts = jnp.bincount(expert_R, length=self.number + 1)[: self.number]
        sizes_E = counts.astype(jnp.int32)
        if scope.device().platform == "gpu":
            of_rows = partial(batched, activation=self.activation)
            weights = self.weights._replace(router=None, router_bias=None)
            return in_blocks(of_rows, self.share, rows_RD, order_R, sizes_E, weights)
        sorted_RD = _permuted(rows_RD, order_R)
        out_RD = grouped(sorted_RD, sizes_E, self.weights, self.activation)
        return _permuted(out_RD, _inverse(order_R))


class _Destinations(NamedTuple):
    """The destinations of this device's assignments.

    Attributes:
      expert_A: The expert of each.
      order_A: All assignments, sorted by expert.
      rank_A: The index of each in that order.
      device_A: The device of its expert.
      count_P: How many go to each device.
      start_P: The index of the first of them in ``order_A``.
    """

    expert_A: Array
    order_A: Array
    rank_A: Array
    device_A: Array
    count_P: Array
    start_P: Array


def _round(
    x_TD: Array,
    weight_TK: Array,
    experts: _Experts,
    plan: _Destinations,
    rows: int,
    number: Array,
    axes: tuple[str, ...],
) -> Array:
    """What the assignments of one round add to each token, f32 ``[T, D]``."""
    empty, choices = plan.expert_A.size, weight_TK.shape[1]
    devices, local = plan.count_P.size, experts.number
    first = number * rows
    nth_C = first + jnp.arange(rows, dtype=jnp.int32)
    rank_PC = plan.start_P[:, None] + nth_C
    assignment_PC = jnp.where(
        nth_C < plan.count_P[:, None],
        plan.order_A.at[rank_PC].get(mode="clip"),
        empty,
    )
    expert_PC = plan.expert_A.at[assignment_PC].get(
        mode="fill", fill_value=devices * local
    )
    # Empty slots have the index after the last local expert.
    own_PC = jnp.minimum(
        expert_PC - local * jnp.arange(devices, dtype=jnp.int32)[:, None], local
    )
    sent_PCD = x_TD.at[assignment_PC // choices].get(mode="fill", fill_value=0)
    with jax.named_scope("dispatch"):
        own_PC = all_to_all(own_PC, axes)
        received_PCD = all_to_all(sent_PCD, axes)
    out_RD = experts(received_PCD.reshape(-1, x_TD.shape[1]), own_PC.reshape(-1))
    with jax.named_scope("combine"):
        returned_PCD = all_to_all(
            out_RD.reshape(received_PCD.shape), axes, reverse=True
        )
    nth_A = plan.rank_A - plan.start_P[plan.device_A] - first
    slot_A = jnp.where(
        (nth_A >= 0) & (nth_A < rows), plan.device_A * rows + nth_A, devices * rows
    )
    out_AD = (
        returned_PCD.reshape(-1, x_TD.shape[1])
        .at[slot_A]
        .get(mode="fill", fill_value=0)
    )
    return _weighted(out_AD, weight_TK)


def _without_exchange(x_TD: Array, routes: Routes, experts: _Experts) -> Array:
    """The layer on a device that has all experts."""
    choices = routes.experts.shape[1]
    rows_AD = jnp.repeat(x_TD, choices, axis=0)
    out_AD = experts(rows_AD, routes.experts.reshape(-1))
    return _weighted(out_AD, routes.weights).astype(x_TD.dtype)


def _weighted(out_AD: Array, weight_TK: Array) -> Array:
    """The weighted sum over each token's choices, in f32."""
    out_TKD = out_AD.reshape(*weight_TK.shape, -1).astype(jnp.float32)
    return (weight_TK[..., None] * out_TKD).sum(axis=1)


def _permuted(rows_RD: Array, order_R: Array) -> Array:
    return rows_RD.at[order_R].get(unique_indices=True, mode="promise_in_bounds")


def _inverse(order: Array) -> Array:
    """The inverse of a permutation."""
    indices = jnp.arange(order.size, dtype=order.dtype)
    return jnp.zeros_like(order).at[order].set(indices, unique_indices=True)
