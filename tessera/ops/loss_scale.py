# SPDX-License-Identifier: Apache-2.0
"""``ts.amp.LossScale``: dynamic loss scaling for fp16.

The loss is multiplied by a scale before differentiation, and the gradients are divided
by it. When a gradient overflows, the step is skipped and the scale is lowered; after
many steps without overflow it is raised. Where even the smallest scale overflows, every
step would be skipped: ``check`` raises.

Source: Micikevicius et al., Mixed Precision Training, arXiv 1710.03740.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from tessera.errors import LossScaleError, SettingValueError
from tessera.jax_compat.traces import manual_axes

_STATE = ["value", "streak", "stalled", "overflows"]
_SETTINGS = ["growth", "backoff", "growth_interval", "smallest", "largest", "patience"]


@partial(jax.tree_util.register_dataclass, data_fields=_STATE, meta_fields=_SETTINGS)
@dataclass(frozen=True, kw_only=True)
class LossScale:
    """A loss scale, its counters, and its options.

    A pytree of four scalars, carried from step to step like the state of an optimizer;
    ``dynamic`` creates it. All methods except ``check`` are pure, for
    ``ts.function`` and for plain JAX.

    Attributes:
      value: The scale, f32.
      streak: Steps without overflow since the scale last changed, int32.
      stalled: Consecutive overflows at the smallest scale, int32.
      overflows: All overflows, int32.
      growth: Factor of the scale after ``growth_interval`` steps.
      backoff: Factor of the scale after an overflow.
      growth_interval: Steps without overflow before the scale grows.
      smallest: Lower bound of the scale.
      largest: Upper bound of the scale.
      patience: Consecutive overflows at the smallest scale that ``check`` refuses.

    Example:
      >>> scale = LossScale.dynamic(initial=1024.0)
      >>> float(scale.scale(jnp.float32(2.0)))
      2048.0
      >>> gradients = scale.unscale({"w": jnp.array([1.0, jnp.inf])})
      >>> scale = scale.adjust(all_finite(gradients))
      >>> float(scale.value), int(scale.overflows)
      (512.0, 1)
    """

    value: jax.Array
    streak: jax.Array
    stalled: jax.Array
    overflows: jax.Array
    growth: float
    backoff: float
    growth_interval: int
    smallest: float
    largest: float
    patience: int

    @classmethod
    def dynamic(
        cls,
        initial: float = 2.0**15,
        *,
        growth: float = 2.0,
        backoff: float = 0.5,
        growth_interval: int = 200,
        smallest: float = 1.0,
        largest: float = 2.0**24,
        patience: int = 1,
    ) -> "LossScale":
        """A scale that grows and falls; powers of two cause no rounding.

        Raises:
          SettingValueError: [T502] a setting is out of its range.
        """
        _check(
            growth >= 1.0 >= backoff > 0.0,
            f"growth={growth}, backoff={backoff}",
            "use a growth of 1 or more, and a backoff between 0 and 1",
        )
        _check(
            0.0 < smallest <= initial <= largest < float("inf"),
            f"smallest={smallest}, initial={initial}, largest={largest}",
            "begin between the smallest and the largest, all above 0",
        )
        _check(
            growth_interval >= 1 and patience >= 1,
            f"growth_interval={growth_interval}, patience={patience}",
            "use whole numbers from 1 up",
        )
        # Separate arrays: a step that donates its state donates each of them once.
        streak, stalled, overflows = (jnp.zeros((), jnp.int32) for _ in range(3))
        return cls(
            value=jnp.full((), initial, jnp.float32),
            streak=streak,
            stalled=stalled,
            overflows=overflows,
            growth=growth,
            backoff=backoff,
            growth_interval=growth_interval,
            smallest=smallest,
            largest=largest,
            patience=patience,
        )

    def scale(self, loss: Any) -> jax.Array:
        """The loss times the scale, in f32: fp16 would overflow."""
        return jnp.asarray(loss).astype(jnp.float32) * self.value

    def unscale(self, gradients: Any) -> Any:
        """Gradients divided by the scale, in f32: in fp16 they would underflow."""

        def unscaled(leaf: jax.Array) -> jax.Array:
            wide = leaf if jnp.finfo(leaf.dtype).bits >= 32 else leaf.astype("float32")
            return wide / self.value.astype(wide.dtype)

        return jax.tree.map(unscaled, gradients)

    def adjust(self, finite: Any) -> "LossScale":
        """The scale of the next step.

        Args:
          finite: Whether the gradients of this step are finite: bool scalar, the same
            on every device, from ``all_finite``.
        """
        finite = jnp.asarray(finite)
        grows = finite & (self.streak + 1 >= self.growth_interval)
        factor = jnp.where(finite, jnp.where(grows, self.growth, 1.0), self.backoff)
        falls_below = ~finite & (self.value <= self.smallest)
        return replace(
            self,
            value=jnp.clip(self.value * factor, self.smallest, self.largest),
            streak=jnp.where(finite & ~grows, self.streak + 1, 0),
            stalled=jnp.where(falls_below, self.stalled + 1, 0),
            overflows=self.overflows + (~finite).astype(jnp.int32),
        )

    def check(self) -> None:
        """Raise where no scale is small enough. Waits for the step of this state.

        Call it on the host, once in a while.

        Raises:
          LossScaleError: [T506] the gradients overflow however small the scale is.
        """
        stalled = int(self.stalled)
        if stalled >= self.patience:
            raise LossScaleError(
                "gradients overflow with the smallest loss scale",
                got=f"loss scale {float(self.value):g}, overflows: {stalled} in a row, "
                f"{int(self.overflows)} in all",
                fix="use bf16, which needs no loss scale, or a lower learning rate",
            )


def all_finite(tree: Any) -> jax.Array:
    """Whether every number of a tree is finite: bool scalar, the same on every device.

    Of global arrays, all shards count. Inside an SPMD region, such as ``op.kernel``,
    it is a reduction over the axes of the region.
    """
    leaves = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]
    is_finite = jnp.stack(leaves).all() if leaves else jnp.array(True)
    if axes := manual_axes():
        return jax.lax.psum((~is_finite).astype(jnp.int32), tuple(axes)) == 0
    return is_finite


def _check(is_legal: bool, got: str, fix: str) -> None:
    if not is_legal:
        raise SettingValueError(
            "the options of a loss scale are out of range", got=got, fix=fix
        )
