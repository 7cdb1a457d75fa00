# SPDX-License-Identifier: Apache-2.0
"""NNX objects of another trace: read alone, and an error with a fix where changed."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax

from tessera.errors import WriteBackError
from tessera.graph.tracer.control_flow.user_code import line_of
from tessera.jax_compat import traces
from tessera.tracing.object_arguments import STRUCTURE, ObjectCall


@contextmanager
def changes_explained() -> Iterator[None]:
    """Turn Flax's error about changes inside a trace into one with a fix.

    Raises:
      WriteBackError: [T320] an object was changed that is not of the trace.
    """
    try:
        yield
    except Exception as error:
        flax_errors: Any = sys.modules.get("flax.errors")
        is_change = flax_errors and isinstance(error, flax_errors.TraceContextError)
        # What nnx.grad and the like say of a module from outside of the trace.
        if not is_change and "from different trace level" not in str(error):
            raise
        raise WriteBackError(
            "an NNX object was changed, and cannot be given back",
            got=f"{str(error).partition(' (http')[0]}\nat {line_of(error)[0]}",
            fix="pass it to the function as an argument, where it is closed over\n"
            "in a loop, a branch or a transformation use Flax's own: nnx.scan, "
            "nnx.cond, nnx.vmap\n"
            "in a stage of a pipeline return what is new",
        ) from error


def finish(call: ObjectCall, result: Any) -> Any:
    """Update the objects of a call; the result with its objects.

    One of an outer trace stays as it is: Flax would empty it, and then fail.

    Raises:
      WriteBackError: [T320] such an object was changed, or is a part of the result.
    """
    read = {
        id(unit)
        for unit, arrays, _, before in call.units
        if _is_of_outer_trace(unit) and _is_unchanged(arrays, before)
    }
    try:
        return call.finish(result, read)
    except KeyError:
        if not read:
            raise
        raise WriteBackError(
            "an object from outside of what JAX traces around the call is a part of "
            "its result",
            fix="return its state: nnx.state(model)",
        ) from None


def _is_of_outer_trace(unit: Any) -> bool:
    """Whether a part of an object belongs to another trace than the current one."""
    if isinstance(unit, jax.Ref) or not traces.is_tracing():
        return False
    from flax import nnx

    # Flax has no public name for the trace of a variable, or of a module's attributes.
    for _, part in nnx.iter_graph(unit):
        is_variable = isinstance(part, nnx.Variable)
        holder = part if is_variable else getattr(part, "_pytree__state", None)
        trace = getattr(holder, "_trace_state", None)
        if trace is not None and not trace.is_valid():
            return True
    return False


def _is_unchanged(arrays: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """True; raises [T320] where an array of an object is another one."""
    for name in (arrays.keys() | before.keys()) - {STRUCTURE}:
        if arrays.get(name) is not before.get(name):
            raise WriteBackError(
                f"a {before[STRUCTURE].kind} was changed, and cannot be given back",
                got=f"{name!r} of one from outside of jax.grad, a loop, or what else "
                "JAX traces around the call",
                fix="make the object inside: nnx.merge(graphdef, state)\n"
                "or use Flax's own: nnx.grad, nnx.vmap, nnx.scan",
            )
    return True
