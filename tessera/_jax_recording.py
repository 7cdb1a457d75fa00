# SPDX-License-Identifier: Apache-2.0
"""A tape: runs operations eagerly and records them, for gradients taken afterwards.

While a ``Recording`` is open, JAX executes every operation as it does outside a trace,
and the result is a concrete array, which prints, compares and converts. The operations
are recorded, so that ``gradients`` can run those that a loss depends on again, under
``jax.grad``. (JAX differentiates functions only, and has no tape.)

Beside ``_jax``: like it, this module may use ``jax._src``.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from jax._src import core

Rule: TypeAlias = Callable[["Recording", Sequence[Any], dict[str, Any]], list[Any]]

_rules: dict[Any, Rule] = {}


def register_eager_rule(primitive: Any, rule: Rule) -> None:
    """Register what a primitive does in a recording."""
    _rules[primitive] = rule


class RecordedArray(core.Tracer[Any]):
    """An array of a recording, usable as the concrete array that it wraps."""

    __slots__ = ("value",)

    def __init__(self, trace: "Recording", value: Any) -> None:
        super().__init__(trace, core.typeof(value))
        self.value = value

    def to_concrete_value(self) -> Any:
        """The concrete value, where JAX or Python has to decide on it."""
        return core.to_concrete_value(self.value)

    def full_lower(self) -> Any:
        """The array itself, once the recording is closed."""
        return self if self._trace.is_open else self.value

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return np.asarray(self.value, *args, **kwargs)

    def __float__(self) -> float:
        return float(self.value)

    def __complex__(self) -> complex:
        return complex(self.value)

    def __repr__(self) -> str:
        return repr(self.value)

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, form: str) -> str:
        return format(self.value, form)

    def item(self, *args: int) -> Any:
        """One element, as a Python number."""
        return self.value.item(*args)

    def tolist(self) -> Any:
        """The elements in nested lists."""
        return self.value.tolist()

    @property
    def sharding(self) -> Any:
        """The sharding of the array."""
        return self.value.sharding


@dataclass(frozen=True)
class _Entry:
    """A recorded operation: its function, inputs and outputs."""

    run: Callable[..., Sequence[Any]]
    inputs: Sequence[Any]
    outputs: Sequence[RecordedArray]


class Recording(core.Trace):
    """Eagerly executed operations, in order."""

    def __init__(self) -> None:
        super().__init__()
        self._around = core.trace_ctx.trace
        self._entries: list[_Entry] = []
        self.is_open = True

    def entered(self) -> AbstractContextManager[Any]:
        """A context in which operations are recorded."""
        return core.set_current_trace(self)

    def left(self) -> AbstractContextManager[Any]:
        """A context in which operations run as they do around the recording."""
        return core.set_current_trace(self._around)

    def concrete(self, value: Any) -> Any:
        """The concrete array of a recorded one; other values as they are."""
        return value.value if self._has(value) else value

    def array(self, value: Any) -> RecordedArray:
        """An array as a recorded one."""
        return RecordedArray(self, value)

    def record(
        self, run: Callable[..., Sequence[Any]], inputs: Sequence[Any]
    ) -> list[RecordedArray]:
        """Run a function of arrays, and record it."""
        with self.left():
            results = run(*map(self.concrete, inputs))
        outputs = [RecordedArray(self, result) for result in results]
        self._entries.append(_Entry(run, inputs, outputs))
        return outputs

    def reached(self, loss: Any, weights: Sequence[Any]) -> list[bool]:
        """Which of some weights a loss was computed from."""
        ancestors = self._ancestors(loss)[1]
        return [id(weight) in ancestors for weight in weights]

    def reads_references(self, loss: Any) -> bool:
        """Whether a loss was computed from mutable arrays."""
        entries, _ = self._ancestors(loss)
        inputs = [self.concrete(x) for entry in entries for x in entry.inputs]
        return any(isinstance(value, jax.Ref) for value in inputs)

    def gradients(self, loss: Any, weights: Sequence[Any]) -> list[RecordedArray]:
        """The gradients of a loss by weights, some of which may depend on others."""
        entries, ancestors = self._ancestors(loss)
        dependent = {id(weight) for weight in weights}
        between: list[_Entry] = []
        for entry in entries:
            if not dependent.isdisjoint(map(id, entry.inputs)):
                between.append(entry)
                dependent.update(map(id, entry.outputs))
        outputs = {id(output) for entry in between for output in entry.outputs}
        inner = [id(weight) for weight in weights if id(weight) in outputs]
        free = {id(weight): weight for weight in weights if id(weight) not in outputs}
        others = {
            i: ancestors[i] for i in ancestors if i not in outputs and i not in free
        }

        def loss_of(values: Sequence[Any], offsets: Sequence[Any], rest: Any) -> Any:
            env = dict(zip((*free, *others), (*values, *rest), strict=True))
            added = dict(zip(inner, offsets, strict=True))
            for entry in between:
                inputs = [env.get(id(x), self.concrete(x)) for x in entry.inputs]
                for output, result in zip(
                    entry.outputs, entry.run(*inputs), strict=True
                ):
                    offset = added.get(id(output))
                    env[id(output)] = result if offset is None else result + offset
            return env[id(loss)]

        def run(*values: Any) -> list[Any]:
            count = len(free)
            zeros = [jax.numpy.zeros_like(self.concrete(ancestors[i])) for i in inner]
            by_free, by_inner = jax.grad(loss_of, (0, 1))(
                list(values[:count]), zeros, values[count:]
            )
            slopes = dict(zip((*free, *inner), (*by_free, *by_inner), strict=True))
            return [slopes[id(weight)] for weight in weights]

        return self.record(run, [*free.values(), *others.values()])

    def _ancestors(self, loss: Any) -> tuple[list[_Entry], dict[int, Any]]:
        """The operations that a loss depends on, in order, and their arrays by id."""
        arrays = {id(loss): loss}
        entries: list[_Entry] = []
        for entry in reversed(self._entries):
            if not arrays.keys().isdisjoint(map(id, entry.outputs)):
                entries.append(entry)
                arrays |= {id(x): x for x in entry.inputs if self._has(x)}
        return entries[::-1], arrays

    def _has(self, value: Any) -> bool:
        return isinstance(value, RecordedArray) and value._trace is self

    # --- the interface of JAX's traces

    def stage_value(self, val: Any) -> Any:
        if self._has(val):
            return val
        with self.left():
            return RecordedArray(self, self._around.stage_value(val))

    def process_primitive(self, primitive: Any, tracers: Any, params: Any, /) -> Any:
        rule = _rules.get(primitive)
        if rule is not None:
            return rule(self, tracers, params)

        def run(*values: Any) -> Sequence[Any]:
            results = primitive.bind(*values, **params)
            return results if primitive.multiple_results else [results]

        results = self.record(run, tracers)
        return results if primitive.multiple_results else results[0]

    def process_custom_jvp_call(self, *args: Any, **params: Any) -> Any:
        *functions, tracers = args

        def call(trace: Any, values: Any) -> Any:
            return trace.process_custom_jvp_call(*functions, values, **params)

        return self._as_program(call, tracers)

    def process_custom_vjp_call(self, *args: Any, **params: Any) -> Any:
        *functions, tracers = args

        def call(trace: Any, values: Any) -> Any:
            return trace.process_custom_vjp_call(*functions, values, **params)

        return self._as_program(call, tracers)

    def process_call(self, primitive: Any, f: Any, tracers: Any, params: Any, /) -> Any:
        def call(trace: Any, values: Any) -> Any:
            return trace.process_call(primitive, f, values, params)

        return self._as_program(call, tracers)

    def process_shard_map(
        self, primitive: Any, fun: Any, tracers: Any, /, **params: Any
    ) -> Any:
        """An SPMD region is one operation, and compiled."""
        result: list[Any] = []

        def call(trace: Any, values: Any) -> Any:
            result[:] = [trace.process_shard_map(primitive, fun, values, **params)]
            return list(result[0])

        results = self._as_program(call, tracers, is_compiled=True)
        return result[0].update(results)

    def _as_program(
        self,
        call: Callable[..., Any],
        tracers: Sequence[Any],
        *,
        is_compiled: bool = False,
    ) -> Any:
        """Record a call of a function as a program, since JAX traces it only once."""

        def flat(*values: Any) -> Any:
            with core.take_current_trace() as trace:
                return call(trace, values)

        avals = [core.typeof(tracer) for tracer in tracers]
        forms = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals
        ]
        program: Any = jax.make_jaxpr(flat)(*forms)
        body = getattr(program, "jaxpr", program)
        count = len(tracers)

        def run(*values: Any) -> list[Any]:
            return core.eval_jaxpr(body, values[count:], *values[:count])

        def run_compiled(*values: Any) -> list[Any]:
            with jax.disable_jit(False):
                return jax.jit(run)(*values)

        run_it = run_compiled if is_compiled else run
        return self.record(run_it, [*tracers, *getattr(program, "consts", ())])
