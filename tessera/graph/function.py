# SPDX-License-Identifier: Apache-2.0
"""``Function``: a Python function that runs as one compiled program.

A call looks for its program among those of the last calls, by the few leaves of the
arguments that distinguish them. Only if there is none that fits, it compares the whole
call with all programs so far, or compiles another one. A call inside another traced
function is part of that function's program.
"""

import functools
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any, TypeAlias, TypeVar

import jax

from tessera.annotations import argument_names, bind, signature_of
from tessera.errors import SettingConflictError, UnconnectedGradientError
from tessera.graph.call_kinds import QUICK_CALLS, CallKind, Program, context_key
from tessera.graph.compile_stages import Compiled, Lowered, Traced
from tessera.graph.eager import run_eagerly
from tessera.graph.flax_errors import changes_explained, finish
from tessera.graph.jit_options import NO_ARGUMENTS, StaticArguments
from tessera.graph.lower.lower_to_jit import jitted
from tessera.graph.pass_runner import check_names
from tessera.graph.process_agreement import check_processes
from tessera.graph.recompilations import Recompilations
from tessera.graph.torch_methods import methods_explained
from tessera.graph.tracer.arguments import (
    Call,
    ProgramMismatch,
    flatten_args,
    values_of,
)
from tessera.graph.tracer.closure_changes import Closure
from tessera.graph.tracer.declared_layouts import Options
from tessera.graph.tracer.inlining import inline
from tessera.graph.tracer.program_lookup import ProgramLookup
from tessera.graph.tracer.tracer import trace
from tessera.graph.tracer.write_back import write_back
from tessera.jax_compat import jaxprs, traces
from tessera.jax_compat.tracebacks import trim_frames
from tessera.shard import DistTensor
from tessera.tracing import scope
from tessera.tracing.mutable_arrays import check_captured
from tessera.tracing.object_arguments import (
    ObjectCall,
    changes_in_place,
    objects_split,
    with_objects,
)

__all__ = ["Function", "last_run"]

_Result = TypeVar("_Result")
_Run: TypeAlias = Callable[[Sequence[Any], Mapping[str, Any]], Any]

# The most recently called function, for ``dist.profile()``; a weak reference.
_ran: deque["weakref.ref[Function]"] = deque(maxlen=1)


class Function:
    """A function that Tessera traces, compiles and runs.

    Arrays among the arguments are traced. What else is there is static: Python scalars,
    strings, callables and other values are part of the program, another value is
    another program, and a result that is one of them is the value itself. ``trace``,
    ``lower`` and ``compile`` stop at a stage. See ``function`` for the options.
    """

    def __init__(
        self,
        body: Callable[..., Any],
        options: Options,
        skip_passes: Collection[str] = (),
        static: StaticArguments = NO_ARGUMENTS,
    ) -> None:
        check_names(skip_passes)
        functools.update_wrapper(self, body)
        self.body = body
        self.options = options
        self.skip_passes = tuple(skip_passes)
        self._signature = signature_of(body)
        options.check_names(self._signature)
        self.static = static
        self._programs: dict[Any, Program] = {}
        self._inlined: dict[Any, tuple[Traced, Callable[..., Any]]] = {}
        self._recent: Program | None = None
        self._kinds: ProgramLookup[CallKind] = ProgramLookup(QUICK_CALLS)
        self._body_with_objects = with_objects(body)
        self._takes_objects = False
        self._weak: weakref.ref[Function] = weakref.ref(self)
        self._recompilations = Recompilations(options.name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run on arrays; inside another traced function, become part of it."""
        if scope.current() is not None:
            return self._inside(args, kwargs)
        try:
            if self.static.names:
                args, kwargs = self.static.marked(args, kwargs)
            return self._run_any(args, kwargs)
        except Exception as error:
            trim_frames(error, keep=0)
            raise

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """A function in a class is a method of its instances."""
        return self if instance is None else MethodType(self, instance)

    # --- the stages of a call that is not made

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """Trace for these arguments, or ``jax.ShapeDtypeStruct`` s."""
        return self._on_call(self._trace, args, kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Trace, run the passes and lower for these arguments."""
        return self.trace(*args, **kwargs).lower()

    def compile(self, *args: Any, **kwargs: Any) -> Compiled:
        """Trace, lower and compile for these arguments; a call finds the program.

        Arrays and ``jax.ShapeDtypeStruct`` of the same types and layouts share one.
        """
        return self._on_call(self._program, args, kwargs).compiled

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The result of such a call with arrays as ``jax.ShapeDtypeStruct`` s."""
        return self.trace(*args, **kwargs).out_info

    def num_programs(self) -> int:
        """How many programs were compiled for calls so far."""
        return len({id(program.compiled) for program in self._programs.values()})

    @property
    def last(self) -> Compiled | None:
        """The program that served the last call."""
        return self._recent.compiled if self._recent else None

    def clear_cache(self) -> None:
        """Forget all programs; the next call traces and compiles again."""
        self._programs.clear()
        self._inlined.clear()
        self._kinds = ProgramLookup(QUICK_CALLS)
        self._recent = None

    # --- calls on arrays

    def _run_any(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a program, or become part of one that JAX traces."""
        if traces.jit_is_disabled():
            return self._run_eagerly(args, kwargs)
        if traces.is_tracing():
            return self._under_jax(args, kwargs)
        if self._takes_objects:
            return self._with_objects(self._run_arrays, args, kwargs)
        return self._run_arrays(args, kwargs)

    def _run_arrays(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a program of the arrays; an error names the operation that it is of."""
        try:
            return self._run_compiled(args, kwargs)
        except traces.InternalFloatingPointError as error:
            precise = self._where_not_finite(error, args, kwargs)
            raise precise from precise.__cause__  # which has the user's line
        except traces.InvalidInputException:
            self._flatten(args, kwargs).check_values()
            raise
        except (ValueError, RuntimeError) as error:
            if "deleted" in str(error):
                self._flatten(args, kwargs).check_values()
            raise

    def _run_compiled(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        kind = self._kinds.find(context_key(), tree, leaves)
        if kind is not None:
            try:
                kind.check(leaves)
                return self._run(kind, kind.arrays_of(leaves), args, kwargs)
            except ProgramMismatch:
                pass
        return self._run_new(args, kwargs)

    def _run_new(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if changes_in_place((args, kwargs)):
            self._takes_objects = True
            return self._with_objects(self._run_arrays, args, kwargs)
        call, context = self._flatten(args, kwargs), context_key()
        program = self._program(call, to_run=True)
        if jax.process_count() > 1:
            check_processes(call, program.compiled.traced)
        kind = CallKind.of(program, call)
        leaves, tree = jax.tree.flatten((args, kwargs))
        arrays = kind.arrays_of(leaves)
        program.compiled.dispatch.accept(arrays)
        self._kinds.add(context, tree, leaves, kind)
        self._recent = program
        return self._run(kind, arrays, args, kwargs)

    def _run(self, kind: CallKind, arrays: list[Any], args: Any, kwargs: Any) -> Any:
        """Run the program of one kind of calls; ``ProgramMismatch`` for another."""
        program, compiled = kind.program, kind.program.compiled
        traced = compiled.traced
        values = values_of(args, kwargs) if traced.origin.writes else ()
        _ran.append(self._weak)
        parameters = self._parameters(traced) if traced.origin.parameters else ()
        traced.closure.warn(self.options.name)
        result = compiled.run(arrays, parameters, values)
        self._recent = program
        return result

    def _flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        return flatten_args(argument_names(self._signature, len(args)), args, kwargs)

    def _parameters(self, traced: Traced) -> tuple[Any, ...]:
        """The arrays of the parameter inputs of a program."""
        return tuple(
            tensor.materialize() for tensor in traced.origin.parameters.values()
        )

    def _program(self, call: Call, *, to_run: bool = False) -> Program:
        """The program of a call, compiled unless an equal call has one."""
        key = self._key(call)
        if key not in self._programs:
            traced = self._trace(call)
            if to_run:
                traced.require_devices()
            placed = self._key(traced.call_as_placed())
            program = self._programs.get(placed)
            if program is None and to_run:
                others = [*self._programs.values()]
                self._recompilations.log(traced.call, key, placed, others)
            compiled = program.compiled if program else traced.lower().compile()
            new = Program(traced.call, key, placed, compiled)
            # Another thread may have compiled this program in the meantime.
            if self._programs.setdefault(key, new) is new:
                self._programs.setdefault(placed, new)
        return self._programs[key]

    def _trace(self, call: Call) -> Traced:
        call = call.abstract()
        body, options = self._for_objects(call)
        statics = (s.value for a in call.arguments for _, s in a.statics)
        closure = Closure(self.body, *statics)
        with changes_explained(), methods_explained():
            try:
                found = trace(body, call, options)
            except (UnconnectedGradientError, jax.errors.UnexpectedTracerError):
                closure.check()  # it was traced twice, and read its own results
                raise
        closure.keep((*found.graph.captured, *found.parameters.values()))
        return Traced(call, found, self.skip_passes, closure)

    def _key(self, call: Call) -> Any:
        return (context_key(), call.key())

    # --- calls that run operation by operation

    def _run_eagerly(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with self._objects_split(args, kwargs) as split:
            call = self._flatten(split.args, split.kwargs)
            body, options = self._for_objects(call)
            values = values_of(split.args, split.kwargs)
            with changes_explained(), methods_explained():
                result = run_eagerly(body, call, options, values, self._parameter)
            return finish(split, result)

    def _where_not_finite(
        self, error: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> FloatingPointError:
        """The error of the operation that first makes a NaN or infinity."""
        call = self._flatten(args, kwargs)
        try:
            with jax.debug_nans(False), jax.debug_infs(False):
                traced, program = self._jitted(call)
            with jax.disable_jit():
                self._outputs(call, traced, program)
        except FloatingPointError as precise:
            return precise
        except RuntimeError:
            pass  # an array was donated
        name = self.options.name
        return FloatingPointError(f"invalid value ({error.ty}) encountered in {name!r}")

    def _parameter(self, name: str, declared: DistTensor) -> Any:
        """The array of one parameter."""
        del name
        return declared.materialize()

    # --- calls in another function

    def _inside(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Become part of the function that Tessera is tracing, layouts and all."""
        plan, own = scope.current_plan(), dict(self.options.compiler_options)
        if not own.items() <= dict(plan.compiler_options or ()).items():
            raise SettingConflictError(
                "options of the compiler are for whole programs, and this function "
                "becomes part of another one",
                got=f"{self.options.name!r}, compiler_options {own}",
                fix="give them to the function that calls it",
            )
        if not self.options.lays_out:
            body, here = scope.resolve_callee(self.body), scope.current()
            # The sizes of one microbatch differ from those of the annotations.
            check = here is not None and here.is_whole_batch
            binding = bind(body, args, kwargs, name=self.options.name, check=check)
            result = body(*args, **kwargs)
            binding.check_result(result)
            return result
        return self._with_objects(self._inside_laid_out, args, kwargs)

    def _inside_laid_out(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        call = self._flatten(args, kwargs)
        body = self._body_with_objects if call.has_objects else self.body
        values = values_of(args, kwargs)
        return inline(scope.resolve_callee(body), call, self.options, values)

    def _under_jax(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Become part of what JAX, not Tessera, is tracing or transforming."""
        with self._objects_split(args, kwargs) as split:
            call = self._flatten(split.args, split.kwargs)
            traced, program = self._jitted(call)
            outputs = self._outputs(call, traced, program)
            origin, values = traced.origin, values_of(split.args, split.kwargs)
            write_back(origin.writes, origin.written(outputs), values)
            return finish(split, origin.unflatten(outputs))

    def _jitted(self, call: Call) -> tuple[Traced, Callable[..., Any]]:
        """The traced program, and the same as ``jax.jit`` takes it."""
        key = self._key(call)
        if key in self._inlined:
            return self._inlined[key]
        traced = self._trace(call)
        program = jitted(
            traced.origin,
            traced.graph,
            traced.call,
            is_nested=True,
            inline=self.options.is_inlined,
            compiler_options=dict(self.options.compiler_options),
        )
        if not any(isinstance(a, jaxprs.Tracer) for a in traced.graph.captured):
            self._inlined[key] = traced, program  # else valid for this trace only
        return traced, program

    def _outputs(
        self, call: Call, traced: Traced, program: Callable[..., Any]
    ) -> list[Any]:
        """What such a program gives for the arrays of a call."""
        parts = [argument.own_part() for argument in call.arguments]
        captured = traced.graph.captured
        check_captured(captured)
        return program(*parts, self._parameters(traced), captured)

    # --- calls with objects

    def _objects_split(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> AbstractContextManager[ObjectCall]:
        """The arguments without objects: with mutable arrays where JAX transforms."""
        has_layouts = self.options.lays_out or self.options.strategy is not None
        keeps = traces.is_tracing() and not has_layouts
        return objects_split(args, kwargs, keeps_references=keeps)

    def _with_objects(
        self, run: _Run, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """The result of ``run`` on arrays in place of NNX objects, with its objects."""
        with objects_split(args, kwargs) as call:
            return finish(call, run(call.args, call.kwargs))

    def _on_call(
        self,
        stage: Callable[[Call], _Result],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> _Result:
        """The result of a phase for a call that is not made."""
        if self.static.names:
            args, kwargs = self.static.marked(args, kwargs)
        try:
            with objects_split(args, kwargs) as call:
                return stage(self._flatten(call.args, call.kwargs))
        except Exception as error:
            trim_frames(error)  # those that called this one follow
            raise

    def _for_objects(self, call: Call) -> tuple[Callable[..., Any], Options]:
        """The body and the options for a call, in which there may be objects."""
        if not call.has_objects:
            return self.body, self.options
        return self._body_with_objects, self.options.for_objects(call)


def last_run() -> Compiled | None:
    """The program that began to run last; None before the first call of any."""
    function = _ran[-1]() if _ran else None
    return None if function is None else function.last
