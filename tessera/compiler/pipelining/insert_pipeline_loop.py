# SPDX-License-Identifier: Apache-2.0
"""Which loop a pipelined call becomes, and how it takes its place in a program.

The work of the pass ``schedule_pipelines``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from tessera import _jax
from tessera.compiler import rewriting
from tessera.compiler.gradient_primitive import gradient_p
from tessera.compiler.ir import Graph
from tessera.compiler.pipelining.loop_stages import Execution, Operands
from tessera.compiler.pipelining.loss_decomposition import Separated, separate
from tessera.compiler.pipelining.pipeline_primitive import PipelineCall, pipeline_p
from tessera.errors import PipelineFormError


def with_loops(graph: Graph) -> Graph:
    """A graph whose pipelined calls are loops; what the pass gives."""
    whole = rewriting.inline_jits(graph.program)
    _refuse_nested(whole)
    assert graph.microbatch is not None, "traced for one microbatch as well"
    micro = rewriting.inline_jits(graph.microbatch)
    calls = _planned(whole, micro)

    def run(*values: Any) -> list[Any]:
        return _Interpreter(whole, calls, values).run()

    return graph.with_program(_jax.retrace(run, whole)).scheduled()


def _is_call(equation: _jax.Equation, _: str = "") -> bool:
    return equation.primitive is pipeline_p


def _is_mark(equation: _jax.Equation) -> bool:
    return equation.primitive is gradient_p


def _refuse_nested(program: _jax.Program) -> None:
    for equation in _jax.equations(program):
        if any(rewriting.contains(p, _is_call) for p in _jax.inner_programs(equation)):
            line = _jax.source_line(equation)
            raise PipelineFormError(
                f"a pipelined function is called inside {equation.primitive.name}",
                got=f"at {line}" if line else "in the traced step",
                fix="call it at the level of the step itself",
            )


@dataclass(frozen=True)
class _Planned:
    """A pipelined call and, where a loss depends on it, the way there.

    Attributes:
      equation: The call.
      mark: The place of the gradient; None for a forward loop.
      tail: From the output to the loss.
      keep_outputs: Whether something else needs the outputs as well.
      differentiated: For inputs and rows, whether gradients are wanted.
    """

    equation: _jax.Equation
    mark: int | None = None
    tail: Separated | None = None
    keep_outputs: bool = False
    differentiated: tuple[bool, ...] = ()


def _planned(whole: _jax.Program, micro: _jax.Program) -> dict[int, _Planned]:
    """What becomes of each pipelined call, by its place."""
    equations = _jax.equations(whole)
    places = [i for i, equation in enumerate(equations) if _is_call(equation)]
    plans: dict[int, _Planned] = {}
    taken: dict[int, int] = {}
    for place in places:
        marks = _marks_of(equations, place)
        if len(marks) > 1 or (marks and marks[0] in taken):
            raise PipelineFormError(
                "a pipelined call and a gradient do not go together one to one",
                got=f"{len(marks)} gradients of losses that depend on one call"
                if len(marks) > 1
                else "a loss that depends on two pipelined calls",
                fix="take one gradient, by all weights, of a loss that depends on one "
                "pipelined call",
            )
        plans[place] = _Planned(equations[place])
        if marks:
            taken[marks[0]] = place
            plans[place] = _with_loss(whole, micro, place, marks[0])
    return plans


def _marks_of(equations: Sequence[_jax.Equation], place: int) -> list[int]:
    """The gradients of losses that a call's output leads to."""
    tainted, marks = set(equations[place].outvars), list[int]()
    for number, equation in enumerate(equations[place + 1 :], place + 1):
        if _is_mark(equation):
            marks += [number] if equation.invars[0] in tainted else []
        elif not tainted.isdisjoint(_variables(equation.invars)):
            tainted.update(equation.outvars)
    return marks


def _with_loss(
    whole: _jax.Program, micro: _jax.Program, place: int, mark: int
) -> _Planned:
    equations = _jax.equations(whole)
    equation, call = equations[place], equations[place].params["call"]
    try:
        if call.parts == 1:
            return _Planned(equation)  # forward and backward, one after the other
        rows = _jax.equations(micro)[place].outvars[0].aval.shape[0]
        copies, rest = divmod(rows * call.parts, call.rows)
        if rest:
            raise PipelineFormError(
                "the pipelines of a step have microbatches of unlike sizes",
                got=f"{call.rows // call.parts} rows, and in another one {rows}",
                fix="use numbers of microbatches that are multiples of each other",
            )
        tail = separate(whole, micro, place, mark, Fraction(call.rows, rows), copies)
    except PipelineFormError:
        # The forward of all microbatches, then the backward of all, is its order.
        if call.schedule.name == "gpipe":
            return _Planned(equation)
        raise
    weights = _variables(equations[mark].invars[1:])
    if not tail.tainted.isdisjoint(weights):
        raise PipelineFormError(
            "a loss is differentiated by something that a pipeline's output leads to",
            got=f"at {_jax.source_line(equations[mark])}",
            fix="differentiate by weights, or by what is computed before the pipeline",
        )
    known = _dependent(equations[:mark], weights)
    inputs = equation.invars[: call.stages.num_inputs]
    read = [*inputs, *(variable for variable, _, _ in tail.rows)]
    return _Planned(
        equation,
        mark,
        tail,
        _needs_outputs(whole, place, mark, tail),
        tuple(not isinstance(v, _jax.Literal) and v in known for v in read),
    )


def _dependent(equations: Sequence[_jax.Equation], weights: Sequence[Any]) -> set[Any]:
    """Everything that depends on some weights, these included."""
    found = set(weights)
    for equation in equations:
        if not found.isdisjoint(_variables(equation.invars)):
            found.update(equation.outvars)
    return found


def _needs_outputs(
    program: _jax.Program, place: int, mark: int, tail: Separated
) -> bool:
    """Whether anything but the loss reads what the call's output leads to."""
    return not _wanted(program, place, mark, tail)[1].isdisjoint(
        _jax.equations(program)[place].outvars
    )


def _wanted(
    program: _jax.Program, place: int, mark: int, tail: Separated
) -> tuple[list[_jax.Equation], set[Any]]:
    """Equations from a call to its gradient that others need, and what they read."""
    equations = _jax.equations(program)
    loss = equations[mark].invars[0]
    later = [v for e in equations[mark + 1 :] for v in _variables(e.invars)]
    later += _variables(equations[mark].invars[1:]) + _variables(_jax.outputs(program))
    wanted, found = set(later) - {loss}, list[_jax.Equation]()
    for equation in reversed(equations[place + 1 : mark]):
        made = wanted.intersection(equation.outvars)
        if made and made <= tail.tainted:
            found.append(equation)
            wanted.update(set(_variables(equation.invars)) - {loss})
    return found[::-1], wanted


class _Interpreter:
    """Runs a program with loops where its pipelined calls were."""

    def __init__(
        self, program: _jax.Program, calls: dict[int, _Planned], values: Sequence[Any]
    ) -> None:
        self.program, self.calls = program, calls
        self.env = rewriting.Environment(program, values)

    def run(self) -> list[Any]:
        waiting: dict[int, tuple[int, _Planned]] = {}
        for place, equation in enumerate(_jax.equations(self.program)):
            if place in waiting:
                self._run_with_loss(*waiting.pop(place), mark=place)
            held = [plan.tail.tainted for _, plan in waiting.values() if plan.tail]
            if any(not tainted.isdisjoint(equation.outvars) for tainted in held):
                continue  # it comes out of the loop, or after it
            plan = self.calls.get(place)
            if plan is None:
                self.env.run([equation])
            elif plan.mark is None:
                with _jax.line_context(equation):
                    outputs = _execution(plan).outputs(self._operands(plan))
                self.env.write(equation.outvars, outputs)
            else:
                waiting[plan.mark] = place, plan
        return [self.env.read(atom) for atom in _jax.outputs(self.program)]

    def _operands(self, plan: _Planned) -> Operands:
        values = [self.env.read(atom) for atom in plan.equation.invars]
        count = _call_of(plan).stages.num_inputs
        return Operands(values[:count], values[count:])

    def _run_with_loss(self, place: int, plan: _Planned, *, mark: int) -> None:
        tail, env = plan.tail, self.env
        assert tail is not None
        loss = _jax.equations(self.program)[mark].invars[0]

        def after(sums: list[Any]) -> Any:
            local = env.copy()
            local.write([whole for whole, _ in tail.sums], sums)
            local.run(tail.after)
            return local.read(loss)

        nothing = [_jax.zeros(whole.aval) for whole, _ in tail.sums]
        offset, pull_back = jax.vjp(after, nothing)
        operands = replace(
            self._operands(plan),
            rows=[(env.read(whole), dim) for whole, _, dim in tail.rows],
            wholes=[env.read(whole) for whole, _ in tail.wholes],
            coefficients=pull_back(jnp.ones_like(offset))[0],
            differentiated=plan.differentiated,
        )
        with _jax.line_context(plan.equation):
            total, outputs = _execution(plan).loss(
                operands, keep_outputs=plan.keep_outputs
            )
        env.write([loss], [offset + total.astype(offset.dtype)])
        if outputs is not None:
            env.write(plan.equation.outvars, outputs)
        env.run(_wanted(self.program, place, mark, tail)[0])


def _call_of(plan: _Planned) -> PipelineCall:
    return plan.equation.params["call"]


def _execution(plan: _Planned) -> Execution:
    # Only the stages are in the call's name scopes, such as an autocast around it.
    scopes = partial(_jax.source_context, plan.equation)
    return Execution(_call_of(plan), plan.tail, scopes)


def _variables(atoms: Sequence[_jax.Atom]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, _jax.Literal)]
