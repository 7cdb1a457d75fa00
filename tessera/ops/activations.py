# SPDX-License-Identifier: Apache-2.0
"""Dropout with an explicit key, and the gates of gated MLPs."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import jax
import jax.numpy as jnp

from tessera.errors import OperandError


def dropout(
    x: Any, rate: float, *, key: Any = None, deterministic: bool = False
) -> jax.Array:
    """Set random elements of ``x`` to zero and scale the others to preserve the mean.

    The same key gives the same zeros on every mesh; where it cannot, in code per device
    or per microbatch, it is refused ([T211], while that is traced). Two layers, and two
    steps, need different keys: ``jax.random.fold_in(key, step)``.

    Args:
      x: ``[...]`` floating-point.
      rate: The fraction of elements to set to zero, from 0 to 1.
      key: A PRNG key of ``jax.random``. Not needed where nothing is dropped.
      deterministic: Whether to return ``x`` unchanged, as in validation.

    Returns:
      ``[...]`` in the dtype of ``x``.

    Raises:
      OperandError: [T401] the rate is out of range, or the key is missing.

    Example:
      >>> x = dropout(jnp.ones(8), 0.5, key=jax.random.key(0))
      >>> sorted(set(x.tolist()))
      [0.0, 2.0]

    Source: Srivastava et al., JMLR 15, 2014.
    """
    x = jnp.asarray(x)
    if not 0.0 <= rate <= 1.0:
        raise OperandError(
            "the rate of dropout is not between 0 and 1",
            got=f"rate {rate}",
            fix="use a rate from 0 to 1",
        )
    if deterministic or rate == 0.0:
        return x
    if rate == 1.0:
        return jnp.zeros_like(x)
    if key is None:
        raise OperandError(
            "dropout needs a key",
            got=f"rate {rate}, key=None",
            fix="pass key=jax.random.fold_in(key, step), or deterministic=True",
        )
    is_kept = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(
        is_kept, x / jnp.asarray(1.0 - rate, x.dtype), jnp.zeros((), x.dtype)
    )


# Of the gates of gated MLPs, by the names that configurations have for them.
GATES: Final[Mapping[str, Callable[[jax.Array], jax.Array]]] = MappingProxyType(
    {"gelu_tanh": partial(jax.nn.gelu, approximate=True), "silu": jax.nn.silu}
)
