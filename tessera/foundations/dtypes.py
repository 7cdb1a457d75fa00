# SPDX-License-Identifier: Apache-2.0
"""Dtypes by name: ``ts.f32``, ``ts.int32``, ``"bf16"``.

They are NumPy dtype objects, so they equal an array's ``dtype``, hash like it, and work
wherever JAX or NumPy takes a dtype.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from tessera.errors import TensorFormError, did_you_mean


def _dtype(kind: Any) -> Any:
    """A dtype, typed as Any so that type checkers allow it in ``ts.Tensor[...]``."""
    return np.dtype(kind)


f16 = float16 = _dtype(np.float16)
f32 = float32 = _dtype(np.float32)
f64 = float64 = _dtype(np.float64)
bf16 = bfloat16 = _dtype(jnp.bfloat16)
f8_e4m3 = float8_e4m3fn = _dtype(jnp.float8_e4m3fn)
f8_e5m2 = float8_e5m2 = _dtype(jnp.float8_e5m2)
i8 = int8 = _dtype(np.int8)
i16 = int16 = _dtype(np.int16)
i32 = int32 = _dtype(np.int32)
i64 = int64 = _dtype(np.int64)
u8 = uint8 = _dtype(np.uint8)
u16 = uint16 = _dtype(np.uint16)
u32 = uint32 = _dtype(np.uint32)
u64 = uint64 = _dtype(np.uint64)
bool_ = _dtype(np.bool_)

# fmt: off
__all__ = [
    "bf16", "bfloat16", "bool_", "f8_e4m3", "f8_e5m2", "f16", "f32", "f64",
    "float8_e4m3fn", "float8_e5m2", "float16", "float32", "float64",
    "i8", "i16", "i32", "i64", "int8", "int16", "int32", "int64",
    "u8", "u16", "u32", "u64", "uint8", "uint16", "uint32", "uint64",
]
# fmt: on

DTYPES: Final[Mapping[str, np.dtype[Any]]] = MappingProxyType(
    {name: globals()[name] for name in __all__} | {"bool": bool_}
)
# fmt: off
_SHORT: Final = (
    "f32", "bf16", "f16", "f64", "f8_e4m3", "f8_e5m2",
    "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "bool",
)
# fmt: on


def as_dtype(dtype: Any) -> np.dtype[Any]:
    """A dtype from a short name such as ``bf16``, or from NumPy's and JAX's own.

    Raises:
      TensorFormError: [T207] there is no such dtype.

    Example:
      >>> as_dtype("bf16"), as_dtype(jnp.float32)
      (dtype(bfloat16), dtype('float32'))
    """
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    try:
        return np.dtype(jnp.dtype(dtype))
    except TypeError:
        raise TensorFormError(
            f"there is no dtype {dtype!r}", fix=did_you_mean(str(dtype), _SHORT)
        ) from None


def short_name(dtype: Any) -> str:
    """The short name of a dtype: ``bf16``, ``i32``; else its NumPy name.

    Example:
      >>> short_name(jnp.int32), short_name(np.dtype("complex64"))
      ('i32', 'complex64')
    """
    short = next((name for name in _SHORT if DTYPES[name] == dtype), None)
    return short or str(getattr(dtype, "name", dtype))
