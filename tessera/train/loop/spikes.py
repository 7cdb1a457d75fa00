# SPDX-License-Identifier: Apache-2.0
"""Finds spikes of the loss and of the gradient norm, in the step itself.

A number is compared with those of the last steps that were accepted by its robust
z-score: its distance above their median, in units of 1.4826 times their median absolute
deviation, which for normal noise is the standard deviation. A few outliers among them
move neither of the two.

The window is part of the training state. All devices hold the same one and decide alike
before the update is applied, without a collective; and a resumed run decides as one
that was never stopped, whenever the host reads the metrics.

Source: Iglewicz and Hoaglin, How to Detect and Handle Outliers, 1993. Chowdhery et al.,
PaLM, arXiv 2204.02311, section 5.1, go back and skip data at spikes.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_NORMAL = 1.4826
# The least deviation, as a share of the median: losses that hardly differ have none.
_LEAST_SHARE = 0.01
# And where the median is nothing too.
_LEAST = 1e-6


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["losses", "norms", "count"],
    meta_fields=[],
)
@dataclass(frozen=True)
class SpikeWindow:
    """Numbers of the last accepted steps, as ring buffers.

    Attributes:
      losses: f32 ``[window]``.
      norms: Gradient norms before clipping, f32 ``[window]``.
      count: Steps accepted so far, int32; the next one's index is modulo the window.
    """

    losses: Float[Array, " window"]
    norms: Float[Array, " window"]
    count: Int[Array, ""]


@dataclass(frozen=True)
class SpikeGuard:
    """What a run does about spikes.

    Attributes:
      action: ``warn`` or ``skip``, as ``training.on_spike``.
      threshold: The z-score from which a number is a spike.
      window: How many accepted steps it is compared with.
    """

    action: str
    threshold: float
    window: int

    @property
    def abstract_window(self) -> SpikeWindow:
        """Shapes and dtypes of the window."""
        return jax.eval_shape(self.empty_window)

    def judge(
        self,
        window: SpikeWindow,
        loss: Float[Array, ""],
        norm: Float[Array, ""],
        finite: Bool[Array, ""],
    ) -> tuple[Bool[Array, ""], SpikeWindow, dict[str, Float[Array, ""]]]:
        """Decide on a step by its numbers, which are the same on every device.

        Args:
          window: Of the steps before.
          loss: Of this step.
          norm: Of its gradients.
          finite: Whether both are finite; a step that is not is no spike.

        Returns:
          Whether the step is applied, the window after it, and its metrics: ``loss_z``
          and ``grad_norm_z``, NaN as long as the window is not full, and ``spike``.
        """
        is_full = window.count >= self.window
        loss_z, norm_z = (
            jnp.where(is_full, robust_z_score(values, value), jnp.nan)
            for values, value in ((window.losses, loss), (window.norms, norm))
        )
        is_above = (loss_z > self.threshold) | (norm_z > self.threshold)
        spike = finite & is_above
        accepted = finite & ~spike if self.action == "skip" else finite
        at = window.count % self.window
        after = SpikeWindow(
            window.losses.at[at].set(loss),
            window.norms.at[at].set(norm),
            window.count + 1,
        )
        after = jax.tree.map(partial(jnp.where, accepted), after, window)
        numbers = {
            "loss_z": loss_z,
            "grad_norm_z": norm_z,
            "spike": spike.astype(jnp.float32),
        }
        return accepted, after, numbers

    def empty_window(self) -> SpikeWindow:
        """The window before the first step."""
        # Separate arrays: a step that donates its state donates each of them once.
        return SpikeWindow(
            jnp.zeros(self.window, jnp.float32),
            jnp.zeros(self.window, jnp.float32),
            jnp.zeros((), jnp.int32),
        )


def robust_z_score(
    values: Float[Array, " window"], value: Float[Array, ""]
) -> Float[Array, ""]:
    """How far a number is above the median of others, in robust deviations.

    The deviation is at least a hundredth of the median: where all values are equal, or
    differ by rounding alone, a number that hardly differs is no outlier.

    Example:
      >>> values = jnp.array([2.0, 2.1, 1.9, 2.2, 1.8])
      >>> round(float(robust_z_score(values, jnp.float32(3.0))), 1)
      6.7
    """
    median = _median(values)
    deviation = _NORMAL * _median(jnp.abs(values - median))
    least = jnp.maximum(_LEAST_SHARE * jnp.abs(median), _LEAST)
    return (value - median) / jnp.maximum(deviation, least)


def _median(values: Float[Array, " window"]) -> Float[Array, ""]:
    """The median; jnp.median would interpolate by multiplying, and round otherwise."""
    ordered, size = jnp.sort(values), values.shape[0]
    return (ordered[(size - 1) // 2] + ordered[size // 2]) * 0.5
