# SPDX-License-Identifier: Apache-2.0
"""``ts.nn.rms_norm``: a normalization with f32 statistics."""

from typing import Any

import jax
import jax.numpy as jnp

from tessera.errors import OperandError
from tessera.ops.operand_checks import dim_of


def rms_norm(x: Any, weight: Any = None, *, eps: float = 1e-6) -> jax.Array:
    """``x`` divided by the root of the mean square of its last dim plus ``eps``.

    Args:
      x: ``[..., D]`` floating-point.
      weight: Multiplies the result: ``[D]``.
      eps: Added to the mean square.

    Returns:
      ``[..., D]`` in the dtype of ``x``; computed in f32.

    Raises:
      OperandError: [T401] a shape or a dtype is not valid.

    Example:
      >>> print(rms_norm(jnp.array([3.0, 3.0]), eps=0.0))
      [1. 1.]

    Source: Zhang and Sennrich, arXiv 1910.07467.
    """
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise OperandError(
            "rms_norm takes floating-point numbers",
            got=f"dtype {x.dtype.name}, shape {x.shape}",
            fix="cast them first, e.g. with .astype(jnp.float32)",
        )
    last = dim_of("rms_norm", x, -1)
    wide = x if jnp.finfo(x.dtype).bits >= 32 else x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=last, keepdims=True)
    unit = wide * jax.lax.rsqrt(mean_square + eps)
    if weight is not None:
        weight = jnp.asarray(weight)
        if weight.shape != x.shape[last:]:
            raise OperandError(
                "the weight of rms_norm does not have the size of the last dim",
                got=f"weight {weight.shape}, x {x.shape}",
                fix=f"pass a weight of shape {x.shape[last:]}",
            )
        unit *= jnp.expand_dims(weight, range(last)).astype(wide.dtype)
    return unit.astype(x.dtype)
