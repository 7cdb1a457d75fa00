# SPDX-License-Identifier: Apache-2.0
"""``ts.nn``: activations, softmax, and dropout with an explicit key."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

import jax
import jax.numpy as jnp

from tessera.errors import OperandError
from tessera.ops.operand_checks import Dims, at_least_f32, floating_along

Approximate: TypeAlias = Literal["none", "tanh"] | bool


def softmax(x: Any, dim: Dims = -1) -> jax.Array:
    """``exp(x)`` divided by its sum along ``dim``, computed in f32.

    A row of ``-inf`` gives NaN.

    Args:
      x: ``[...]`` floating-point.
      dim: The dim, or dims, along which the result sums to 1.

    Returns:
      ``[...]`` in the dtype of ``x``.

    Raises:
      OperandError: [T401] there is no such dim, or the dtype is not floating-point.

    Example:
      >>> print(softmax(jnp.zeros((2, 4)), dim=1)[0])
      [0.25 0.25 0.25 0.25]
    """
    x, dims = floating_along("softmax", x, dim)
    return jax.nn.softmax(at_least_f32(x), axis=dims).astype(x.dtype)


def log_softmax(x: Any, dim: Dims = -1) -> jax.Array:
    """The logarithm of :func:`softmax`, accurate where the softmax underflows.

    Args:
      x: ``[...]`` floating-point.
      dim: The dim, or dims, along which the softmax sums to 1.

    Returns:
      ``[...]`` in the dtype of ``x``.

    Raises:
      OperandError: [T401] there is no such dim, or the dtype is not floating-point.
    """
    x, dims = floating_along("log_softmax", x, dim)
    return jax.nn.log_softmax(at_least_f32(x), axis=dims).astype(x.dtype)


def gelu(x: Any, approximate: Approximate = "none") -> jax.Array:
    """``x`` times the cumulative distribution function of the standard normal.

    Args:
      x: ``[...]`` floating-point.
      approximate: ``none`` or False for the exact function, as PyTorch's default is;
        ``tanh`` or True for the approximation that is the default of ``jax.nn``.

    Returns:
      ``[...]`` in the dtype of ``x``.

    Raises:
      OperandError: [T401] there is no such approximation.

    Example:
      >>> print(f"{gelu(1.0):.4f} {gelu(1.0, 'tanh'):.4f}")
      0.8413 0.8412

    Source: Hendrycks and Gimpel, arXiv 1606.08415.
    """
    if approximate not in ("none", "tanh", True, False):
        raise OperandError(
            f"gelu has no approximation {approximate!r}",
            fix="use 'none' or False, or 'tanh' or True",
        )
    return jax.nn.gelu(jnp.asarray(x), approximate=approximate in ("tanh", True))


def silu(x: Any) -> jax.Array:
    """``x * sigmoid(x)``, in the dtype of ``x``; also called swish.

    Example:
      >>> print(f"{silu(1.0):.4f}")
      0.7311

    Source: Elfwing et al., arXiv 1702.03118.
    """
    return jax.nn.silu(jnp.asarray(x))


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
