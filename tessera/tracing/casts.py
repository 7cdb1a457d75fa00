# SPDX-License-Identifier: Apache-2.0
"""``ts.autocast``, and casts of parameters: name scopes that passes look for."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import jax

from tessera.errors import OutsideTraceError, TensorFormError
from tessera.foundations.context import holding
from tessera.jax_compat.traces import is_tracing
from tessera.shard import as_dtype
from tessera.tracing.scope import current

PARAMETER_CAST: Final = "parameter_cast"
AUTOCAST_OFF: Final = "off"
AUTOCAST_SCOPE: Final = "autocast_"
AUTOCAST_DTYPES: Final = ("bfloat16", "float16")


@dataclass
class _Open:
    """An autocast that is open, and whether anything has asked for it."""

    dtype: str
    is_read: bool = False


_autocast: ContextVar[_Open | None] = ContextVar("tessera_autocast", default=None)


@contextmanager
def autocast(dtype: Any, *, enabled: bool = True) -> Iterator[None]:
    """Compute what is written inside in a narrower dtype, where that is safe.

    Forward and backward, operation by operation:

    - Matmuls and convolutions take operands in ``dtype`` and accumulate in f32. Their
      result is rounded to ``dtype`` if an operation below leads from it to another
      matmul, or the backward pass reads it.
    - What moves values (reshape, transpose, broadcast, slice, concatenate, pad, gather,
      where, optimization barriers, names and layouts) and cheap arithmetic (add,
      subtract, multiply, divide, negate, abs, min, max, clip, sign, rounding, tanh,
      sigmoid, erf; in bf16 also powers) is narrow if all of its f32 arrays are. A
      number takes the dtype of the array; a narrow array and an f32 one make f32.
    - Everything else is f32: exp, log, sqrt, negative powers, reductions, cumulative
      sums, softmax, norms, losses, scatters, comparisons, collectives, kernels. So are
      parameters, their gradients, and what the function returns.

    `docs/reference/autocast.md` names all primitives. The pass ``autocast`` does this
    in the finished program, so it applies to Flax and ``jnp`` code as well; dtypes that
    your code sees are unchanged. The innermost ``autocast`` decides; one around the
    call of a ``ts.function`` applies inside. Plain JAX ignores it: operations in
    ``jax.jit``, and those beside such a call, are as they are without it.

    Args:
      dtype: ``bf16`` or ``f16``, by name or as a dtype; ``f32`` casts nothing.
      enabled: False switches an enclosing autocast off.

    Raises:
      TensorFormError: [T207] the dtype does not exist, or is none of these.
      OutsideTraceError: [T302] (at the end) nothing inside is of a step.

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
    current_autocast()  # this one is in its place
    opened = _Open(name if narrows else AUTOCAST_OFF)
    with holding(_autocast, opened), jax.named_scope(AUTOCAST_SCOPE + opened.dtype):
        yield
    is_of_step = here is not None or opened.is_read or is_tracing()
    if narrows and not is_of_step:
        raise _eager_error(f"ts.autocast({name!r}) around no step", "use @ts.function")


def check_autocast_of_programs(dtype: str | None) -> None:
    """Raise [T302] for an autocast where operations run eagerly, without passes."""
    if dtype in AUTOCAST_DTYPES:
        got = f"ts.autocast({dtype!r}) and jax.disable_jit()"
        raise _eager_error(got, "leave jax.disable_jit() out")


def _eager_error(got: str, fix: str) -> OutsideTraceError:
    return OutsideTraceError(
        "ts.autocast is a pass over a program, and here operations run one by one",
        got=got,
        fix=f"{fix}, or ts.autocast(..., enabled=False)",
    )


def current_autocast() -> str | None:
    """The dtype of the innermost ``autocast`` that is open, ``off``, or None."""
    if (opened := _autocast.get()) is None:
        return None
    opened.is_read = True
    return opened.dtype


def carried_autocast() -> AbstractContextManager[Any]:
    """The name scope that marks operations as inside the innermost open autocast.

    A trace begins without the name scopes around it, and opens this one again.
    """
    name = current_autocast()
    return nullcontext() if name is None else jax.named_scope(AUTOCAST_SCOPE + name)


def cast_parameter(x: jax.Array, dtype: Any) -> jax.Array:
    """Cast a parameter where it is used.

    The pass ``widen_sums`` knows its gradient by the name scope.
    """
    with jax.named_scope(PARAMETER_CAST):
        return x.astype(dtype)
