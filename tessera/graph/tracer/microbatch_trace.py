# SPDX-License-Identifier: Apache-2.0
"""Traces a step with pipelines for one microbatch.

The arguments of its pipelined calls that have rows are computed from arguments of the
step that have rows, and these are as many in a microbatch as the schedule says.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, TypeAlias

import jax

from tessera.errors import PipelineFormError, TesseraError
from tessera.graph.captures import lift_captures
from tessera.graph.gradient_primitive import gradient_p
from tessera.graph.ir import Graph, Role, Value
from tessera.graph.pipelining.batch_dims import have_same_equations
from tessera.graph.pipelining.microbatches import fewer_microbatches_warning
from tessera.graph.pipelining.pipeline_primitive import (
    PipelineCall,
    first_line,
    pipeline_p,
)
from tessera.graph.rewriting import inline_jits
from tessera.graph.tracer.argument_roles import GradientUses, gradient_uses, views_of
from tessera.jax_compat import jaxprs
from tessera.tracing.scope import Scope

Retrace: TypeAlias = Callable[[Sequence[Value], Scope], jaxprs.Program]


@dataclass(frozen=True)
class BatchRows:
    """The rows of a step's batch.

    Attributes:
      graph: The step, as it was traced.
      may_be_batch: Whether an argument's array, by path, is not declared to be
        something else.
      retrace: Traces the step for other inputs.
      scope: Opens a scope to do so in.
    """

    graph: Graph
    may_be_batch: Callable[[str], bool]
    retrace: Retrace
    scope: Callable[[], Scope]

    def microbatch(self) -> jaxprs.Program | None:
        """The program of one microbatch; None for a step that has no pipeline to run.

        Raises:
          PipelineFormError: [T312] the step cannot be traced for one.

        Warns:
          TesseraWarning: There are fewer microbatches than stages, or a stage mixes
            the rows of its microbatch.
        """
        calls = list(self._calls())
        if not calls:
            return None
        for _, _, call in calls:
            fewer_microbatches_warning(call.schedule)
            call.warn()
        first = min((call for *_, call in calls), key=lambda call: call.parts)
        atoms, rows, whole = list[jaxprs.Atom](), set[Any](), set[Any]()
        for index, equation, call in calls:
            count = call.stages.num_inputs
            atoms += equation.invars[:count]
            rows |= self.sources(equation.invars[:count], index)
            whole |= self.sources(equation.invars[count:], index)
        known = [
            variable
            for variable, _ in self._with_rows({c.rows for *_, c in calls}, rows, atoms)
            if variable in rows or variable not in whole
        ]
        program = self._of_rows(known, first, Fraction(1, first.parts))
        if first.rows == first.parts > 1 and not self._has_equations_of(program):
            # JAX traces other equations for one row: two are used, which are copies.
            size = Fraction(2 if first.rows != 2 else 3, first.rows)
            program = self._of_rows(known, first, size)
        return program

    def _has_equations_of(self, program: jaxprs.Program) -> bool:
        """Whether another program has the same equations up to the last loss."""
        first, second = map(jaxprs.equations, (self.program, inline_jits(program)))
        ends = [i for i, e in enumerate(first) if e.primitive is gradient_p]
        last = ends[-1] + 1 if ends else 0
        return have_same_equations(first[:last], second[:last])

    def _of_rows(
        self, known: Sequence[Any], first: PipelineCall, size: Fraction
    ) -> jaxprs.Program:
        """The program of another number of rows.

        Args:
          known: The inputs that have rows.
          first: The call that errors name.
          size: The number of rows over that of the batch.
        """
        rows = {v: int(self.values[v].aval.shape[0] * size) for v in known}
        here = self.scope()
        try:
            program = self.retrace(self._resized(rows), here)
        except TesseraError:
            raise
        except (TypeError, ValueError) as error:
            raise _no_rows_of_a_batch(first, size, first_line(error)) from error
        for _, _, call in self._calls():
            for count in here.pipelined[call.number]:
                if count != call.rows * size:
                    problem = f"{count} rows in {call.rows}"
                    raise _no_rows_of_a_batch(first, size, problem)
        return lift_captures(program)[0]

    # --- the inputs of the step

    @cached_property
    def program(self) -> jaxprs.Program:
        """The step's program, without calls of jitted functions."""
        return inline_jits(self.graph.program)

    @cached_property
    def values(self) -> dict[Any, Value]:
        """The graph's value of each input."""
        inputs = jaxprs.inputs(self.program)
        return dict(zip(inputs, self.graph.inputs, strict=True))

    @cached_property
    def uses(self) -> GradientUses:
        """What gradients are taken by, and what losses read."""
        return gradient_uses(self.program)

    @cached_property
    def free(self) -> frozenset[Any]:
        """Inputs that may have rows: arguments that no gradient is taken by."""
        return frozenset(
            variable
            for variable, value in self.values.items()
            if value.role is Role.ARGUMENT
            and value.aval.shape
            and variable not in self.uses.differentiated
            and self.may_be_batch(value.name)
        )

    def sources(self, atoms: Sequence[jaxprs.Atom], before: int) -> set[Any]:
        """The inputs that some values depend on."""
        sources = set[Any]()
        for atom in atoms:
            sources |= jaxprs.sources(self.program, atom, before=before)
        return sources & self.values.keys()

    def _calls(self) -> Iterator[tuple[int, jaxprs.Equation, PipelineCall]]:
        """The pipelined calls of the step's own level, with their indices."""
        for index, equation in enumerate(jaxprs.equations(self.program)):
            if equation.primitive is pipeline_p:
                yield index, equation, equation.params["call"]

    def _with_rows(
        self, rows: set[int], read: set[Any], atoms: Sequence[jaxprs.Atom]
    ) -> Iterator[tuple[Any, Value]]:
        """Inputs that may have some number of rows, and their values.

        This is a guess: what follows from it is checked where it is used.

        Args:
          rows: The numbers.
          read: Inputs that arguments with rows depend on.
          atoms: These arguments.
        """
        free = self.free | views_of(self.program, atoms)
        weights = [
            value
            for variable, value in self.values.items()
            if value.role is Role.PARAMETER or variable in self.uses.differentiated
        ]
        for variable in self.values:
            value = self.values[variable]
            if variable not in free or not rows.issuperset(value.aval.shape[:1]):
                continue
            is_read = variable in self.uses.read or variable in read
            if is_read or not _is_like(value, weights):
                yield variable, value

    def _resized(self, rows: Mapping[Any, int]) -> list[Value]:
        """The step's inputs with other numbers of rows."""
        values: list[Value] = []
        for variable, value in self.values.items():
            if value.role is Role.CAPTURED:
                continue
            # Without layouts: they need not divide another number of rows.
            if variable in rows:
                shape = (rows[variable], *value.aval.shape[1:])
                aval = jax.ShapeDtypeStruct(shape, value.aval.dtype)
                value = replace(value, aval=aval, spec=None)
            values.append(value)
        return values


_ROWS_OF_THE_STEP = (
    "give the pipeline the rows of the step's arguments, as many and in the same order"
)


def _is_like(value: Value, weights: Sequence[Value]) -> bool:
    """Whether an array that no loss reads is optimizer state of a weight."""
    return any(
        value.aval.shape == weight.aval.shape or f"/{weight.name}/" in f"/{value.name}/"
        for weight in weights
    )


def _no_rows_of_a_batch(
    call: PipelineCall, size: Fraction, problem: str
) -> PipelineFormError:
    number = f"{int(call.rows * size)} of {call.rows} rows"
    return PipelineFormError(
        "a step with a pipeline cannot be traced for another number of rows",
        got=f"{number} in each argument that may be a batch: {problem}",
        fix=_ROWS_OF_THE_STEP + "\n"
        "or say which arguments are batches: graph.training_step(batch=...)",
    )
