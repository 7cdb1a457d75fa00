# SPDX-License-Identifier: Apache-2.0
"""Replaces each pipelined call of a program by the loop that runs it.

The work of the pass ``schedule_pipelines``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from tessera.errors import PipelineFormError
from tessera.graph import rewriting
from tessera.graph.gradient_primitive import gradient_p
from tessera.graph.ir import Graph
from tessera.graph.pipelining.loop_stages import Execution, Operands
from tessera.graph.pipelining.loss_decomposition import (
    LossDecomposition,
    decompose_loss,
)
from tessera.graph.pipelining.pipeline_primitive import (
    PipelineCall,
    has_pipeline,
    pipeline_p,
)
from tessera.graph.rewriting import variables
from tessera.jax_compat import jaxprs


def insert_pipeline_loops(graph: Graph) -> Graph:
    """The graph with loops in place of its pipelined calls."""
    whole = rewriting.inline_jits(graph.program)
    _check_not_nested(whole)
    assert graph.microbatch is not None, "traced for one microbatch as well"
    micro = rewriting.inline_jits(graph.microbatch)
    plans = _loop_plans(whole, micro)

    def run(*values: Any) -> list[Any]:
        return _Interpreter(whole, plans, values).run()

    return replace(graph.with_program(jaxprs.retrace(run, whole)), microbatch=None)


def _check_not_nested(program: jaxprs.Program) -> None:
    for equation in jaxprs.equations(program):
        if any(map(has_pipeline, jaxprs.inner_programs(equation))):
            line = jaxprs.source_line(equation)
            raise PipelineFormError(
                f"a pipelined function is called inside {equation.primitive.name}",
                got=f"at {line}" if line else "in the traced step",
                fix="call it at the level of the step itself",
            )


@dataclass(frozen=True)
class _LoopPlan:
    """The loop for a pipelined call: forward only, or with the gradients of a loss.

    Attributes:
      equation: The call.
      gradient: The index of the gradient equation; None for a forward loop.
      decomposition: Of the loss.
      keep_outputs: Whether something else needs the outputs as well.
      differentiated: For inputs and rows, whether gradients are wanted.
    """

    equation: jaxprs.Equation
    gradient: int | None = None
    decomposition: LossDecomposition | None = None
    keep_outputs: bool = False
    differentiated: tuple[bool, ...] = ()

    @property
    def call(self) -> PipelineCall:
        """The equation's parameters."""
        return self.equation.params["call"]

    @property
    def execution(self) -> Execution:
        """What runs the call."""
        # Only the stages are in the call's name scopes, such as an autocast around it.
        scopes = partial(jaxprs.source_context, self.equation)
        return Execution(self.call, self.decomposition, scopes)


def _loop_plans(whole: jaxprs.Program, micro: jaxprs.Program) -> dict[int, _LoopPlan]:
    """The loop for each pipelined call, by the index of its equation."""
    equations = jaxprs.equations(whole)
    gradients = {
        index: _gradients_of(equations, index)
        for index, equation in enumerate(equations)
        if equation.primitive is pipeline_p
    }
    plans: dict[int, _LoopPlan] = {}
    for index, own in gradients.items():
        sharing = [i for i in gradients if not set(own).isdisjoint(gradients[i])]
        plans[index] = _LoopPlan(equations[index])
        if len(own) == 1 and len(sharing) == 1:
            plans[index] = _plan_with_loss(whole, micro, index, own[0])
        elif not all(_runs_forward_first(equations[i].params["call"]) for i in sharing):
            raise _not_one_to_one(len(own))
    return plans


def _runs_forward_first(call: PipelineCall) -> bool:
    """Whether the forward of all microbatches comes before the backward of any."""
    return call.parts == 1 or call.schedule.name == "gpipe"


def _not_one_to_one(num_gradients: int) -> PipelineFormError:
    """The error for a schedule that begins the backward before the loss is known."""
    several_losses = num_gradients > 1
    return PipelineFormError(
        "a pipelined call and a gradient do not go together one to one",
        got=f"{num_gradients} gradients of losses that depend on one call"
        if several_losses
        else "a loss that depends on two pipelined calls",
        fix=(
            "take one gradient, by all weights, of the sum of the losses"
            if several_losses
            else "if each call has a loss of its own, take a gradient of each and add "
            "them; if one call's output goes into the other, make them one pipeline"
        )
        + "\nor use schedule='gpipe', which has all outputs before the first backward",
    )


def _gradients_of(equations: Sequence[jaxprs.Equation], index: int) -> list[int]:
    """The gradients of losses that depend on a call's output."""
    later = [e for e in equations[index + 1 :] if e.primitive is not gradient_p]
    dependents = jaxprs.dependents(later, equations[index].outvars)
    return [
        number
        for number, equation in enumerate(equations)
        if equation.primitive is gradient_p and equation.invars[0] in dependents
    ]


def _plan_with_loss(
    whole: jaxprs.Program, micro: jaxprs.Program, index: int, gradient: int
) -> _LoopPlan:
    equations = jaxprs.equations(whole)
    equation, call = equations[index], equations[index].params["call"]
    if call.parts == 1:
        return _LoopPlan(equation)
    try:
        decomposition = _decompose(whole, micro, index, gradient)
    except PipelineFormError:
        if _runs_forward_first(call):
            return _LoopPlan(equation)
        raise
    weights = variables(equations[gradient].invars[1:])
    if not decomposition.dependents.isdisjoint(weights):
        raise PipelineFormError(
            "a loss is differentiated by something that a pipeline's output leads to",
            got=f"at {jaxprs.source_line(equations[gradient])}",
            fix="differentiate by weights, or by what is computed before the pipeline",
        )
    differentiated = jaxprs.dependents(equations[:gradient], weights)
    inputs = equation.invars[: call.stages.num_inputs]
    read = [*inputs, *(variable for variable, _, _ in decomposition.rows)]
    _, needed = _equations_after_loop(whole, index, gradient, decomposition)
    return _LoopPlan(
        equation,
        gradient,
        decomposition,
        keep_outputs=not needed.isdisjoint(equation.outvars),
        differentiated=tuple(
            not isinstance(v, jaxprs.Literal) and v in differentiated for v in read
        ),
    )


def _decompose(
    whole: jaxprs.Program, micro: jaxprs.Program, index: int, gradient: int
) -> LossDecomposition:
    call = jaxprs.equations(whole)[index].params["call"]
    rows = jaxprs.equations(micro)[index].outvars[0].aval.shape[0]
    copies, rest = divmod(rows * call.parts, call.rows)
    if rest:
        raise PipelineFormError(
            "the pipelines of a step have microbatches of unlike sizes",
            got=f"{call.rows // call.parts} rows, and in another one {rows}",
            fix="use numbers of microbatches that are multiples of each other",
        )
    ratio = Fraction(call.rows, rows)
    return decompose_loss(whole, micro, index, gradient, ratio, copies)


def _equations_after_loop(
    program: jaxprs.Program, index: int, gradient: int, decomposition: LossDecomposition
) -> tuple[list[jaxprs.Equation], set[Any]]:
    """Equations from a call to its gradient that others need, and what they read."""
    equations = jaxprs.equations(program)
    loss = equations[gradient].invars[0]
    later = [v for e in equations[gradient + 1 :] for v in variables(e.invars)]
    later += variables(equations[gradient].invars[1:])
    later += variables(jaxprs.outputs(program))
    read, needed = set(later) - {loss}, list[jaxprs.Equation]()
    for equation in reversed(equations[index + 1 : gradient]):
        results = read.intersection(equation.outvars)
        if results and results <= decomposition.dependents:
            needed.append(equation)
            read.update(set(variables(equation.invars)) - {loss})
    return needed[::-1], read


class _Interpreter:
    """Runs a program with loops in place of its pipelined calls."""

    def __init__(
        self,
        program: jaxprs.Program,
        plans: dict[int, _LoopPlan],
        values: Sequence[Any],
    ) -> None:
        self.program, self.plans = program, plans
        self.env = rewriting.Environment(program, values)

    def run(self) -> list[Any]:
        waiting: dict[int, tuple[int, _LoopPlan]] = {}  # by the index of the gradient
        for index, equation in enumerate(jaxprs.equations(self.program)):
            if index in waiting:
                self._run_with_loss(*waiting.pop(index))
            decompositions = [plan.decomposition for _, plan in waiting.values()]
            if any(
                d is not None and not d.dependents.isdisjoint(equation.outvars)
                for d in decompositions
            ):
                continue  # a result of the loop, or computed after it
            plan = self.plans.get(index)
            if plan is None:
                self.env.run([equation])
            elif plan.gradient is None:
                with jaxprs.line_context(equation):
                    outputs = plan.execution.outputs(self._operands(plan))
                self.env.write(equation.outvars, outputs)
            else:
                waiting[plan.gradient] = index, plan
        return [self.env.read(atom) for atom in jaxprs.outputs(self.program)]

    def _operands(self, plan: _LoopPlan) -> Operands:
        values = [self.env.read(atom) for atom in plan.equation.invars]
        count = plan.call.stages.num_inputs
        return Operands(values[:count], values[count:])

    def _run_with_loss(self, index: int, plan: _LoopPlan) -> None:
        decomposition, gradient, env = plan.decomposition, plan.gradient, self.env
        assert decomposition is not None
        assert gradient is not None
        loss = jaxprs.equations(self.program)[gradient].invars[0]

        def loss_of(sums: list[Any]) -> Any:
            local = env.copy()
            local.write([whole for whole, _ in decomposition.sums], sums)
            local.run(decomposition.after)
            return local.read(loss)

        no_sums = [jaxprs.zeros(whole.aval) for whole, _ in decomposition.sums]
        offset, pull_back = jax.vjp(loss_of, no_sums)
        operands = replace(
            self._operands(plan),
            rows=[(env.read(whole), dim) for whole, _, dim in decomposition.rows],
            replicated=[env.read(whole) for whole, _ in decomposition.replicated],
            coefficients=pull_back(jnp.ones_like(offset))[0],
            differentiated=plan.differentiated,
        )
        with jaxprs.line_context(plan.equation):
            total, outputs = plan.execution.loss(
                operands, keep_outputs=plan.keep_outputs
            )
        env.write([loss], [offset + total.astype(offset.dtype)])
        if outputs is not None:
            env.write(plan.equation.outvars, outputs)
        after = _equations_after_loop(self.program, index, gradient, decomposition)
        env.run(after[0])
