# SPDX-License-Identifier: Apache-2.0
"""Methods of PyTorch's tensors on a traced array: an error that says what to write."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp

from tessera.errors import OperandError
from tessera.errors.torch_names import METHODS
from tessera.jax_compat import jaxprs


@contextmanager
def methods_explained() -> Iterator[None]:
    """Turn the error about a method that arrays lack into one with a fix.

    Raises:
      OperandError: [T401] it is one of PyTorch's, or a function of JAX.
    """
    try:
        yield
    except (AttributeError, NotImplementedError) as error:
        is_view = "array.view()" in str(error)  # it has one, of a dtype
        name = "view" if is_view else str(getattr(error, "name", ""))
        fix = METHODS.get(name)
        for module in (jnp, jax.nn):
            if fix is None and callable(getattr(module, name, None)):
                fix = f"{module.__name__.replace('jax.numpy', 'jnp')}.{name}(x, ...)"
        is_array = isinstance(getattr(error, "obj", None), jaxprs.Tracer)
        if fix is None or not (is_view or is_array):
            raise
        raise OperandError(
            f"arrays have no method {name!r} as PyTorch's tensors have", fix=fix
        ) from error
