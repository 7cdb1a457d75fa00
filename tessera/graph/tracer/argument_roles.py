# SPDX-License-Identifier: Apache-2.0
"""Analyzes how a traced step uses its inputs, to tell weights from data.

Gradients are taken by weights; losses read weights and data; results may be new values
of inputs. Neither names nor sizes count.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tessera.foundations.primitive_properties import VIEWS
from tessera.graph.gradient_primitive import gradient_p, gradient_taken_p
from tessera.graph.rewriting import inline_jits
from tessera.jax_compat import jaxprs, primitives


@dataclass(frozen=True)
class GradientUses:
    """The inputs that the gradients of a program involve.

    Attributes:
      differentiated: Inputs of the program that some gradient is taken by.
      read: Inputs that the loss of some gradient depends on, those included.
    """

    differentiated: frozenset[Any]
    read: frozenset[Any]

    @property
    def data(self) -> frozenset[Any]:
        """Inputs that losses read and no gradient is taken by."""
        return self.read - self.differentiated


def gradient_uses(program: jaxprs.Program) -> GradientUses:
    """How a program uses its inputs, in loops and branches as well."""
    inputs = set(jaxprs.inputs(program))
    differentiated, read = _uses(program)
    return GradientUses(frozenset(differentiated & inputs), frozenset(read & inputs))


def views_of(program: jaxprs.Program, atoms: Iterable[jaxprs.Atom]) -> frozenset[Any]:
    """Inputs of a program that some of its values are views of."""
    made = {
        variable: (equation, number)
        for equation in jaxprs.equations(program)
        for number, variable in enumerate(equation.outvars)
    }
    return frozenset(_viewed(atoms, made) & set(jaxprs.inputs(program)))


def _uses(program: jaxprs.Program) -> tuple[set[Any], set[Any]]:
    """Variables that are differentiated by, and that losses depend on."""
    differentiated, read = set[Any](), set[Any]()
    made: dict[Any, tuple[jaxprs.Equation, int]] = {}
    for index, equation in enumerate(jaxprs.equations(program)):
        made.update((v, (equation, i)) for i, v in enumerate(equation.outvars))
        if equation.primitive in (gradient_p, gradient_taken_p):
            loss, *weights = equation.invars
            differentiated.update(_viewed(weights, made))
            read |= jaxprs.sources(program, loss, before=index)
        for inner, operands in primitives.calls_with_operands(equation):
            inside = _uses(inner)
            outside = dict(zip(jaxprs.inputs(inner), operands, strict=True))
            by, of = ([outside[v] for v in found if v in outside] for found in inside)
            differentiated.update(_viewed(by, made))
            for atom in of:
                read |= jaxprs.sources(program, atom, before=index)
    return differentiated, read


def _viewed(atoms: Iterable[jaxprs.Atom], made: dict[Any, Any]) -> set[Any]:
    """Some variables and those that they are views of."""
    found, todo = set[Any](), list(atoms)
    while todo:
        atom = todo.pop()
        if isinstance(atom, jaxprs.Literal) or atom in found:
            continue
        found.add(atom)
        equation, number = made.get(atom, (None, 0))
        if equation is not None and equation.primitive.name in VIEWS:
            todo.append(equation.invars[number])
    return found


@dataclass(frozen=True)
class NewValue:
    """The inputs of a program that a value may be the new value of.

    Attributes:
      of: Inputs that it is made from by adding to them.
      scaled: Inputs that it is made from by scaling them, and adding.
    """

    of: frozenset[Any] = frozenset()
    scaled: frozenset[Any] = frozenset()

    @property
    def any(self) -> frozenset[Any]:
        """The first, or else the second."""
        return self.of or self.scaled

    def __or__(self, other: "NewValue") -> "NewValue":
        return NewValue(self.of | other.of, self.scaled | other.scaled)


def updated_inputs(program: jaxprs.Program) -> list[NewValue]:
    """For each output of a program, the inputs that it is the new value of.

    The result of ``w - rate * gradient`` is a new ``w``, whatever ``gradient`` is, and
    that of ``0.9 * m + 0.1 * gradient`` a new ``m`` where ``gradient`` is no input.

    Args:
      program: The program, without calls of jitted functions.
    """
    known = {v: NewValue(frozenset([v])) for v in jaxprs.inputs(program)}

    def of(atom: jaxprs.Atom) -> NewValue:
        return (
            NewValue() if isinstance(atom, jaxprs.Literal) else known.get(atom, _NONE)
        )

    for equation in jaxprs.equations(program):
        operands = [of(atom) for atom in equation.invars]
        for number, variable in enumerate(equation.outvars):
            known[variable] = _result(equation, number, operands)
    return [of(atom) for atom in jaxprs.outputs(program)]


def updated_indices(program: jaxprs.Program) -> list[list[int]]:
    """The same as indices of inputs, in a program that may call jitted functions."""
    program = inline_jits(program)
    numbers = {variable: i for i, variable in enumerate(jaxprs.inputs(program))}
    return [sorted(numbers[v] for v in found.any) for found in updated_inputs(program)]


_NONE: Final = NewValue()


def _result(
    equation: jaxprs.Equation, number: int, operands: Sequence[NewValue]
) -> NewValue:
    """One of the results of an equation."""
    name, found = equation.primitive.name, NewValue()
    if name in VIEWS:
        return operands[number]
    if name == "sub":
        return operands[0]
    if name in ("mul", "div"):
        first, second = operands
        if second == _NONE:
            return NewValue(scaled=first.any)
        return (
            NewValue(scaled=second.any) if first == _NONE and name == "mul" else found
        )
    if name in ("add", "add_any", "select_n"):
        for operand in operands[name == "select_n" :]:
            found |= operand
    elif name == "cond":
        for inner in jaxprs.inner_programs(equation):
            given = dict(zip(jaxprs.inputs(inner), operands[1:], strict=True))
            result = updated_inputs(inner)[number]
            for variable in result.of:
                found |= given[variable]
            for variable in result.scaled:
                found |= NewValue(scaled=given[variable].any)
    return found
