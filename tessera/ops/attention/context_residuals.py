# SPDX-License-Identifier: Apache-2.0
"""What every form of attention over spread sequences keeps for its backward pass.

The forms keep arrays of the same shapes, so that a layer may choose between two of them
at run time without keeping what both would.
"""

from typing import NamedTuple, Protocol

from jax import Array


class Kept(NamedTuple):
    """Residuals. A form may fill the shapes with its own order of the numbers.

    Attributes:
      q: ``[B, S, H, K]``.
      k: ``[B, S, G, K]``.
      v: ``[B, S, G, K]``.
      log_total: f32 ``[B, S, H]``, the logarithm of each query's sum of weights.
    """

    q: Array
    k: Array
    v: Array
    log_total: Array


class Form(Protocol):
    """One way to attend over sequences that are spread over an axis."""

    def forward(
        self, q: Array, k: Array, v: Array, segments: Array | None, window: Array
    ) -> tuple[Array, Kept]:
        """What this device's queries read, per device.

        Args:
          q: ``[B, S, H, K]``, scaled; S are the tokens of this device.
          k: ``[B, S, G, K]``, G dividing H.
          v: ``[B, S, G, K]``.
          segments: int32 ``[B, n · S]``: of all tokens in the order of the devices.
          window: int32 scalar: how many tokens back a query sees, its own included.

        Returns:
          ``[B, S, H, K]``, and what :meth:`backward` is given.
        """
        ...

    def backward(
        self,
        kept: Kept,
        out: Array,
        gradient: Array,
        segments: Array | None,
        window: Array,
    ) -> tuple[Array, Array, Array]:
        """Gradients of ``q``, ``k`` and ``v``, from that of what was read."""
        ...
