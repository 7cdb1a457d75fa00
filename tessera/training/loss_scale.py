# SPDX-License-Identifier: Apache-2.0
"""Dynamic loss scaling, which keeps small fp16 gradients from vanishing.

The loss is multiplied by a scale before it is differentiated and the gradients are
divided by it. When a gradient overflows the step is skipped and the scale halved; after
many steps without overflow it is doubled.

Source: Micikevicius et al., Mixed Precision Training, arXiv 1710.03740.
"""

from dataclasses import dataclass
from functools import partial
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

INITIAL: Final = 2.0**15
GROWTH_INTERVAL: Final = 200
LARGEST: Final = 2.0**24
SMALLEST: Final = 1.0


@partial(
    jax.tree_util.register_dataclass, data_fields=["scale", "streak"], meta_fields=[]
)
@dataclass(frozen=True)
class LossScale:
    """A loss scale and how long it has held.

    Attributes:
      scale: What the loss is multiplied by, f32 scalar, a power of two.
      streak: Steps without overflow since it last changed, int32 scalar.

    Example:
      >>> scale = LossScale.initial().updated(jnp.bool_(False))
      >>> print(scale.scale)
      16384.0
    """

    scale: Float[Array, ""]
    streak: Int[Array, ""]

    @classmethod
    def initial(cls) -> "LossScale":
        """The scale that a run begins with: 32768."""
        return cls(jnp.float32(INITIAL), jnp.int32(0))

    def updated(self, finite: Bool[Array, ""]) -> "LossScale":
        """The next step's scale, given whether these gradients were finite."""
        grows = finite & (self.streak + 1 >= GROWTH_INTERVAL)
        factor = jnp.where(finite, jnp.where(grows, 2.0, 1.0), 0.5)
        return LossScale(
            jnp.clip(self.scale * factor, SMALLEST, LARGEST),
            jnp.where(finite & ~grows, self.streak + 1, 0),
        )
