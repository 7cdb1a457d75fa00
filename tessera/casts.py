# SPDX-License-Identifier: Apache-2.0
"""``ts.autocast``, and casts of parameters: name scopes that passes look for."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Final

import jax

from tessera.errors import OutsideTraceError, TensorFormError
from tessera.scope import current, holding
from tessera.shard import as_dtype

PARAMETER_CAST: Final = "parameter_cast"
AUTOCAST_OFF: Final = "off"
AUTOCAST_SCOPE: Final = "autocast_"
AUTOCAST_DTYPES: Final = ("bfloat16", "float16")

_autocast: ContextVar[str | None] = ContextVar("tessera_autocast", default=None)


@contextmanager
def autocast(dtype: Any, *, enabled: bool = True) -> Iterator[None]:
    """Do the matmuls and convolutions written inside in a narrower dtype.

    Their operands are cast to ``dtype`` and accumulated in f32, in the forward and in
    the backward pass; everything else (softmax, norms, reductions, losses, parameters)
    is unchanged. The pass ``autocast`` does the casting, so it applies to
    Flax and ``jnp`` code as well. The innermost ``autocast`` decides; one around the
    call of a ``ts.function`` applies inside. Plain JAX ignores it.

    Args:
      dtype: ``bf16`` or ``f16``, by name or as a dtype; ``f32`` casts nothing.
      enabled: False switches an enclosing autocast off.

    Raises:
      TensorFormError: [T207] the dtype does not exist, or is none of these.

    Source: Micikevicius et al., Mixed Precision Training, arXiv 1710.03740.
    """
    name = as_dtype(dtype).name
    if name not in (*AUTOCAST_DTYPES, "float32"):
        raise TensorFormError(
            f"matmuls cannot be autocast to {name}", fix="use bf16, f16 or f32"
        )
    narrows = enabled and name in AUTOCAST_DTYPES
    here = current()
    if narrows and here is not None and here.is_eager:
        check_autocast_of_programs(name)
    with holding(_autocast, name if narrows else AUTOCAST_OFF), carried_autocast():
        yield


def check_autocast_of_programs(dtype: str | None) -> None:
    """Raise [T302] for an autocast where operations run eagerly, without passes."""
    if dtype in AUTOCAST_DTYPES:
        raise OutsideTraceError(
            "ts.autocast is a pass over a program, and here operations run one by one",
            got=f"ts.autocast({dtype!r}) and jax.disable_jit()",
            fix="leave jax.disable_jit() out, or ts.autocast(..., enabled=False)",
        )


def current_autocast() -> str | None:
    """The dtype of the innermost ``autocast`` that is open, ``off``, or None."""
    return _autocast.get()


def carried_autocast() -> AbstractContextManager[Any]:
    """The name scope that marks operations as inside the innermost open autocast.

    A trace begins without the name scopes around it, and opens this one again.
    """
    name = _autocast.get()
    return nullcontext() if name is None else jax.named_scope(AUTOCAST_SCOPE + name)


def cast_parameter(x: jax.Array, dtype: Any) -> jax.Array:
    """Cast a parameter where it is used.

    The pass ``widen_sums`` knows its gradient by the name scope.
    """
    with jax.named_scope(PARAMETER_CAST):
        return x.astype(dtype)
