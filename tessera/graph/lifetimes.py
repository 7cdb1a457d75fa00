# SPDX-License-Identifier: Apache-2.0
"""Estimates when a program last needs its values in memory.

XLA neither stores views nor what it can compute anew from one array where it is read,
such as the ``1 - y * y`` in the derivative of ``y = tanh(x)``. A reader of those needs
the array that they come from.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeAlias

from tessera.foundations.primitive_properties import ARITHMETIC, CALLS, VIEWS
from tessera.jax_compat import jaxprs

_FUSED = VIEWS | ARITHMETIC

# An array, as a key; None for a literal or another constant.
_Key: TypeAlias = Any
_Step: TypeAlias = tuple[jaxprs.Equation, list[_Key], list[_Key]]


class Lifetimes:
    """When the arrays of one program are made, and when they are last needed.

    Times count equations, those of nested calls too; inputs are made at -1.
    Constants are no arrays.

    Args:
      program: The program.
      without: Reads that do not count: the ids of equations, and their operands.
      holds_inputs: Whether the caller holds the inputs in memory to the end.
    """

    def __init__(
        self,
        program: jaxprs.Program,
        without: Collection[tuple[int, int]] = (),
        *,
        holds_inputs: bool = False,
    ) -> None:
        self._keys: dict[Any, _Key] = {v: v for v in jaxprs.inputs(program)}
        self._made = dict[_Key, int]()
        self._view_of = dict[_Key, _Key]()
        self._needed = dict[_Key, int]()
        steps = list(_steps(jaxprs.equations(program), self._keys))
        source = dict[_Key, _Key]()  # of what is computed from one array alone
        for time, (equation, operands, results) in enumerate(steps):
            self._made.update(dict.fromkeys(results, time))
            if equation.primitive.name in VIEWS:
                self._view_of.update(zip(results, operands, strict=False))
            sources = {source.get(key, key) for key in operands if key is not None}
            if equation.primitive.name in _FUSED and len(sources) == 1:
                source.update(dict.fromkeys(results, sources.pop()))
        self._operands = defaultdict[int, list[list[_Key]]](list)
        for equation, operands, _ in steps:
            self._operands[id(equation)].append(operands)
        held = [self.key(atom) for atom in jaxprs.outputs(program)]
        held += jaxprs.inputs(program) if holds_inputs else []
        self._needed.update(dict.fromkeys(held, len(steps)))
        for time, (equation, operands, results) in reversed([*enumerate(steps)]):
            is_fused = bool(results) and all(key in source for key in results)
            until = max(map(self._until, results)) if is_fused else time
            for index, key in enumerate(operands):
                if key is not None and (id(equation), index) not in without:
                    self._needed[key] = max(until, self._until(key))

    def operands(self, equation: jaxprs.Equation) -> list[list[_Key]]:
        """The operands of an equation each time that it is reached."""
        return self._operands[id(equation)]

    def key(self, atom: jaxprs.Atom) -> _Key:
        """The array of a variable of the program itself."""
        return None if isinstance(atom, jaxprs.Literal) else self._keys.get(atom)

    def made(self, key: _Key) -> int:
        """When the array is made that a value is a view of."""
        return self._made.get(self._array(key), -1)

    def needed(self, key: _Key) -> int:
        """When the array is last needed that a value is a view of; -1 if it is not."""
        return self._until(self._array(key))

    def _until(self, key: _Key) -> int:
        return self._needed.get(key, -1)

    def _array(self, key: _Key) -> _Key:
        while key in self._view_of:
            key = self._view_of[key]
        return key


def called(equation: jaxprs.Equation) -> jaxprs.Program | None:
    """The program that an equation calls with its own operands, once."""
    if equation.primitive.name not in CALLS and not jaxprs.is_shard_map(equation):
        return None
    programs = jaxprs.inner_programs(equation)
    if len(programs) != 1 or len(jaxprs.inputs(programs[0])) != len(equation.invars):
        return None
    return programs[0]


def _steps(
    equations: Sequence[jaxprs.Equation], keys: dict[Any, _Key]
) -> Iterator[_Step]:
    """Equations with the keys of their operands and results, nested ones in place.

    Args:
      equations: Of one program.
      keys: Of its inputs; those of its other variables are added.
    """
    for equation in equations:
        operands = [
            None if isinstance(atom, jaxprs.Literal) else keys.get(atom)
            for atom in equation.invars
        ]
        if (inner := called(equation)) is not None:
            inside = dict(zip(jaxprs.inputs(inner), operands, strict=True))
            yield from _steps(jaxprs.equations(inner), inside)
            results = [
                None if isinstance(atom, jaxprs.Literal) else inside.get(atom)
                for atom in jaxprs.outputs(inner)
            ]
        else:
            # What is made of constants alone is one too.
            is_constant = all(key is None for key in operands)
            results = [None if is_constant else object() for _ in equation.outvars]
            if not is_constant:
                yield equation, operands, results
        keys.update(zip(equation.outvars, results, strict=True))
