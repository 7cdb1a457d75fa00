# SPDX-License-Identifier: Apache-2.0
"""``jax.grad`` and ``jax.value_and_grad`` of JAX's tests, by Tessera's gradients."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core.primitives import copy_p

import tessera as ts


def grad(
    real: Callable[..., Any],
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    """``jax.grad``, as a ``ts.jit`` that takes ``ts.grad`` of a value it computed.

    The limits: ``holomorphic``, ``allow_int`` and ``reduce_axes``, which ``ts.grad``
    does not have, stay with JAX. Only arguments that are differentiated by are traced;
    the others are constants of the program. The function is compiled, so what depends
    on the numbers of an argument, as ``jax.grad`` lets it, differs; and each call
    compiles again.

    Args:
      real: JAX's own.
      fun: As in ``jax.grad``, and so are the others.
      argnums: The arguments to differentiate by.
      has_aux: Whether the function returns a pair.
      options: Those that stay with JAX.
    """
    of_jax = real(fun, argnums, has_aux, **options)
    if any(options.values()):
        return of_jax
    is_single = isinstance(argnums, int)

    @functools.wraps(of_jax)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        which = (argnums,) if isinstance(argnums, int) else tuple(argnums)

        def on_values(weights: list[Any]) -> Any:
            # A copy, so that what the function closes over is not differentiated by.
            weights = jax.tree.map(copy_p.bind, weights)
            given = list(args)
            for index, weight in zip(which, weights, strict=True):
                given[index] = weight
            result = fun(*given, **kwargs)
            loss, *aux = result if has_aux else (result,)
            found = tuple(ts.grad(loss, weights, allow_unused=True))
            found = found[0] if is_single else found
            return (found, *aux) if has_aux else found

        return ts.jit(on_values)([jax.tree.map(jnp.asarray, args[i]) for i in which])

    return gradient


def value_and_grad(
    real: Callable[..., Any],
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    """``jax.value_and_grad``, as ``ts.value_and_grad``; the limits of ``grad`` hold.

    Args:
      real: JAX's own.
      fun: As in ``jax.value_and_grad``, and so are the others.
      argnums: The arguments to differentiate by.
      has_aux: Whether the function returns a pair.
      options: Those that stay with JAX.
    """
    of_jax = real(fun, argnums, has_aux, **options)
    if any(options.values()):
        return of_jax
    return ts.value_and_grad(fun, argnums, has_aux=has_aux, allow_unused=True)
