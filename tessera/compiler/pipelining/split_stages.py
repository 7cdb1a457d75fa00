# SPDX-License-Identifier: Apache-2.0
"""A pipelined function's jaxpr, cut where its stages end.

While the function is traced, each stage marks its results: ``stage_end``. What is
computed between two marks belongs to the second. What depends on no stage's results is
not sent: every stage has the function's inputs, and computes it where it needs it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax.numpy as jnp

from tessera import _jax
from tessera.compiler.pipelining import manual_axis
from tessera.compiler.rewriting import Environment, inline_jits
from tessera.errors import OutsideTraceError, PipelineFormError

stage_end_p = _jax.Primitive("stage_end")
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


_jax.refuse_transforms(stage_end_p, _refuse)


@dataclass(frozen=True)
class Cut:
    """One virtual stage of a program.

    Attributes:
      equations: What it computes.
      weights: The program's constants that it reads, by number.
      arrives: Variables that it has from the stage before.
      leaves: Variables that it hands to the next; of the last, the program's outputs.
    """

    equations: tuple[_jax.Equation, ...]
    weights: tuple[int, ...]
    arrives: tuple[_jax.Atom, ...]
    leaves: tuple[_jax.Atom, ...]


@dataclass(frozen=True, eq=False)
class StagedProgram:
    """A program in as many pieces as it has stages.

    Attributes:
      program: The whole, with its weights as inputs after its own.
      num_inputs: How many inputs are its own.
      names: The stages' names.
      cuts: The pieces, in order.
    """

    program: _jax.Program
    num_inputs: int
    names: tuple[str, ...]
    cuts: tuple[Cut, ...]

    def run(
        self,
        stage: int,
        inputs: Sequence[Any],
        weights: Sequence[Any],
        arrived: Sequence[Any],
    ) -> list[Any]:
        """What a stage hands on, in the region that is being traced.

        Args:
          stage: Which one.
          inputs: All inputs of the program.
          weights: Those of ``cuts[stage].weights``.
          arrived: Values for ``cuts[stage].arrives``.
        """
        cut, variables = self.cuts[stage], _jax.inputs(self.program)
        values: dict[Any, Any] = dict(zip(variables, inputs, strict=False))
        own = [variables[self.num_inputs + number] for number in cut.weights]
        values.update(zip(own, weights, strict=True))
        env = Environment(self.program, [values.get(v) for v in variables])
        env.write(cut.arrives, arrived)
        for equation in cut.equations:
            if equation.primitive is stage_end_p:
                given = [env.read(atom) for atom in equation.invars]
                env.write(equation.outvars, given)
            else:
                operands = [env.read(atom) for atom in equation.invars]
                env.write(equation.outvars, manual_axis.apply(equation, operands))
        return [jnp.asarray(env.read(atom)) for atom in cut.leaves]


def cut(program: _jax.Program, num_inputs: int, names: Sequence[str]) -> StagedProgram:
    """Cut a program into the stages that its marks end.

    Args:
      program: Without constants: weights are inputs after the others.
      num_inputs: How many inputs are no weights.
      names: The stages in order; each must have run once, in this order.

    Raises:
      PipelineFormError: [T312] it does not run each stage once and in order, or hands
        on something that is not floating point.
    """
    program = inline_jits(program)
    _check_order(program, names)
    equations, last = _jax.equations(program), len(names) - 1
    order: list[int] = []  # the stage that each equation is of
    sent: set[Any] = set()  # what depends on a stage's results
    stage = 0
    for equation in equations:
        is_end = equation.primitive is stage_end_p
        order.append(min(stage, last))
        if is_end or not sent.isdisjoint(_variables(equation.invars)):
            sent.update(equation.outvars)
        stage += is_end
    cuts: list[Cut] = []
    wanted_later = list(_jax.outputs(program))
    for stage in reversed(range(len(names))):
        piece = _piece(program, num_inputs, stage, wanted_later, (order, sent))
        if stage:
            _check_wire(piece.arrives, names[stage - 1])
        cuts.append(piece)
        wanted_later = list(piece.arrives)
    return StagedProgram(program, num_inputs, tuple(names), tuple(cuts[::-1]))


def _piece(
    program: _jax.Program,
    num_inputs: int,
    stage: int,
    leaves: Sequence[_jax.Atom],
    known: tuple[list[int], set[Any]],
) -> Cut:
    """The stage that hands on certain values, found by walking back from them."""
    order, sent = known
    wanted, found = set(_variables(leaves)), list[_jax.Equation]()
    places = list(enumerate(_jax.equations(program)))
    for place, equation in reversed(places):
        is_own = order[place] == stage
        acts = is_own and equation.effects  # such as one that prints
        if wanted.isdisjoint(equation.outvars) and not acts:
            continue
        if is_own or sent.isdisjoint(equation.outvars):
            found.append(equation)
            wanted.update(_variables(equation.invars))
    made_before = [
        v for i, e in places if order[i] < stage for v in e.outvars if v in sent
    ]
    inputs = _jax.inputs(program)
    return Cut(
        equations=tuple(found[::-1]),
        weights=tuple(i for i, v in enumerate(inputs[num_inputs:]) if v in wanted),
        arrives=tuple(v for v in made_before if v in wanted),
        leaves=tuple(leaves),
    )


def _check_order(program: _jax.Program, names: Sequence[str]) -> None:
    ends = [
        equation.params["stage"]
        for equation in _jax.equations(program)
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


def _check_wire(sent: Sequence[_jax.Atom], name: str) -> None:
    for value in sent:
        if not jnp.issubdtype(value.aval.dtype, jnp.floating):
            raise PipelineFormError(
                f"stage {name!r} hands on an array that is not floating point",
                got=f"{value.aval.dtype.name}{list(value.aval.shape)}",
                fix="give it to the pipelined function as an argument: every stage can "
                "read those",
            )


def _variables(atoms: Sequence[_jax.Atom]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, _jax.Literal)]
