# SPDX-License-Identifier: Apache-2.0
"""``ts.amp.LossScale``: keeps small fp16 gradients from vanishing.

The loss is multiplied by a scale before it is differentiated and the gradients are
divided by it. When a gradient overflows the step is left out and the scale lowered;
after many steps without overflow it is raised. Where the lowest scale overflows too, a
run would leave out every step and look busy: ``check`` ends it.

Source: Micikevicius et al., Mixed Precision Training, arXiv 1710.03740.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from tessera.errors import LossScaleError, SettingValueError
from tessera.mesh import manual_axes

_STATE = ["value", "streak", "stalled", "overflows"]
_SETTINGS = ["growth", "backoff", "growth_interval", "smallest", "largest", "patience"]


@partial(jax.tree_util.register_dataclass, data_fields=_STATE, meta_fields=_SETTINGS)
@dataclass(frozen=True, kw_only=True)
class LossScale:
    """A loss scale, how long it has held, and how it changes.

    A pytree of four scalars, carried from step to step like the state of an optimizer;
    ``dynamic`` and ``static`` make the first one. The methods but ``check`` are pure
    functions, for ``ts.function`` and for JAX by itself.

    Attributes:
      value: What the loss is multiplied by, f32.
      streak: Steps without overflow since it last changed, int32.
      stalled: Overflows in a row at the smallest scale, int32.
      overflows: Overflows in all, int32.
      growth: What it is multiplied by after ``growth_interval`` steps.
      backoff: What it is multiplied by after an overflow.
      growth_interval: Steps without overflow before it grows.
      smallest: It does not fall below.
      largest: It does not grow beyond.
      patience: So many overflows in a row at the smallest scale are an error.

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
        """A scale that grows and falls; powers of two round nothing.

        Raises:
          SettingValueError: [T502] a setting is out of its range.
        """
        _check(
            growth >= 1.0 >= backoff > 0.0,
            f"growth={growth}, backoff={backoff}",
            "let it grow by 1 or more, and fall by a part between 0 and 1",
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
        # Arrays of their own: a step that donates its state gives each away once.
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

    @classmethod
    def static(cls, value: float, *, patience: int = 50) -> "LossScale":
        """A scale that stays, and tolerates fewer than ``patience`` overflows in a row.

        Raises:
          SettingValueError: [T502] a setting is out of its range.
        """
        return cls.dynamic(
            value,
            growth=1.0,
            backoff=1.0,
            smallest=value,
            largest=value,
            patience=patience,
        )

    def scale(self, loss: Any) -> jax.Array:
        """A loss times the scale, in f32: fp16 could not hold it."""
        return jnp.asarray(loss).astype(jnp.float32) * self.value

    def unscale(self, gradients: Any) -> Any:
        """Gradients over the scale, in f32: fp16 would lose the small ones again."""

        def unscaled(leaf: jax.Array) -> jax.Array:
            wide = leaf if jnp.finfo(leaf.dtype).bits >= 32 else leaf.astype("float32")
            return wide / self.value.astype(wide.dtype)

        return jax.tree.map(unscaled, gradients)

    def adjust(self, finite: Any) -> "LossScale":
        """The scale of the next step.

        Args:
          finite: Whether this step's gradients were: bool scalar, the same on every
            device, as ``all_finite`` gives it.
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
        """Raise where no scale is small enough. Reads the state: waits for its step.

        Call it on the host, every so many steps.

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

    Of global arrays all parts count. Inside a manual region, such as ``op.kernel``, the
    devices of its axes ask each other.
    """
    leaves = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]
    is_finite = jnp.stack(leaves).all() if leaves else jnp.array(True)
    if axes := manual_axes():
        return jax.lax.psum((~is_finite).astype(jnp.int32), tuple(axes)) == 0
    return is_finite


def _check(is_legal: bool, got: str, fix: str) -> None:
    if not is_legal:
        raise SettingValueError("a loss scale cannot be set so", got=got, fix=fix)
