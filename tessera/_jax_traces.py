# SPDX-License-Identifier: Apache-2.0
"""What JAX is tracing right now, and what it does with primitives of our own.

A second door beside ``_jax``, which has no room left: like it, this module may use
``jax._src``, and nothing else may.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import jax
from jax._src import config, core, dtypes
from jax._src.api_util import InternalFloatingPointError as InternalFloatingPointError
from jax._src.interpreters import batching, partial_eval
from jax._src.lax import lax

# Newer ones are told which mutable inputs are read later on.
_RULES_TAKE_LIVE_INPUTS = partial_eval._default_dce_rule.__code__.co_argcount == 3

# Before it Mosaic GPU's kernels had other names for their parts.
HAS_MOSAIC_GPU_KERNELS = jax.__version_info__ >= (0, 12)

BatchingRule: TypeAlias = Callable[[Sequence[Any], Sequence[int | None]], Any]


def jit_is_disabled() -> bool:
    """Whether ``jax.disable_jit()`` is open."""
    return bool(config.disable_jit.value)


def is_tracing() -> bool:
    """Whether JAX is tracing or transforming a function, with whatever arguments."""
    return not core.trace_state_clean()


def as_number(value: Any, kind: type) -> Any:
    """A value as a number of Python's ``int`` or ``float``: its dtype is weak."""
    dtype = dtypes.canonicalize_dtype(kind)
    return lax._convert_element_type(value, dtype, weak_type=kind is not bool)


def where_traced(value: Any) -> AbstractContextManager[Any]:
    """A context in which equations go to the program that a traced value is of.

    In the body of a loop or a branch that is traced, it is a program further out for
    a value that the body closes over.
    """
    return core.set_current_trace(value._trace)


def is_known_where(value: Any, home: Any) -> bool:
    """Whether the program that ``home`` is of may read a value.

    It may not read what is traced further in, such as the arguments of a loop's body.
    """
    return not isinstance(value, core.Tracer) or value._trace in _around(home)


def _around(value: Any) -> Iterator[Any]:
    """The traces of a value: its own, and those that this one is traced in."""
    trace = value._trace
    while trace is not None:
        yield trace
        trace = getattr(trace, "parent_trace", None)


def inputs_read(equation: Any, wanted: Sequence[bool]) -> list[Any]:
    """The variables that an equation needs for those of its results that are wanted.

    Nested programs are looked into where JAX knows how: of a loop that carries several
    values, only what the wanted ones come from is needed.
    """
    variables = [v for v in equation.invars if isinstance(v, core.Var)]
    rule: Any = partial_eval.dce_rules.get(equation.primitive)
    if rule is None or equation.effects:
        return variables
    live = [[True] * len(equation.invars)] * _RULES_TAKE_LIVE_INPUTS
    used, _ = rule(list(wanted), *live, equation)
    pairs = zip(equation.invars, used, strict=True)
    return [v for v, needed in pairs if needed and isinstance(v, core.Var)]


def let_batch(primitive: Any, rule: BatchingRule) -> None:
    """Let ``jax.vmap`` apply a primitive to batches.

    Args:
      primitive: One with several results.
      rule: Takes the values, for each the dim that counts examples or None, and the
        parameters; gives the results and such a dim for each.
    """
    batching.primitive_batchers[primitive] = rule
