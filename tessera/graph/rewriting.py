# SPDX-License-Identifier: Apache-2.0
"""Rewrites jaxprs by interpreting them under a new trace, equation by equation.

This is the style of JAX's own transformations: a pass interprets a program and does
some equations another way, and what the trace records is the new program. Source lines
and name scopes are carried over, and nested programs (of ``scan``, ``cond``, ``jit``,
``shard_map``) are rewritten in place.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax

from tessera.jax_compat import jaxprs, primitives, traces

Where: TypeAlias = Callable[[jaxprs.Equation], bool]
Apply: TypeAlias = Callable[[jaxprs.Equation, Sequence[Any]], Sequence[Any]]
Interpreter: TypeAlias = Callable[[jaxprs.Program, Sequence[Any]], Sequence[Any]]


class Environment:
    """The values of a program's variables while it is interpreted."""

    def __init__(self, program: jaxprs.Program, values: Sequence[Any]) -> None:
        self._values: dict[Any, Any] = {}
        self.write(jaxprs.constant_inputs(program), jaxprs.constants(program))
        self.write(jaxprs.inputs(program), values)

    @classmethod
    def of(cls, values: Mapping[jaxprs.Atom, Any]) -> "Environment":
        """An environment of some variables."""
        env = object.__new__(cls)
        env._values = dict(values)
        return env

    def read(self, atom: jaxprs.Atom) -> Any:
        """The value of a variable or literal."""
        return atom.val if isinstance(atom, jaxprs.Literal) else self._values[atom]

    def write(self, atoms: Iterable[jaxprs.Atom], values: Iterable[Any]) -> None:
        """Give variables their values."""
        self._values.update(zip(atoms, values, strict=True))

    def outputs(self, program: jaxprs.Program) -> list[Any]:
        """The values of a program's outputs."""
        return [self.read(atom) for atom in jaxprs.outputs(program)]

    def run(self, equations: Iterable[jaxprs.Equation]) -> None:
        """Apply equations as they are."""
        for equation in equations:
            values = [self.read(atom) for atom in equation.invars]
            self.write(equation.outvars, jaxprs.bind(equation, values))

    def record(
        self,
        equations: Iterable[jaxprs.Equation],
        program: jaxprs.Program,
        news: Iterable[jaxprs.Atom],
    ) -> None:
        """Apply equations as they are, and infer no types where these are known.

        Args:
          equations: Of the program.
          program: The program; its variables have values of its types.
          news: Variables whose values may have other types.
        """
        is_typed = all(jax.typeof(self._values[v]) == v.aval for v in news)
        if is_typed and traces.can_record(program):
            traces.record(equations, self._values)
        else:
            self.run(equations)

    def copy(self) -> "Environment":
        """An environment of its own with the same values."""
        return Environment.of(self._values)


def variables(atoms: Iterable[jaxprs.Atom]) -> list[Any]:
    """The atoms that are no literals, each once."""
    return list(dict.fromkeys(a for a in atoms if not isinstance(a, jaxprs.Literal)))


def use_counts(program: jaxprs.Program) -> Counter[Any]:
    """How often equations and outputs read each variable of a program."""
    reads = (*(e.invars for e in jaxprs.equations(program)), jaxprs.outputs(program))
    atoms = (atom for read in reads for atom in read)
    return Counter(a for a in atoms if not isinstance(a, jaxprs.Literal))


def contains(program: jaxprs.Program, where: Where) -> bool:
    """Whether ``where`` selects some equation, in nested programs too."""
    programs = programs_from(program, jaxprs.inner_programs)
    return any(where(equation) for p in programs for equation in jaxprs.equations(p))


def contains_inside(equation: jaxprs.Equation, where: Where) -> bool:
    """Whether ``where`` selects some equation of an equation's nested programs."""
    return any(contains(inner, where) for inner in jaxprs.inner_programs(equation))


def programs_from(
    program: jaxprs.Program,
    inside: Callable[[jaxprs.Equation], Iterable[jaxprs.Program]],
) -> Iterator[jaxprs.Program]:
    """A program and those ``inside`` its equations, each once if it is called often."""
    found, seen = [program], {id(program)}
    for each in found:
        yield each
        for equation in jaxprs.equations(each):
            for inner in inside(equation):
                if id(inner) not in seen:
                    seen.add(id(inner))
                    found.append(inner)


def programs_in_scopes(
    program: jaxprs.Program, scopes: str = ""
) -> Iterator[tuple[jaxprs.Program, str]]:
    """A program and those nested in it, each once for the name scopes that it is in.

    Args:
      program: The program.
      scopes: The path of name scopes that it is called in.
    """
    found, seen = [(program, scopes)], set[tuple[int, str]]()
    for each, around in found:
        yield each, around
        for equation in jaxprs.equations(each):
            for inner in jaxprs.inner_programs(equation):
                path = f"{around}/{jaxprs.name_scopes(equation)}"
                if (id(inner), path) not in seen:
                    seen.add((id(inner), path))
                    found.append((inner, path))


def interpret(
    program: jaxprs.Program, values: Sequence[Any], apply: Apply
) -> list[Any]:
    """The outputs of a program whose equations are computed by ``apply``.

    Args:
      program: The program.
      values: Its inputs.
      apply: Takes an equation and its operands; returns its results.
    """
    env = Environment(program, values)
    for equation in jaxprs.equations(program):
        operands = [env.read(atom) for atom in equation.invars]
        env.write(equation.outvars, apply(equation, operands))
    return env.outputs(program)


def retrace(program: jaxprs.Program, apply: Apply) -> jaxprs.Program:
    """The program that ``interpret`` records."""

    def run(*values: Any) -> list[Any]:
        return interpret(program, values, apply)

    return jaxprs.retrace(run, program)


def inline_jits(program: jaxprs.Program) -> jaxprs.Program:
    """The program with the equations of nested ``jax.jit`` s in their place."""
    if not any(map(jaxprs.is_jit, jaxprs.equations(program))):
        return program

    def inside(call: jaxprs.Equation | None) -> Apply:
        def apply(equation: jaxprs.Equation, operands: Sequence[Any]) -> Sequence[Any]:
            equation = at_line_of(call, equation)
            if not jaxprs.is_jit(equation):
                return jaxprs.bind(equation, operands)
            with jaxprs.source_context(equation):
                return interpret(primitives.body(equation), operands, inside(equation))

        return apply

    return retrace(program, inside(None))


def at_line_of(
    call: jaxprs.Equation | None, equation: jaxprs.Equation
) -> jaxprs.Equation:
    """An equation of a called program, with the line of the call if it has none.

    What a library jitted, or JAX put there, has no line of the user's; the call has.
    """
    if call is None or jaxprs.source_line(equation):
        return equation
    lines = equation.source_info.replace(traceback=call.source_info.traceback)
    return equation.replace(source_info=lines)


def bind_with_nested(
    equation: jaxprs.Equation, values: Sequence[Any], interpreter: Interpreter
) -> list[Any]:
    """Apply an equation whose nested programs are run by ``interpreter``."""

    def as_function(inner: jaxprs.Program) -> Callable[..., Sequence[Any]]:
        def run(*arguments: Any) -> Sequence[Any]:
            return interpreter(inner, arguments)

        return run

    if jaxprs.is_shard_map(equation):
        return primitives.bind_region(
            equation, values, as_function(primitives.body(equation))
        )

    def again(inner: jaxprs.Program) -> jaxprs.Program:
        return jaxprs.retrace(as_function(inner), inner)

    return jaxprs.bind(equation, values, jaxprs.replace_nested(equation, again))


def rewrite(program: jaxprs.Program, where: Where, rule: Apply) -> jaxprs.Program:
    """Replace the equations that ``where`` selects by what ``rule`` computes.

    Args:
      program: A program, left as it is.
      where: Takes an equation.
      rule: Takes such an equation and its input values; returns its outputs.
    """
    if not contains(program, where):
        return program

    def apply(equation: jaxprs.Equation, operands: Sequence[Any]) -> Sequence[Any]:
        if where(equation):
            return rule(equation, operands)
        if contains_inside(equation, where):
            return bind_with_nested(
                equation, operands, lambda p, v: interpret(p, v, apply)
            )
        return jaxprs.bind(equation, operands)

    return retrace(program, apply)
