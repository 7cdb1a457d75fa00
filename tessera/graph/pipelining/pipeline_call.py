# SPDX-License-Identifier: Apache-2.0
"""Traces a pipelined call into one equation of the step.

The function is traced twice: for the whole batch, as it is written, and for one
device's rows of a microbatch. The second program is split into stages. Comparing the
two shows what in the stages mixes rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from operator import not_
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np
from jax.sharding import PartitionSpec

from tessera.errors import BatchSizeError, TesseraError
from tessera.graph.differentiation import differentiated
from tessera.graph.pipelining.batch_dims import BatchDims
from tessera.graph.pipelining.microbatches import check_batch
from tessera.graph.pipelining.pipeline_primitive import (
    PipelineCall,
    bind,
    check_results,
    first_line,
    struct_of,
    undecided_rows,
)
from tessera.graph.pipelining.split_stages import split_stages
from tessera.graph.rewriting import contains, inline_jits
from tessera.jax_compat import jaxprs
from tessera.ops.operand_layouts import layout_of
from tessera.shard_spec import axes_of_dims
from tessera.tracing import scope
from tessera.tracing.per_device_checks import check_microbatches

# A program, and the arrays that its function closes over: inputs after its own.
Traced: TypeAlias = tuple[jaxprs.Program, list[Any]]

# Not fsdp, which weights are sharded over.
_DATA_AXES = ("dp",)


class ArrayFunction(Protocol):
    """A function of arrays, and its arguments with their paths."""

    arrays: list[Any]
    paths: tuple[str, ...]

    def __call__(self, *arrays: Any) -> list[Any]:
        """The results for other arrays."""
        ...


def bind_unsplit(function: ArrayFunction, call: PipelineCall) -> list[Any]:
    """The results of a call for a microbatch of the step: only their types count."""
    program, captured = _traced(function, function.arrays)
    results = tuple(atom.aval for atom in jaxprs.outputs(program))
    return bind(replace(call, results=results), function.arrays, captured)


@dataclass(frozen=True)
class SplitCall:
    """A call, some of whose arguments are split into microbatches.

    Attributes:
      function: The function, with its arguments.
      by_row: For each of them, whether its leading dim is the batch dim.
      call: The call.
      names: The stages.
      here: The scope of the step.
    """

    function: ArrayFunction
    by_row: Sequence[bool]
    call: PipelineCall
    names: Sequence[str]
    here: scope.Scope

    def bind(self) -> list[Any]:
        """Bind the pipeline primitive; returns the call's results.

        Raises:
          PipelineFormError: [T312] the function is no chain of the stages.
          UndecidedRoleError: [T324] the arguments that have rows cannot be split.
          RandomNumbersError: [T211] every microbatch would draw the same numbers.
          BatchSizeError: [T503] the batch cannot be split into microbatches.
        """
        check_batch(self._rows, self.call.schedule.microbatches)
        before = self.here.snapshot()
        whole = self._of_batch(self._rows, before)
        call, captured = self._staged(self._data_axes)
        if call.data_axes and _uses_data_axes(call):
            self.here.restore(before)
            call, captured = self._staged(())
        if call.rows == call.parts > 1:  # JAX traces other equations for one row
            problem = self._problem_of_larger(whole, before)
        else:
            part = call.stages.program, captured
            problem = self._problem(whole, part, call.parts)
        call = replace(call, mixes=problem or "")
        return bind(call, self._data, [*self._others, *captured])

    # --- which rows

    @cached_property
    def _data(self) -> list[Any]:
        """The arguments that have rows."""
        return list(compress(self.function.arrays, self.by_row))

    @cached_property
    def _paths(self) -> list[str]:
        """Their paths."""
        return list(compress(self.function.paths, self.by_row))

    @cached_property
    def _others(self) -> list[Any]:
        return list(compress(self.function.arrays, map(not_, self.by_row)))

    @cached_property
    def _rows(self) -> int:
        """Rows of the whole batch."""
        pairs = zip(self._paths, self._data, strict=True)
        rows = {path: array.shape[0] for path, array in pairs}
        if len(set(rows.values())) == 1:
            return next(iter(rows.values()))
        raise BatchSizeError(
            f"the batch of pipeline {self.call.name!r} has several numbers of rows",
            got="\n".join(f"{path}: {count}" for path, count in rows.items()),
            fix="give each array one row for each example",
        )

    @property
    def _data_axes(self) -> tuple[str, ...]:
        """Axes that divide each microbatch's rows, and shard nothing else."""
        mesh, count = self.call.mesh, self.call.schedule.microbatches
        axes = tuple(a for a in _DATA_AXES if a in mesh.axes and a != self.call.axis)
        parts = mesh.axis_size(axes)
        return axes if parts > 1 and self._rows % (count * parts) == 0 else ()

    # --- its programs

    def _program(self, rows: int) -> Traced:
        """The function's program for some rows; its weights are inputs after those."""
        by_row = self.by_row
        # Those that have rows come first; the sort is stable.
        order = sorted(range(len(by_row)), key=lambda number: not by_row[number])

        def ordered(*arrays: Any) -> list[Any]:
            by_number = dict(zip(order, arrays, strict=True))
            return self.function(*(by_number[i] for i in range(len(order))))

        structs = [struct_of(array, rows) for array in self._data]
        structs += [struct_of(array, None) for array in self._others]
        return _traced(ordered, structs)

    def _of_batch(self, rows: int, before: tuple[Any, ...]) -> Traced:
        """The function's program as one device would run it, to compare with."""
        after, self.here.is_whole_batch = self.here.snapshot(), rows == self._rows
        self.here.restore(before)
        try:
            program, captured = self._program(rows)
        finally:
            self.here.is_whole_batch = True
            self.here.restore(after)
        return differentiated(program), captured

    def _staged(self, axes: tuple[str, ...]) -> tuple[PipelineCall, list[Any]]:
        """The call with its stages, and the arrays that the function closes over."""
        call = replace(self.call, rows=self._rows, data_axes=axes)
        part, self.here.is_whole_batch = call.rows // call.parts, False
        try:
            program, captured = self._program(part)
        except TesseraError:
            raise
        except (TypeError, ValueError) as error:  # it could be traced for the batch
            problem = f"{part} of {call.rows} rows: {first_line(error)}"
            raise undecided_rows(call.name, self._paths, problem) from error
        finally:
            self.here.is_whole_batch = True
        if call.parts > 1:
            number = len(jaxprs.inputs(program)) - len(self._data)
            check_microbatches(program, [True] * len(self._data) + [False] * number)
        staged = split_stages(differentiated(program), len(self._data), self.names)
        avals = [atom.aval for atom in jaxprs.outputs(staged.program)]
        check_results(avals, part)
        results = tuple(a.update(shape=(call.rows, *a.shape[1:])) for a in avals)
        layouts = tuple(map(_layout, (*self._others, *captured)))
        return replace(call, staged=staged, results=results, layouts=layouts), captured

    def _problem(self, whole: Traced, part: Traced, parts: int) -> str | None:
        """What in the stages mixes rows, or None."""
        if parts == 1:
            return None
        if len(whole[1]) != len(part[1]) or not all(map(_is_same, whole[1], part[1])):
            return "an array that it makes depends on the number of rows"
        programs = [
            jaxprs.without_dead_code(inline_jits(program), keep_inputs=True)
            for program, _ in (whole, part)
        ]
        return BatchDims(parts).find_mixing(*programs)

    def _problem_of_larger(self, whole: Traced, before: tuple[Any, ...]) -> str | None:
        """The same, by comparing the batch with a larger one."""
        rows = 2 * self._rows
        try:
            larger = self._of_batch(rows, before)
        except (TypeError, ValueError) as error:
            return f"for {rows} rows: {first_line(error)}"
        return self._problem(larger, whole, 2)


def _traced(function: Any, arrays: Sequence[Any]) -> Traced:
    structs = [struct_of(array, None) for array in arrays]
    return jaxprs.lift_constants(jax.make_jaxpr(function)(*structs))


def _is_same(first: Any, second: Any) -> bool:
    """Whether two traces closed over the same array."""
    if first is second:
        return True
    if isinstance(first, jaxprs.Tracer) or isinstance(second, jaxprs.Tracer):
        return False
    return first.shape == second.shape and np.array_equal(first, second)


def _uses_data_axes(call: PipelineCall) -> bool:
    """Whether stages use a data axis: in weights' layouts, in kernels."""
    program = call.stages.program
    if contains(program, jaxprs.is_shard_map):
        return True
    specs = call.layouts
    named = {a for spec in specs for names in axes_of_dims(spec, 0) for a in names}
    return not named.isdisjoint(call.data_axes)


def _layout(weight: Any) -> PartitionSpec:
    known = layout_of(weight)
    return PartitionSpec() if known is None else known[1]
