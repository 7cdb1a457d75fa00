# SPDX-License-Identifier: Apache-2.0
"""The top-k router, its auxiliary losses and its statistics.

A router scores every expert for every token; a token goes to the ``top_k`` experts with
the highest scores, each weighted by its probability. Two auxiliary losses keep the
router from sending all tokens to few experts, and its scores from growing; the other
statistics show whether they succeed.

Shape suffixes of this package: B batch, S sequence, T tokens (B · S of this device), D
features, E experts, K choices of a token, A assignments (T · K), P devices along the
experts' axes, C rows of a buffer, F hidden.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tessera.tracing import casts


@dataclass(frozen=True, kw_only=True)
class RoutingOptions:
    """Options of a router.

    Attributes:
      top_k: Experts of a token.
      renormalize: Whether the weights of a token's experts add up to 1, or are their
        probabilities among all experts as in Switch, where top_k is 1.
      buffer_factor: Of a dropless exchange: rows that a device sends to another in one
        round, relative to what it sends if all experts are equally popular. The rest is
        sent in further rounds; nothing is dropped.
      activation: Of the experts' gates, of ``ops.activations.GATES``.
    """

    top_k: int
    renormalize: bool = True
    buffer_factor: float = 2.0
    activation: str = "gelu_tanh"


class Routes(NamedTuple):
    """The experts of some tokens.

    Attributes:
      experts: int32 ``[..., K]``, by descending score; equal scores by index.
      weights: f32 ``[..., K]``.
      logits: f32 ``[..., E]``.
      probabilities: f32 ``[..., E]``.
    """

    experts: Array
    weights: Array
    logits: Array
    probabilities: Array


def route(
    x: Array, router_DE: Array, options: RoutingOptions, bias_E: Array | None = None
) -> Routes:
    """Score the experts for every token and choose the best, in f32.

    Args:
      x: ``[..., D]``.
      router_DE: ``[D, E]``.
      options: For ``top_k`` and ``renormalize``.
      bias_E: Added to the scores, ``[E]``.
    """
    with jax.named_scope("router"), casts.autocast("f32"):
        wide = x.astype(jnp.float32)
        logits = jnp.matmul(wide, router_DE.astype(jnp.float32))
        if bias_E is not None:
            logits = logits + bias_E.astype(jnp.float32)
        probabilities = jax.nn.softmax(logits, axis=-1)
        weights, experts = jax.lax.top_k(probabilities, options.top_k)
        if options.renormalize:
            weights = weights / weights.sum(axis=-1, keepdims=True)
    return Routes(experts, weights, logits, probabilities)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RouterStatistics:
    """Statistics of a router, over all tokens of all devices.

    Attributes:
      load_balancing_loss: f32 scalar: E · Σ f · P over experts, of the share f of
        choices and the mean probability P. 1 where all experts are equally popular.
        Differentiable through P (Switch, arXiv 2101.03961, equation 4).
      z_loss: f32 scalar, the mean square of ``logsumexp(logits)`` (ST-MoE, arXiv
        2202.08906, equation 5). Differentiable.
      entropy: f32 scalar, mean entropy of a token's probabilities, in nats.
      tokens_per_expert: f32 ``[E]``, assignments per expert.
    """

    load_balancing_loss: Array
    z_loss: Array
    entropy: Array
    tokens_per_expert: Array


def statistics(routes: Routes, axes: tuple[str, ...]) -> RouterStatistics:
    """The statistics of all devices along the axes that split the tokens.

    Args:
      routes: Of this device's tokens.
      axes: Mesh axes of the SPMD region that this is called in; empty outside of one.
    """
    num_experts = routes.logits.shape[-1]
    counts = jnp.bincount(routes.experts.reshape(-1), length=num_experts)
    z = jax.nn.logsumexp(routes.logits, axis=-1)
    logs = jax.nn.log_softmax(routes.logits, axis=-1)
    sums = (
        counts.astype(jnp.float32),
        routes.probabilities.reshape(-1, num_experts).sum(axis=0),
        jnp.square(z).sum()[None],
        -(routes.probabilities * logs).sum()[None],
    )
    # Means over all tokens, not means of the devices' losses: the loss of a batch must
    # not depend on the number of devices. One small all-reduce for everything.
    total = jnp.concatenate(sums)
    if axes:
        total = jax.lax.psum(total, axes)
    counts, probability, rest = jnp.split(total, [num_experts, 2 * num_experts])
    tokens = z.size * jax.lax.psum(1, axes) if axes else z.size
    choices = tokens * routes.experts.shape[-1]
    shares = jax.lax.stop_gradient(counts / choices)
    return RouterStatistics(
        load_balancing_loss=num_experts * jnp.vdot(shares, probability / tokens),
        z_loss=rest[0] / tokens,
        entropy=rest[1] / tokens,
        tokens_per_expert=counts,
    )
