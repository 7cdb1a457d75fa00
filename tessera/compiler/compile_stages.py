# SPDX-License-Identifier: Apache-2.0
"""``Traced``, ``Lowered``, ``Compiled``: the phases of a step, as in ``jax.stages``.

``f.trace(x)`` gives ``Traced``, its ``.lower()`` gives ``Lowered``, whose
``.compile()`` gives ``Compiled``. Each has ``as_text()``.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NoReturn

import jax
import numpy as np

from tessera.analysis.memory import Memory, memory
from tessera.compiler.ir import Graph, Role
from tessera.compiler.lower.dispatch import Dispatch
from tessera.compiler.lower.jit import (
    check_layouts,
    compile_lowered,
    lower,
    returns_list,
)
from tessera.compiler.lower.stage_collectives import check_stages
from tessera.compiler.pass_runner import PassRecord, check_names, run_passes
from tessera.compiler.trace.arguments import Call
from tessera.compiler.trace.tracer import Trace
from tessera.errors import DeviceMemoryError, OutsideTraceError
from tessera.mesh import Mesh
from tessera.scope import alone_on, transforming
from tessera.shard import DistTensor, capturing, stored_tensor
from tessera.targets.target import Target

# Tables of schedules are small; others choose no branches.
_LARGEST_CONSTANT: Final = 2**16

if TYPE_CHECKING:
    from tessera.analysis.ledger import Ledger
    from tessera.analysis.timeline.report import Timeline


@dataclass(frozen=True)
class Traced:
    """A step traced for the arguments of one call.

    Attributes:
      call: The arguments, flattened.
      origin: The graph as traced, its parameters and the tree of its result.
      skip_passes: Passes to leave out, by name.
    """

    call: Call
    origin: Trace
    skip_passes: Collection[str] = ()

    @cached_property
    def passes(self) -> tuple[PassRecord, ...]:
        """The graph as traced, then after each pass, with times."""
        graph = self.origin.graph
        opened = alone_on if graph.is_deterministic else transforming
        with capturing(_refuse_tensor), opened(graph.mesh):
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
        """Raise [T105] where the step's mesh has devices that this machine lacks."""
        if self.origin.graph.mesh is not None:
            self.origin.graph.mesh.jax  # noqa: B018 - raises

    def call_as_placed(self) -> Call:
        """The call with its uncommitted arrays in the step's layouts.

        Such a call has the same program.
        """
        inputs = self.origin.graph.inputs[: len(self.call.leaves)]
        return self.call.laid_out([self.origin.graph.sharding(v) for v in inputs])

    def result(self, returned: Any) -> Any:
        """The function's result from what ``Compiled.outputs`` gives."""
        return self.origin.unflatten(returned) if self.returns_list else returned

    @cached_property
    def returns_list(self) -> bool:
        """Whether the program returns a list, and not the function's result."""
        return returns_list(self.origin, self.graph)

    def lower(self) -> "Lowered":
        """Run the passes and lower the result to ``jax.jit``."""
        return Lowered(self, lower(self.origin, self.graph, self.call))


def _refuse_tensor(tensor: DistTensor) -> NoReturn:
    raise OutsideTraceError(
        f"{tensor.described} is used in a derivative rule that closes over it",
        got=repr(tensor),
        fix="pass it to the function that has the rule, as an argument",
    )


@dataclass(frozen=True)
class Lowered:
    """A step as StableHLO with the declared shardings, before XLA partitions it."""

    traced: Traced
    jax: jax.stages.Lowered

    def as_text(self) -> str:
        """The StableHLO module."""
        return self.jax.as_text()

    def compile(self) -> "Compiled":
        """Compile it, and check the layouts that XLA chose.

        Raises:
          LayoutMismatchError: [T205] a compiled layout is not the declared one.
          StageCollectiveError: [T314] a pipeline would deadlock.
          DeviceMemoryError: [T509] the devices of the mesh's target do not hold it.
        """
        graph = self.traced.graph
        try:
            compiled = compile_lowered(graph, self.jax)
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
class Compiled:
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
        return collectives(self.jax, mesh, inside, results)

    @cached_property
    def timeline(self) -> "Timeline":
        """What one execution on the target of its mesh takes, and when, as predicted.

        Raises:
          NoTargetError: [T713] its mesh has no target.
        """
        from tessera.analysis.timeline.prediction import timeline

        graph = self.traced.graph
        mesh = graph.mesh or Mesh(("device",), devices=(0,))
        # JAX names the inputs by their position: captured arrays are the last part.
        last = len(self.traced.call.arguments) + 1
        constants = {
            f"parts[{last}][{index}]": np.asarray(array)
            for index, array in enumerate(graph.captured)
            if array.size <= _LARGEST_CONSTANT and array.dtype.kind in "iub"
        }
        return timeline(self.as_text(), mesh, constants)

    @cached_property
    def memory(self) -> Memory:
        """Bytes per device: arguments, outputs, temporaries, peak."""
        return memory(self.jax, self.traced.graph.device_kind)

    @cached_property
    def captured(self) -> tuple[Any, ...]:
        """The closed-over arrays, where the program takes them."""
        graph = self.traced.graph
        inputs = [value for value in graph.inputs if value.role is Role.CAPTURED]
        return tuple(
            array
            if (sharding := graph.sharding(value)) is None
            # Once, not at every call.
            else jax.device_put(array, sharding)
            for value, array in zip(inputs, graph.captured, strict=True)
        )

    def outputs(self, *parts: Any) -> Any:
        """Run it on the parts that ``lower`` describes; gives what it returns.

        Results that devices store padded are tensors, the others arrays.

        Raises:
          AbstractMeshError: [T105] its mesh has devices that this machine lacks.
        """
        self.traced.require_devices()
        return self.stored(self.jax(*parts))

    @cached_property
    def dispatch(self) -> Dispatch:
        """Runs it for the arrays of calls, at the least cost on the host.

        Raises:
          AbstractMeshError: [T105] its mesh has devices that this machine lacks.
        """
        self.traced.require_devices()
        origin = self.traced.origin
        num_arrays = len(self.traced.call.leaves)
        return Dispatch(
            self.jax, num_arrays, len(origin.parameters), len(self.captured)
        )

    @property
    def returns_result(self) -> bool:
        """Whether the program returns the function's result itself."""
        return not self._padded and not self.traced.returns_list

    def stored(self, returned: Any) -> Any:
        """What the program returns, with tensors for results that are stored padded."""
        if not self._padded:
            return returned
        graph = self.traced.graph
        return [
            stored_tensor(array, value.aval.shape, value.spec, graph.mesh)
            if value.spec is not None and graph.mesh and index in self._padded
            else array
            for index, (value, array) in enumerate(
                zip(graph.outputs, returned, strict=True)
            )
        ]

    @cached_property
    def _padded(self) -> frozenset[int]:
        """The results that devices store padded, by position."""
        graph = self.traced.graph
        every = enumerate(graph.outputs)
        return frozenset(index for index, value in every if graph.is_padded(value))

    def __call__(self, *parts: Any) -> Any:
        """Run it on the parts that ``lower`` describes; gives the function's result.

        Raises:
          AbstractMeshError: [T105] its mesh has devices that this machine lacks.
        """
        return self.traced.result(self.outputs(*parts))
