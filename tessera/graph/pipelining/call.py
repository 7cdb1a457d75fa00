# SPDX-License-Identifier: Apache-2.0
"""From a pipelined function and its arguments to one equation of the step.

Once it is known which arguments have the batch's rows, the function is traced twice:
for the whole batch, as it is written, and for the rows that one device has of a
microbatch. Its stages are cut from the second program. Beside the first it shows
whether they treat each row by itself; only then is it sure that a pipeline computes
what one device does, whatever the arguments are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from tessera import _jax, scope
from tessera.errors import BatchSizeError, PipelineFormError, TesseraError
from tessera.graph.differentiation import differentiated
from tessera.graph.pipelining.cutting import StagedProgram, cut
from tessera.graph.pipelining.mark import Decision, PipelineCall, bind, struct_of
from tessera.graph.pipelining.microbatches import check_batch
from tessera.graph.pipelining.rows import Rows
from tessera.graph.rewriting import contains, without_jits
from tessera.ops.layouts import layout_of
from tessera.spec import axes_of_dims

# Weights are split over fsdp, too.
_ROWS_ALONE = ("dp",)


class OfArrays(Protocol):
    """A function of arrays, and those that it is called with."""

    arrays: list[Any]

    def __call__(self, *arrays: Any) -> list[Any]:
        """Its results for other arrays."""
        ...


def marked_as_given(function: OfArrays, call: PipelineCall) -> list[Any]:
    """The results of a call whose arguments are not cut: they are just its types."""
    program, captured = _traced(function, function.arrays)
    results = tuple(atom.aval for atom in _jax.outputs(program))
    return bind(replace(call, results=results), function.arrays, captured)


@dataclass(frozen=True)
class Split:
    """A call, some of whose arguments are cut into microbatches.

    Attributes:
      function: The function, with its arguments.
      call: What is known of the call.
      decision: Which arguments have rows.
      names: The stages.
      here: The scope of the step.
    """

    function: OfArrays
    call: PipelineCall
    decision: Decision
    names: Sequence[str]
    here: scope.Scope

    def marked(self) -> list[Any]:
        """The call's results.

        Raises:
          PipelineFormError: [T312] the function is no chain of the stages.
          UndecidedRoleError: [T324] it cannot be proven which arguments have rows.
          BatchSizeError: [T503] the batch cannot be cut into microbatches.
        """
        check_batch(self._rows, self.call.schedule.microbatches)
        before = self.here.mark()
        whole = self._whole_batch()
        call, captured = self._staged(self._data_axes)
        if call.data_axes and _is_for_all_rows(call):
            self.here.go_back(before)
            call, captured = self._staged(())
        if problem := self._problem(whole, (call.stages.program, captured), call.parts):
            if self.decision.origin in ("declared", "guessed"):
                raise self._undecided(problem)
            call = replace(call, mixes=problem)
        return bind(call, self._data, [*self._others, *captured])

    # --- which rows

    @cached_property
    def _data(self) -> list[Any]:
        """The arguments that have rows."""
        pairs = zip(self.function.arrays, self.decision.by_row, strict=True)
        return [array for array, has_rows in pairs if has_rows]

    @cached_property
    def _others(self) -> list[Any]:
        pairs = zip(self.function.arrays, self.decision.by_row, strict=True)
        return [array for array, has_rows in pairs if not has_rows]

    @cached_property
    def _rows(self) -> int:
        """Rows of the whole batch."""
        pairs = zip(self.call.paths, self.function.arrays, strict=True)
        rows = {
            path: array.shape[0]
            for (path, array), has_rows in zip(pairs, self.decision.by_row, strict=True)
            if has_rows
        }
        if len(set(rows.values())) == 1:
            return next(iter(rows.values()))
        raise BatchSizeError(
            f"the batch of pipeline {self.call.name!r} has several numbers of rows",
            got="\n".join(f"{path}: {count}" for path, count in rows.items()),
            fix="give each array one row for each example",
        )

    @property
    def _data_axes(self) -> tuple[str, ...]:
        """Axes that divide each microbatch's rows, and split nothing else."""
        mesh, count = self.call.mesh, self.call.schedule.microbatches
        axes = tuple(a for a in _ROWS_ALONE if a in mesh.axes and a != self.call.axis)
        parts = mesh.axis_size(axes)
        return axes if parts > 1 and self._rows % (count * parts) == 0 else ()

    # --- its programs

    def _program(self, rows: int) -> tuple[_jax.Program, list[Any]]:
        """The function of so many rows; its weights are inputs after those."""
        order = [i for i, row in enumerate(self.decision.by_row) if row]
        order += [i for i, row in enumerate(self.decision.by_row) if not row]

        def ordered(*arrays: Any) -> list[Any]:
            given = dict(zip(order, arrays, strict=True))
            return self.function(*(given[i] for i in range(len(order))))

        structs = [struct_of(array, rows) for array in self._data]
        structs += [struct_of(array, None) for array in self._others]
        return _traced(ordered, structs)

    def _whole_batch(self) -> tuple[_jax.Program, list[Any]]:
        before = self.here.mark()
        program, captured = self._program(self._rows)
        self.here.go_back(before)
        return differentiated(program), captured

    def _staged(self, axes: tuple[str, ...]) -> tuple[PipelineCall, list[Any]]:
        """The call with its stages, and what the function closes over."""
        call = replace(self.call, rows=self._rows, data_axes=axes)
        part, self.here.is_whole_batch = call.rows // call.parts, False
        try:
            program, captured = self._program(part)
        except TesseraError:
            raise
        except (TypeError, ValueError) as error:  # it could be traced for the batch
            problem = f"{part} of {call.rows} rows: {str(error).partition(chr(10))[0]}"
            raise self._undecided(problem) from error
        finally:
            self.here.is_whole_batch = True
        staged = cut(differentiated(program), len(self._data), self.names)
        _check_results(staged, part)
        avals = [atom.aval for atom in _jax.outputs(staged.program)]
        results = tuple(a.update(shape=(call.rows, *a.shape[1:])) for a in avals)
        layouts = tuple(map(_layout, (*self._others, *captured)))
        return replace(call, staged=staged, results=results, layouts=layouts), captured

    def _problem(
        self,
        whole: tuple[_jax.Program, list[Any]],
        part: tuple[_jax.Program, list[Any]],
        parts: int,
    ) -> str | None:
        """Why it is not sure that the stages treat each row by itself, or None."""
        if parts == 1:
            return None
        if not all(map(_is_same, whole[1], part[1])) or len(whole[1]) != len(part[1]):
            return "an array that it makes depends on the number of rows"
        programs = [
            _jax.without_dead_code(without_jits(program), keep_inputs=True)
            for program, _ in (whole, part)
        ]
        rows = Rows(parts)
        if self.decision.origin == "guessed":
            return rows.unproven(*programs)
        return rows.mixed(*programs)

    def _undecided(self, problem: str) -> TesseraError:
        found = zip(self.call.by_row, self.decision.by_row, strict=True)
        by_row = tuple(None if row else known for known, row in found)
        return replace(self.call, by_row=by_row).undecided(problem)


def _traced(function: Any, arrays: Sequence[Any]) -> tuple[_jax.Program, list[Any]]:
    structs = [struct_of(array, None) for array in arrays]
    return _jax.lift_constants(jax.make_jaxpr(function)(*structs))


def _is_same(first: Any, second: Any) -> bool:
    """Whether two traces closed over the same array."""
    if first is second:
        return True
    if isinstance(first, _jax.Tracer) or isinstance(second, _jax.Tracer):
        return False
    return first.shape == second.shape and np.array_equal(first, second)


def _check_results(staged: StagedProgram, rows: int) -> None:
    for atom in _jax.outputs(staged.program):
        aval = atom.aval
        is_float = jnp.issubdtype(aval.dtype, jnp.floating)
        if is_float and aval.shape and aval.shape[0] == rows:
            continue
        raise PipelineFormError(
            "a pipelined function returns a row for each row of its batch",
            got=f"{aval.dtype.name}{list(aval.shape)} for a microbatch of {rows} rows",
            fix="return floating-point arrays with the batch as leading dim, and "
            "reduce them in the step",
        )


def _is_for_all_rows(call: PipelineCall) -> bool:
    """Whether stages have to do with a data axis: in weights' layouts, in kernels."""
    program = call.stages.program
    if contains(program, lambda equation, _: _jax.is_manual_region(equation)):
        return True
    specs = call.layouts
    named = {a for spec in specs for names in axes_of_dims(spec, 0) for a in names}
    return not named.isdisjoint(call.data_axes)


def _layout(weight: Any) -> PartitionSpec:
    known = layout_of(weight)
    return PartitionSpec() if known is None else known[1]
