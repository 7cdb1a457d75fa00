# SPDX-License-Identifier: Apache-2.0
"""Splits a pipelined function's jaxpr into its stages.

While the function is traced, each stage binds the primitive ``stage_end`` to its
results. What is computed between two of these equations belongs to the second. Values
that depend on no stage's results are not sent: every stage has the function's inputs,
and computes such values where it reads them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NoReturn

import jax.numpy as jnp

from tessera.errors import OutsideTraceError, PipelineFormError
from tessera.graph.pipelining import manual_axis
from tessera.graph.rewriting import Environment, inline_jits, variables
from tessera.jax_compat import jaxprs

stage_end_p = jaxprs.Primitive("stage_end")
stage_end_p.multiple_results = True


@stage_end_p.def_abstract_eval
def _abstract(*values: Any, stage: int) -> list[Any]:
    del stage
    return list(values)


def _refuse(transform: str) -> NoReturn:
    raise OutsideTraceError(
        f"{transform} cannot look past the end of a pipeline's stage",
        got="a gradient taken in one stage by what another one computed",
        fix="differentiate within a stage, or take the gradient in the step that calls "
        "the pipeline",
    )


jaxprs.refuse_transforms(stage_end_p, _refuse)


@dataclass(frozen=True)
class StageJaxpr:
    """One virtual stage of a program.

    Attributes:
      equations: Its equations.
      weights: The program's weights that it reads, by number.
      received: Variables that it receives from the stage before.
      sent: Variables that it sends to the next; of the last, the program's outputs.
    """

    equations: tuple[jaxprs.Equation, ...]
    weights: tuple[int, ...]
    received: tuple[jaxprs.Atom, ...]
    sent: tuple[jaxprs.Atom, ...]


@dataclass(frozen=True, eq=False)
class StagedProgram:
    """A program and its stages.

    Attributes:
      program: The whole program; its weights are inputs after the others.
      num_inputs: How many inputs are no weights.
      jaxprs: The stages, in order.
    """

    program: jaxprs.Program
    num_inputs: int
    jaxprs: tuple[StageJaxpr, ...]

    def run(
        self,
        stage: int,
        inputs: Sequence[Any],
        weights: Sequence[Any],
        received: Sequence[Any],
    ) -> list[Any]:
        """What a stage sends, in the SPMD region that is being traced.

        Args:
          stage: Which one.
          inputs: All inputs of the program.
          weights: Those of ``jaxprs[stage].weights``.
          received: Values for ``jaxprs[stage].received``.
        """
        jaxpr, variables = self.jaxprs[stage], jaxprs.inputs(self.program)
        values: dict[Any, Any] = dict(zip(variables, inputs, strict=False))
        own = [variables[self.num_inputs + number] for number in jaxpr.weights]
        values.update(zip(own, weights, strict=True))
        env = Environment(self.program, [values.get(v) for v in variables])
        env.write(jaxpr.received, received)
        for equation in jaxpr.equations:
            results = [env.read(atom) for atom in equation.invars]
            if equation.primitive is not stage_end_p:
                results = manual_axis.apply(equation, results)
            env.write(equation.outvars, results)
        return [jnp.asarray(env.read(atom)) for atom in jaxpr.sent]


def split_stages(
    program: jaxprs.Program, num_inputs: int, names: Sequence[str]
) -> StagedProgram:
    """Split a program into stages, after each ``stage_end``.

    Args:
      program: Without constants: weights are inputs after the others.
      num_inputs: How many inputs are no weights.
      names: The stages in order; each must have run once, in this order.

    Raises:
      PipelineFormError: [T312] it does not run each stage once and in order, or sends
        something that is not floating point.
    """
    program = inline_jits(program)
    _check_order(program, names)
    equations, last = jaxprs.equations(program), len(names) - 1
    ends = [equation for equation in equations if equation.primitive is stage_end_p]
    dependents = jaxprs.dependents(equations, [v for end in ends for v in end.outvars])
    ended = accumulate((e.primitive is stage_end_p for e in equations), initial=0)
    order = [min(stage, last) for stage in ended]  # the stage of each equation
    stages: list[StageJaxpr] = []
    read_later = list(jaxprs.outputs(program))
    for stage in reversed(range(len(names))):
        jaxpr = _stage(program, num_inputs, stage, read_later, (order, dependents))
        if stage:
            _check_wire(jaxpr.received, names[stage - 1])
        stages.append(jaxpr)
        read_later = list(jaxpr.received)
    return StagedProgram(program, num_inputs, tuple(stages[::-1]))


def _stage(
    program: jaxprs.Program,
    num_inputs: int,
    stage: int,
    sent: Sequence[jaxprs.Atom],
    analysis: tuple[list[int], set[Any]],
) -> StageJaxpr:
    """The stage that sends certain values, found by walking back from them."""
    order, dependents = analysis
    read, equations = set(variables(sent)), list[jaxprs.Equation]()
    numbered = list(enumerate(jaxprs.equations(program)))
    for index, equation in reversed(numbered):
        is_own = order[index] == stage
        has_effects = is_own and equation.effects  # such as one that prints
        if read.isdisjoint(equation.outvars) and not has_effects:
            continue
        if is_own or dependents.isdisjoint(equation.outvars):
            equations.append(equation)
            read.update(variables(equation.invars))
    computed_before = [
        v for i, e in numbered if order[i] < stage for v in e.outvars if v in dependents
    ]
    inputs = jaxprs.inputs(program)
    return StageJaxpr(
        equations=tuple(equations[::-1]),
        weights=tuple(i for i, v in enumerate(inputs[num_inputs:]) if v in read),
        received=tuple(v for v in computed_before if v in read),
        sent=tuple(sent),
    )


def _check_order(program: jaxprs.Program, names: Sequence[str]) -> None:
    ends = [
        equation.params["stage"]
        for equation in jaxprs.equations(program)
        if equation.primitive is stage_end_p
    ]
    if ends == list(range(len(names))):
        return
    ran = ", ".join(repr(names[end]) for end in ends) or "none"
    raise PipelineFormError(
        "a pipelined function runs each of its stages once, in the order of stages=",
        got=f"it ran {ran}; stages: {', '.join(map(repr, names))}",
        fix="call them one after the other on each other's results, or list them in "
        "the order of the calls",
    )


def _check_wire(sent: Sequence[jaxprs.Atom], name: str) -> None:
    for value in sent:
        if not jnp.issubdtype(value.aval.dtype, jnp.floating):
            raise PipelineFormError(
                f"stage {name!r} sends an array that is not floating point",
                got=f"{value.aval.dtype.name}{list(value.aval.shape)}",
                fix="pass it to the pipelined function as an argument: every stage can "
                "read those",
            )
