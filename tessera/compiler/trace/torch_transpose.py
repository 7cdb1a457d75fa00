# SPDX-License-Identifier: Apache-2.0
"""``x.transpose(1, 2)`` in a function that Tessera traces: two dims change places.

JAX reads two integers as the order of all dims and refuses them for an array of more
than two. Only that call, and only while a scope is open, gets a meaning. JAX's classes
are given the method once and for good, and it asks the context each time: replacing it
around each trace would be seen by other threads.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tessera import _jax, scope
from tessera.ops.dim_arguments import swap_dims

_MARK = "_swaps_two_dims"


def let_transpose_swap() -> None:
    """Give the arrays of JAX, traced ones too, a ``transpose`` that swaps two dims."""
    for kind in (_jax.Tracer, *jax.Array.__subclasses__()):
        method = vars(kind).get("transpose")
        if method is not None and not hasattr(method, _MARK):
            type.__setattr__(kind, "transpose", _swapping(method))


def _swapping(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def transpose(self: Any, *dims: Any, **named: Any) -> Any:
        is_pair = len(dims) == 2 and all(isinstance(d, int | np.integer) for d in dims)
        if is_pair and not named and self.ndim > 2 and scope.current() is not None:
            return swap_dims(self, *dims)
        return method(self, *dims, **named)

    setattr(transpose, _MARK, True)
    return transpose
