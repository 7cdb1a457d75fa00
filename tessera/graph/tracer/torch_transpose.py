# SPDX-License-Identifier: Apache-2.0
"""PyTorch-style ``x.transpose(1, 2)``, which swaps two dims, inside traced functions.

JAX takes two integers as the order of all dims and refuses them for an array of more
than two dims. Only that call, and only while a scope is open, gets the other meaning;
of two dims, an order that changes nothing is warned of.
JAX's classes are patched once and permanently, and the method checks the context at
each call: patching around each trace would be visible to other threads.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tessera.errors import TesseraWarning
from tessera.jax_compat import jaxprs
from tessera.ops.operand_checks import swap_dims
from tessera.tracing import scope

_MARK = "_swaps_two_dims"


def enable_torch_transpose() -> None:
    """Patch ``transpose`` of JAX's arrays, traced ones too, to swap two dims."""
    for kind in (jaxprs.Tracer, *jax.Array.__subclasses__()):
        method = vars(kind).get("transpose")
        if method is not None and not hasattr(method, _MARK):
            type.__setattr__(kind, "transpose", _with_two_dims_swapped(method))


def _with_two_dims_swapped(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def transpose(self: Any, *dims: Any, **named: Any) -> Any:
        is_pair = len(dims) == 2 and all(isinstance(d, int | np.integer) for d in dims)
        if is_pair and not named and scope.current() is not None:
            if self.ndim > 2:
                return swap_dims(self, *dims)
            if dims in ((0, 1), (-2, -1)):
                warnings.warn(
                    f"x.transpose{dims} of a matrix changes nothing, as in NumPy: "
                    "write x.T to swap its dims",
                    TesseraWarning,
                    stacklevel=2,
                )
        return method(self, *dims, **named)

    setattr(transpose, _MARK, True)
    return transpose
