# SPDX-License-Identifier: Apache-2.0
"""``Graph``, the intermediate representation that every phase takes and returns.

A graph is a jaxpr, the mesh it runs on, and a description of each input and output: its
name in the user's tree, its role, and its layout. It is immutable: every pass returns
another graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from tessera.graph.captures import lift_captures, snapshot
from tessera.jax_compat import jaxprs, traces
from tessera.mesh import Mesh
from tessera.ops.operand_layouts import layout_of
from tessera.shard_spec import spec_on
from tessera.tracing.scope import Plan


class Role(Enum):
    """What an input of a graph is."""

    ARGUMENT = "argument"
    PARAMETER = "parameter"
    CAPTURED = "captured"


@dataclass(frozen=True, slots=True)
class Value:
    """One input or output of a graph.

    Attributes:
      name: Its path in the user's tree: ``batch/tokens``, ``encoder/block/up``.
      aval: Global shape and dtype.
      spec: Its layout over the graph's mesh; None leaves it to the partitioner.
      role: What kind of input it is; outputs are arguments of whatever comes next.
      donated: Whether its memory may be used for the outputs.
      gradient: The layout of a gradient by it, where that is not its own.
    """

    name: str
    aval: Any
    spec: PartitionSpec | None = None
    role: Role = Role.ARGUMENT
    donated: bool = False
    gradient: PartitionSpec | None = None

    @property
    def on_host(self) -> bool:
        """Whether its type places it in host memory."""
        return jaxprs.on_host(self.aval)

    @property
    def is_ref(self) -> bool:
        """Whether it is a mutable array."""
        return traces.is_reference(self.aval)

    def type_on(self, mesh: Mesh | None) -> Any:
        """Its type in a program: over Explicit axes it has the layout."""
        struct = jaxprs.struct(self.aval)
        if mesh is None or not mesh.explicit_axes or self.spec is None or self.is_ref:
            return struct
        whole = [None] * (len(struct.shape) - len(self.spec))  # as in types of JAX
        spec = self.spec.update(partitions=(*self.spec.partitions, *whole))
        kind = jaxprs.HOST_MEMORY if self.on_host else None
        return struct.update(
            sharding=NamedSharding(mesh.compile_mesh, spec, memory_kind=kind)
        )

    def describe(self) -> str:
        """``batch/tokens: int32[8,16] over P('dp',)`` (role)."""
        shape = ",".join(map(str, self.aval.shape))
        where = "undeclared" if self.spec is None else str(self.spec)
        where += " on the host" if self.on_host else ""
        role = "" if self.role is Role.ARGUMENT else f" ({self.role.value})"
        return f"{self.name}: {self.aval.dtype.name}[{shape}] over {where}{role}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A traced step: its equations, its mesh, and where its values live.

    Attributes:
      name: The user's function.
      program: Its jaxpr, without constants: captured arrays are inputs.
      mesh: The mesh it runs on; None is the default device.
      inputs: One entry for each input of the program, in order.
      outputs: One entry for each output of the program, in order.
      captured: The closed-over arrays, one for each captured input; these come last.
      plan: The schedule that ``tessera.schedule`` declared.
      microbatch: The program of one microbatch, where the step has a pipeline that is
        not scheduled yet.
    """

    name: str
    program: jaxprs.Program
    mesh: Mesh | None
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    captured: tuple[Any, ...] = ()
    plan: Plan = field(default_factory=Plan)
    microbatch: jaxprs.Program | None = None

    @property
    def platform(self) -> str:
        """What it is compiled for: ``cpu``, ``gpu`` or ``tpu``."""
        return self._device.platform

    @property
    def device_kind(self) -> str:
        """The model of the devices, such as ``NVIDIA H200``."""
        return self._device.device_kind

    @property
    def has_references(self) -> bool:
        """Whether it takes mutable arrays."""
        return any(value.is_ref for value in self.inputs)

    @property
    def _device(self) -> jax.Device:
        if self.mesh is None:
            return jax.devices()[0]
        return self.mesh.compile_mesh.devices.flat[0]

    def with_program(self, program: jaxprs.Program) -> "Graph":
        """The same graph with another program, whose constants become inputs.

        A pass finds such constants where a user's derivative rule closes over arrays.
        """
        program, found = lift_captures(program)
        if program is self.program and not found:
            return self
        more = [
            captured_input(index, array, self.mesh)
            for index, array in enumerate(found, len(self.captured))
        ]
        return replace(
            self,
            program=program,
            inputs=(*self.inputs, *more),
            captured=(*self.captured, *map(snapshot, found)),
        )

    def with_outputs(self, outputs: Sequence[Value]) -> "Graph":
        """The same graph with other descriptions of its outputs."""
        return replace(self, outputs=tuple(outputs))

    def sharding(self, value: Value) -> NamedSharding | None:
        """The sharding of an input or output, or None where none is declared.

        On an abstract mesh it is one to compile for and never to run on.
        """
        if self.mesh is None or value.spec is None:
            return None
        kind = jaxprs.HOST_MEMORY if value.on_host else None
        return NamedSharding(self.mesh.compile_mesh, value.spec, memory_kind=kind)

    def as_text(self) -> str:
        """Inputs with their layouts, then the equations with the user's lines."""
        where = self.mesh.topology if self.mesh is not None else "one device"
        lines = [f"step {self.name} on {where}", *self._plan_as_text()]
        lines += ["inputs:"]
        lines += [f"  {value.describe()}" for value in self.inputs]
        lines += ["outputs:"]
        lines += [f"  {value.describe()}" for value in self.outputs]
        lines += ["equations:", jaxprs.pretty(self.program)]
        return "\n".join(lines)

    def _plan_as_text(self) -> list[str]:
        """The declared schedule; no line where none is declared."""
        options = [
            f"{field.name}={value}"
            for field in fields(self.plan)
            if (value := getattr(self.plan, field.name)) is not None
        ]
        if self.plan.all_reduce_overlap and self.platform == "cpu":
            options.append("(no collective of a CPU runs beside computation)")
        return [f"schedule: {' '.join(options)}"] if options else []


def captured_input(index: int, array: Any, mesh: Mesh | None) -> Value:
    """The input that stands for a closed-over array, laid out as the array is."""
    layout = layout_of(array)
    spec = None if mesh is None else PartitionSpec()
    if layout is not None:
        spec = layout[1] if mesh is None else spec_on(layout[1], layout[0], mesh)
    return Value(f"captured_{index}", jax.typeof(array), spec, Role.CAPTURED)


def verify(graph: Graph) -> None:
    """Check the invariants of a graph; a failure is a bug of the phase before.

    A jaxpr has the inputs and outputs of its graph, and no constants, and is well
    formed. The latter is checked with ``jax_enable_checks`` alone, as JAX checks its
    own: it takes as long as a trace.
    """
    jaxprs.check(graph.program)
    assert not jaxprs.constants(graph.program), "captured arrays must be inputs"
    for kind, described, variables in (
        ("input", graph.inputs, jaxprs.inputs(graph.program)),
        ("output", graph.outputs, jaxprs.outputs(graph.program)),
    ):
        assert len(described) == len(variables), (
            f"{len(described)} {kind}s described, {len(variables)} in the program"
        )
        for value, variable in zip(described, variables, strict=True):
            assert (value.aval.shape, value.aval.dtype) == (
                variable.aval.shape,
                variable.aval.dtype,
            ), f"{kind} {value.name!r} is described as {value.aval}, is {variable.aval}"
