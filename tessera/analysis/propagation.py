# SPDX-License-Identifier: Apache-2.0
"""Shows the layout of every operation's result, before the program is partitioned.

A few declared layouts decide all others: Shardy, XLA's partitioner, propagates them
from operation to operation. This runs only the propagation and reads its result, so
that a program can be shown with a layout on each line and the user's line beside it.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import PartitionSpec

from tessera.analysis.source_lines import StackFrame, short, user_line
from tessera.analysis.tables import aligned
from tessera.jax_compat import mlir
from tessera.mesh import Mesh
from tessera.shard_spec import spec_of_axes

_SHARDING = re.compile(r"<(?:@[^,]+|mesh<.*?>), \[(.*?)\]")
_DIM = re.compile(r"\{([^}]*)\}")
_AXIS = re.compile(r'"([^"]+)"(:\(\d+\)(\d+))?')
_OMITTED = ("constant", "return")
_CONTROL_FLOW = ("while", "case", "if")


@dataclass(frozen=True, slots=True)
class OpLayout:
    """One result of one operation, and its layout over the mesh.

    Attributes:
      op: The operation, such as ``dot_general``; ``input`` and ``output`` for the
        program's own arguments and results.
      dtype: Such as ``bf16``.
      shape: Global shape; in an SPMD region the shape of one device's block.
      spec: Mesh axes of each dim.
      local_shape: Shape on one device.
      manual_axes: The axes of the SPMD region that contains the operation. ``shape`` is
        already split over them and ``spec`` does not mention them.
      path: JAX's name stack, such as ``jit(step)/transpose(jvp())/dot_general``.
      source: ``file:line`` of the user's line, or ``""``.
    """

    op: str
    dtype: str
    shape: tuple[int, ...]
    spec: PartitionSpec
    local_shape: tuple[int, ...]
    manual_axes: tuple[str, ...]
    path: str
    source: str

    def cells(self) -> list[str]:
        """The row of a table: operation, type, layout, per-device type, line, path."""
        manual = f", manual {'×'.join(self.manual_axes)}" if self.manual_axes else ""
        return [
            self.op,
            _typed(self.dtype, self.shape),
            f"P({', '.join(map(repr, self.spec))}){manual}",
            _typed(self.dtype, self.local_shape),
            short(self.source) or "?",
            self.path,
        ]


def op_layouts(lowered: jax.stages.Lowered, mesh: Mesh) -> tuple[OpLayout, ...]:
    """The layout that the partitioner will give every operation of a lowered program.

    Args:
      lowered: From ``jax.jit(f).lower(...)``; it is not changed and can be compiled
        afterwards.
      mesh: The mesh of the program. It may be abstract.

    Returns:
      Inputs, operations in program order, outputs. The bodies of loops and functions
      are listed once, where they are first reached; further calls are single rows.
      Constants and the scalar functions of reductions are left out.
    """
    module = mlir.propagated_module(lowered)
    functions = {
        _symbol(op.attributes["sym_name"]): op
        for op in module.body.operations
        if op.operation.name == "func.func"
    }
    return tuple(_Walk(functions, mesh.shape).program(functions["main"]))


def as_text(layouts: Iterable[OpLayout]) -> str:
    """Layouts as a table."""
    header = ["operation", "result", "layout", "per device", "line", "path"]
    return aligned(header, [layout.cells() for layout in layouts])


@dataclass(frozen=True, slots=True)
class _Context:
    """What surrounds a block of operations."""

    prefix: str = ""
    source: str = ""
    manual_axes: tuple[str, ...] = ()


class _Walk:
    """One pass over a module's functions, in program order."""

    def __init__(self, functions: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        self._functions, self._sizes = functions, sizes
        self._entered: set[str] = set()

    def program(self, main: Any) -> Iterator[OpLayout]:
        """The function's inputs, its operations, its outputs."""
        (block,) = main.regions[0].blocks
        for value, attributes in _annotated(block.arguments, main, "arg_attrs"):
            name, _ = mlir.operation_place(value)
            yield self._layout("input", value, attributes, name)
        yield from self._inside(main, _Context())
        results = list(block.operations)[-1].operands
        for value, attributes in _annotated(results, main, "res_attrs"):
            name = re.search(r'jax.result_info = "([^"]*)"', attributes)
            yield self._layout("output", value, attributes, name[1] if name else "")

    def _inside(self, parent: Any, context: _Context) -> Iterator[OpLayout]:
        for region in parent.regions:
            for block in region.blocks:
                for op in block.operations:
                    yield from self._operation(op, context)

    def _operation(self, op: Any, context: _Context) -> Iterator[OpLayout]:
        name = op.operation.name.rpartition(".")[2]
        if name in _OMITTED:
            return
        path, stack = mlir.operation_place(op)
        path = context.prefix + path
        # A function that JAX lowers once for all its calls has no line of its own.
        source = user_line(StackFrame(*frame) for frame in stack) or context.source
        callee = _symbol(op.attributes["callee"]) if name == "call" else ""
        if callee and callee not in self._entered:
            self._entered.add(callee)
            inside = _Context(f"{path}/", source, context.manual_axes)
            yield from self._inside(self._functions[callee], inside)
        elif name == "manual_computation":
            names = _AXIS.findall(str(op.attributes["manual_axes"]))
            axes = (*context.manual_axes, *(name for name, _, _ in names))
            yield from self._inside(op, _Context(f"{path}/", source, axes))
        elif name in _CONTROL_FLOW:
            yield from self._inside(op, context)
        else:
            shardings = _result_shardings(op)
            for value, sharding in zip(op.results, shardings, strict=True):
                row = self._layout(_full_name(op, name), value, sharding, path)
                yield replace(row, source=source, manual_axes=context.manual_axes)

    def _layout(self, op: str, value: Any, sharding: str, path: str) -> OpLayout:
        shape = tuple(getattr(value.type, "shape", ()))
        spec, parts = _spec(sharding, len(shape), self._sizes)
        return OpLayout(
            op=op,
            dtype=_dtype(value.type),
            shape=shape,
            spec=spec,
            local_shape=tuple(
                -(-dim // n) for dim, n in zip(shape, parts, strict=True)
            ),
            manual_axes=(),
            path=path,
            source="",
        )


def _annotated(
    values: Iterable[Any], op: Any, attribute: str
) -> Iterator[tuple[Any, str]]:
    """Values with the text of each one's entry in a function's attribute."""
    entries = op.attributes.get(attribute, ())
    return itertools.zip_longest(values, map(str, entries), fillvalue="")


def _result_shardings(op: Any) -> list[str]:
    """The sharding of each of an operation's results, as text."""
    if "sharding" in op.attributes:  # a constraint has its one as its argument
        return [str(op.attributes["sharding"])]
    text = str(op.attributes.get("sdy.sharding", ""))
    shardings = [f"<@mesh, [{dims}]>" for dims in _SHARDING.findall(text)]
    return shardings or [""] * len(op.results)


def _spec(
    sharding: str, rank: int, sizes: Mapping[str, int]
) -> tuple[PartitionSpec, list[int]]:
    """A sharding's text as a spec, and the number of blocks along each dim."""
    match = _SHARDING.search(sharding)
    dims = [_AXIS.findall(dim) for dim in _DIM.findall(match[1])] if match else []
    dims += [[]] * (rank - len(dims))
    spec = spec_of_axes(tuple(axis + part for axis, part, _ in dim) for dim in dims)
    # A part of an axis, '"dp":(1)2', includes its own size.
    blocks = [math.prod(int(n or sizes[axis]) for axis, _, n in dim) for dim in dims]
    return spec, blocks


def _full_name(op: Any, name: str) -> str:
    """An operation's name, followed by that of the function it calls."""
    for attribute in ("call_target_name", "callee"):
        if attribute in op.attributes:
            return f"{name} {_symbol(op.attributes[attribute])}"
    return name


def _symbol(attribute: Any) -> str:
    return str(attribute).strip('@"')


def _dtype(kind: Any) -> str:
    name = str(getattr(kind, "element_type", kind))
    return "bool" if name == "i1" else name.replace("ui", "u")


def _typed(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"
