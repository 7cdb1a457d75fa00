# SPDX-License-Identifier: Apache-2.0
"""``Traced``, ``Lowered``, ``Compiled``: the phases of a step, as in ``jax.stages``.

``f.trace(x)`` gives ``Traced``, its ``.lower()`` gives ``Lowered``, whose
``.compile()`` gives ``Compiled``. Each has ``as_text()``.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import jax

from tessera.analysis.memory import Memory, memory
from tessera.errors import DeviceMemoryError, OutsideTraceError
from tessera.graph.ir import Graph, Role
from tessera.graph.lower.dispatch import Dispatch
from tessera.graph.lower.lower_to_jit import (
    check_layouts,
    compile_lowered,
    lower,
    traced_for_arrays,
)
from tessera.graph.lower.stage_collectives import check_stages
from tessera.graph.pass_runner import PassRecord, check_names, run_passes
from tessera.graph.stage_arguments import OfArguments
from tessera.graph.tracer.arguments import (
    Call,
    check_same_types,
    flatten_args,
    values_of,
)
from tessera.graph.tracer.closure_changes import Closure
from tessera.graph.tracer.tracer import Trace
from tessera.graph.tracer.write_back import check_no_alias, write_back
from tessera.jax_compat import jaxprs, traces
from tessera.mesh import Mesh
from tessera.shard import DistTensor, capturing
from tessera.targets.target import Target
from tessera.tracing.mutable_arrays import check_captured
from tessera.tracing.object_arguments import (
    as_it_is,
    objects_split,
)
from tessera.tracing.scope import transforming

if TYPE_CHECKING:
    from tessera.analysis.ledger import Ledger
    from tessera.analysis.timeline.timeline import Timeline


@dataclass(frozen=True)
class Traced(OfArguments):
    """A step traced for the arguments of one call.

    Attributes:
      call: The arguments, flattened.
      origin: The graph as traced, its parameters and the tree of its result.
      skip_passes: Passes to leave out, by name.
      closure: The arrays that the step closes over, and where it does.
    """

    call: Call
    origin: Trace
    skip_passes: Collection[str] = ()
    closure: Closure = field(default_factory=Closure)

    @cached_property
    def passes(self) -> tuple[PassRecord, ...]:
        """The graph as traced, then after each pass, with times."""
        graph = self.origin.graph
        with capturing(_refuse_tensor), transforming(graph.mesh):
            return run_passes(graph, skip=self.skip_passes)

    @property
    def graph(self) -> Graph:
        """The graph after every pass."""
        return self.passes[-1].graph

    def as_text(self) -> str:
        """The graph as traced: inputs with layouts, equations with source lines."""
        return self.origin.graph.as_text()

    def diff(self, name: str) -> str:
        """The lines of the graph that one pass changed, as a unified diff.

        Raises:
          UnknownPassError: [T307] there is no such pass.
        """
        check_names([name])
        index = [record.name for record in self.passes].index(name)
        return self.passes[index].diff(self.passes[index - 1].graph)

    def require_devices(self) -> None:
        """Check that the program can run here.

        Raises:
          AbstractMeshError: [T105] its mesh has devices that this machine lacks.
          jax.errors.UnexpectedTracerError: It closes over a value of an ended trace.
        """
        for array in self.origin.graph.captured:
            if isinstance(array, jaxprs.Tracer):
                raise traces.escaped_tracer_error(array)
        if self.origin.graph.mesh is not None:
            self.origin.graph.mesh.jax  # noqa: B018 - raises

    def call_as_placed(self) -> Call:
        """The call with its uncommitted arrays in the step's layouts.

        Such a call has the same program.
        """
        inputs = self.origin.graph.inputs[: len(self.call.leaves)]
        return self.call.laid_out([self.origin.graph.sharding(v) for v in inputs])

    @property
    def jaxpr(self) -> Any:
        """The function as it was traced, as a jaxpr of its arrays."""
        return self.origin.graph.program

    def lower(
        self,
        *,
        lowering_platforms: tuple[str, ...] | None = None,
        _private_parameters: Any = None,
    ) -> Any:
        """Run the passes and lower the result to ``jax.jit``.

        Args:
          lowering_platforms: Platforms to lower for, as ``jax.export`` does; the
            result is that of ``jax.jit``, and cannot be compiled to run here.

        Returns:
          A ``Lowered``.

        Raises:
          OutsideTraceError: [T302] it is lowered for ``jax.export``, and there are
            parameters of a step or arguments that are no arrays.
        """
        if lowering_platforms is None and _private_parameters is None:
            return Lowered(self, lower(self.origin, self.graph, self.call))
        return self._of_arrays().lower(
            lowering_platforms=lowering_platforms,
            _private_parameters=_private_parameters,
        )

    def _of_arrays(self) -> jax.stages.Traced:
        """The function as ``jax.jit`` of its own arguments, all of them arrays."""
        if self.origin.parameters or any(a.statics for a in self.call.arguments):
            raise OutsideTraceError(
                f"{self.fun_name!r} is not a function of arrays alone",
                got="parameters of a step, or arguments that are no arrays",
                fix="export a function that closes over what is no array",
            )
        return traced_for_arrays(self.origin, self.graph, self.call)


def _refuse_tensor(tensor: DistTensor) -> NoReturn:
    raise OutsideTraceError(
        f"{tensor.described} is used in a derivative rule that closes over it",
        got=repr(tensor),
        fix="pass it to the function that has the rule, as an argument",
    )


@dataclass(frozen=True)
class Lowered(OfArguments):
    """A step as StableHLO with the declared shardings, before XLA partitions it."""

    traced: Traced
    jax: jax.stages.Lowered

    def as_text(self, dialect: str | None = None, *, debug_info: bool = False) -> str:
        """The StableHLO module, or that of another dialect: ``hlo``."""
        return self.jax.as_text(dialect, debug_info=debug_info)

    def compiler_ir(self, dialect: str | None = None) -> Any:
        """The module as an object of JAX's compiler interface."""
        return self.jax.compiler_ir(dialect)

    def cost_analysis(self) -> Any:
        """What XLA estimates of the module before it is compiled."""
        return self.jax.cost_analysis()

    def compile(
        self, compiler_options: Mapping[str, bool | str] | None = None
    ) -> "Compiled":
        """Compile it, and check the layouts that XLA chose.

        Args:
          compiler_options: Options of XLA for this program, by name.

        Raises:
          LayoutMismatchError: [T205] a compiled layout is not the declared one.
          StageCollectiveError: [T314] a pipeline would deadlock.
          DeviceMemoryError: [T509] the devices of the mesh's target do not hold it.
        """
        graph = self.traced.graph
        try:
            compiled = compile_lowered(graph, self.jax, compiler_options or {})
        except jax.errors.JaxRuntimeError as error:
            if graph.mesh is None or graph.mesh.target is None:
                raise
            raise _not_compiled(error, graph.mesh.target) from error
        check_layouts(graph, compiled)
        check_stages(graph, compiled)
        return Compiled(self.traced, compiled)


def _not_compiled(error: Exception, target: Target) -> Exception:
    """T509 where the compiler of a target says that memory is exceeded."""
    text = str(error).partition("\n")[0]
    if "RESOURCE_EXHAUSTED" not in text:
        return error
    return DeviceMemoryError(
        f"the program does not fit into the memory of a device of {target}",
        got=text.replace("RESOURCE_EXHAUSTED: ", ""),
        fix="use training.remat=full, a smaller microbatch, or a mesh that splits the "
        "model over more devices with fsdp or tp",
    )


@dataclass(frozen=True)
class Compiled(OfArguments):
    """A step as the program that each device runs."""

    traced: Traced
    jax: jax.stages.Compiled

    def as_text(self) -> str:
        """The optimized HLO module of one device."""
        return self.jax.as_text() or ""

    @cached_property
    def collectives(self) -> "Ledger":
        """The ledger: every collective, its axes, bytes, line, and why it is there."""
        # Imported here, because a program that only runs does not need them.
        from tessera.analysis.ledger import collectives
        from tessera.analysis.sharding_constraints import declared_layouts

        graph = self.traced.graph
        mesh = graph.mesh or Mesh(("device",), devices=(0,))
        inside = declared_layouts(graph.program)
        results = [value.spec for value in graph.outputs if value.spec is not None]
        names = ([v.name for v in graph.inputs], [v.name for v in graph.outputs])
        return collectives(self.jax, mesh, inside, results, names)

    @cached_property
    def timeline(self) -> "Timeline":
        """What one execution on the target of its mesh takes, and when, as predicted.

        Raises:
          NoTargetError: [T713] its mesh has no target.
        """
        from tessera.analysis.timeline.prediction import timeline

        graph = self.traced.graph
        mesh = graph.mesh or Mesh(("device",), devices=(0,))
        return timeline(self.as_text(), mesh)

    @cached_property
    def memory(self) -> Memory:
        """Bytes per device: arguments, outputs, temporaries, peak."""
        return memory(self.jax, self.traced.graph.device_kind)

    @cached_property
    def captured(self) -> tuple[Any, ...]:
        """The closed-over arrays, where the program takes them.

        They are put there once: NumPy's would go to the device at every call.
        """
        graph = self.traced.graph
        inputs = [value for value in graph.inputs if value.role is Role.CAPTURED]
        return tuple(
            array
            if isinstance(array, jax.Ref)
            else jax.device_put(array, graph.sharding(value))
            for value, array in zip(inputs, graph.captured, strict=True)
        )

    @cached_property
    def dispatch(self) -> Dispatch:
        """Runs it for the arrays of calls, at the least cost on the host.

        Raises:
          AbstractMeshError: [T105] its mesh has devices that this machine lacks.
        """
        self.traced.require_devices()
        origin = self.traced.origin
        num_arrays = len(self.traced.call.leaves)
        result = origin.result.structure if self._returns_result else None
        return Dispatch(
            self.jax, num_arrays, len(origin.parameters), len(self.captured), result
        )

    def run(
        self, arrays: list[Any], parameters: tuple[Any, ...], values: Sequence[Any]
    ) -> Any:
        """The function's result; what it assigns into its arguments is there, too.

        Args:
          arrays: Of the arguments, in order.
          parameters: The arrays of its parameters.
          values: The arguments themselves.

        Raises:
          ProgramMismatch: It was not compiled for such arrays; nothing has run.
        """
        if self._returns_result:
            return self.dispatch(arrays, parameters, self.captured)
        origin = self.traced.origin
        check_no_alias(origin.writes, values)
        check_captured(self.captured)
        outputs = self.dispatch(arrays, parameters, self.captured)
        write_back(origin.writes, origin.written(outputs), values)
        return origin.unflatten(outputs)

    @cached_property
    def _returns_result(self) -> bool:
        """Whether the program's outputs are the result, and there is no more to do."""
        origin = self.traced.origin
        has_objects = origin.restore is not as_it_is
        has_references = any(isinstance(array, jax.Ref) for array in self.captured)
        return not (
            origin.writes or origin.result.statics or has_objects or has_references
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it for such arguments as it was compiled for, without static ones.

        Those are static that ``static_argnums`` or ``static_argnames`` declare so; a
        Python number among the others is given again.

        Raises:
          AbstractMeshError: [T105] its mesh has devices that this machine lacks.
          ArgumentError: [T301] it was compiled for other arguments.
          OutsideTraceError: [T302] it has parameters, which the step holds.
        """
        origin, expected = self.traced.origin, self.traced.call
        if origin.parameters:
            raise OutsideTraceError(
                f"the program of step {self.traced.fun_name!r} is called without it",
                got="a Compiled, which does not have the step's parameters",
                fix="call the step itself: it finds the program",
            )
        args, kwargs = expected.with_static_arguments(args, kwargs)
        with objects_split(args, kwargs) as split:
            names = [argument.name for argument in expected.arguments]
            count = len(split.args)
            names = [*names[:count], *["args"] * (count - len(names))]
            call = flatten_args(names, split.args, split.kwargs)
            check_same_types(expected, call)
            arrays = [leaf.value for leaf in call.leaves]
            values = values_of(split.args, split.kwargs)
            self.dispatch.accept(arrays)
            return split.finish(self.run(arrays, (), values))

    def cost_analysis(self) -> Any:
        """What XLA estimates of the program."""
        return self.jax.cost_analysis()

    def memory_analysis(self) -> Any:
        """What XLA says of the program's memory; see ``memory``."""
        return self.jax.memory_analysis()

    @property
    def input_shardings(self) -> Any:
        """``(args, kwargs)``, with the layout of each array; None for an unused one."""
        found = self.jax.in_tree.flatten_up_to(self.jax.input_shardings)
        return self.traced.call.rebuilt(found[: len(self.traced.call.leaves)])

    @property
    def output_shardings(self) -> Any:
        """The result, with the layout of each array."""
        return self.traced.origin.unflatten(self.jax.output_shardings)

    def runtime_executable(self) -> Any:
        """The executable of JAX's runtime."""
        return self.jax.runtime_executable()
