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

from tessera import _jax

Where: TypeAlias = Callable[[_jax.Equation], bool]
Apply: TypeAlias = Callable[[_jax.Equation, Sequence[Any]], Sequence[Any]]
Interpreter: TypeAlias = Callable[[_jax.Program, Sequence[Any]], Sequence[Any]]


class Environment:
    """The values of a program's variables while it is interpreted."""

    def __init__(self, program: _jax.Program, values: Sequence[Any]) -> None:
        self._values: dict[Any, Any] = {}
        self.write(_jax.constant_inputs(program), _jax.constants(program))
        self.write(_jax.inputs(program), values)

    @classmethod
    def of(cls, values: Mapping[_jax.Atom, Any]) -> "Environment":
        """An environment of some variables."""
        env = object.__new__(cls)
        env._values = dict(values)
        return env

    def read(self, atom: _jax.Atom) -> Any:
        """The value of a variable or literal."""
        return atom.val if isinstance(atom, _jax.Literal) else self._values[atom]

    def write(self, atoms: Iterable[_jax.Atom], values: Iterable[Any]) -> None:
        """Give variables their values."""
        self._values.update(zip(atoms, values, strict=True))

    def outputs(self, program: _jax.Program) -> list[Any]:
        """The values of a program's outputs."""
        return [self.read(atom) for atom in _jax.outputs(program)]

    def run(self, equations: Iterable[_jax.Equation]) -> None:
        """Apply equations as they are."""
        for equation in equations:
            values = [self.read(atom) for atom in equation.invars]
            self.write(equation.outvars, _jax.bind(equation, values))

    def record(
        self,
        equations: Iterable[_jax.Equation],
        program: _jax.Program,
        news: Iterable[_jax.Atom],
    ) -> None:
        """Apply equations as they are, and infer no types where these are known.

        Args:
          equations: Of the program.
          program: The program; its variables have values of its types.
          news: Variables whose values may have other types.
        """
        is_typed = all(jax.typeof(self._values[v]) == v.aval for v in news)
        if is_typed and _jax.can_record(program):
            _jax.record(equations, self._values)
        else:
            self.run(equations)

    def copy(self) -> "Environment":
        """An environment of its own with the same values."""
        return Environment.of(self._values)


def variables(atoms: Iterable[_jax.Atom]) -> list[Any]:
    """The atoms that are no literals, each once."""
    return list(dict.fromkeys(a for a in atoms if not isinstance(a, _jax.Literal)))


def use_counts(program: _jax.Program) -> Counter[Any]:
    """How often equations and outputs read each variable of a program."""
    reads = (*(e.invars for e in _jax.equations(program)), _jax.outputs(program))
    atoms = (atom for read in reads for atom in read)
    return Counter(a for a in atoms if not isinstance(a, _jax.Literal))


def contains(program: _jax.Program, where: Where) -> bool:
    """Whether ``where`` selects some equation, in nested programs too."""
    programs = programs_from(program, _jax.inner_programs)
    return any(where(equation) for p in programs for equation in _jax.equations(p))


def contains_inside(equation: _jax.Equation, where: Where) -> bool:
    """Whether ``where`` selects some equation of an equation's nested programs."""
    return any(contains(inner, where) for inner in _jax.inner_programs(equation))


def programs_from(
    program: _jax.Program,
    inside: Callable[[_jax.Equation], Iterable[_jax.Program]],
) -> Iterator[_jax.Program]:
    """A program and those ``inside`` its equations, each once if it is called often."""
    found, seen = [program], {id(program)}
    for each in found:
        yield each
        for equation in _jax.equations(each):
            for inner in inside(equation):
                if id(inner) not in seen:
                    seen.add(id(inner))
                    found.append(inner)


def programs_in_scopes(
    program: _jax.Program, scopes: str = ""
) -> Iterator[tuple[_jax.Program, str]]:
    """A program and those nested in it, each once for the name scopes that it is in.

    Args:
      program: The program.
      scopes: The path of name scopes that it is called in.
    """
    found, seen = [(program, scopes)], set[tuple[int, str]]()
    for each, around in found:
        yield each, around
        for equation in _jax.equations(each):
            for inner in _jax.inner_programs(equation):
                path = f"{around}/{_jax.name_scopes(equation)}"
                if (id(inner), path) not in seen:
                    seen.add((id(inner), path))
                    found.append((inner, path))


def nested_with_operands(
    equation: _jax.Equation,
) -> Iterator[tuple[_jax.Program, list[_jax.Atom]]]:
    """The programs in an equation, each with the operands of its first call.

    Programs that take something else, such as the blocks of a kernel, are left out.
    """
    operands, carried = list(equation.invars), len(equation.outvars)
    for name, inner in _jax.nested(equation):
        count = len(_jax.inputs(inner))
        if name == "cond_jaxpr":  # of a while loop: its constants, then what is carried
            yield inner, operands[: count - carried] + operands[-carried:]
        elif name in ("body_jaxpr", "branches"):
            yield inner, operands[-count:] if count else []
        elif count == len(operands):
            yield inner, operands


def interpret(program: _jax.Program, values: Sequence[Any], apply: Apply) -> list[Any]:
    """The outputs of a program whose equations are computed by ``apply``.

    Args:
      program: The program.
      values: Its inputs.
      apply: Takes an equation and its operands; returns its results.
    """
    env = Environment(program, values)
    for equation in _jax.equations(program):
        operands = [env.read(atom) for atom in equation.invars]
        env.write(equation.outvars, apply(equation, operands))
    return env.outputs(program)


def retrace(program: _jax.Program, apply: Apply) -> _jax.Program:
    """The program that ``interpret`` records."""

    def run(*values: Any) -> list[Any]:
        return interpret(program, values, apply)

    return _jax.retrace(run, program)


def inline_jits(program: _jax.Program) -> _jax.Program:
    """The program with the equations of nested ``jax.jit`` s in their place."""
    if not any(map(_jax.is_jit, _jax.equations(program))):
        return program

    def inside(call: _jax.Equation | None) -> Apply:
        def apply(equation: _jax.Equation, operands: Sequence[Any]) -> Sequence[Any]:
            equation = at_line_of(call, equation)
            if not _jax.is_jit(equation):
                return _jax.bind(equation, operands)
            with _jax.source_context(equation):
                return interpret(equation.params["jaxpr"], operands, inside(equation))

        return apply

    return retrace(program, inside(None))


def at_line_of(call: _jax.Equation | None, equation: _jax.Equation) -> _jax.Equation:
    """An equation of a called program, with the line of the call if it has none.

    What a library jitted, or JAX put there, has no line of the user's; the call has.
    """
    if call is None or _jax.source_line(equation):
        return equation
    lines = equation.source_info.replace(traceback=call.source_info.traceback)
    return equation.replace(source_info=lines)


def bind_with_nested(
    equation: _jax.Equation, values: Sequence[Any], interpreter: Interpreter
) -> list[Any]:
    """Apply an equation whose nested programs are run by ``interpreter``."""

    def as_function(inner: _jax.Program) -> Callable[..., Sequence[Any]]:
        def run(*arguments: Any) -> Sequence[Any]:
            return interpreter(inner, arguments)

        return run

    if _jax.is_shard_map(equation):
        return _jax.bind_shard_map(
            equation, values, as_function(equation.params["jaxpr"])
        )

    def again(inner: _jax.Program) -> _jax.Program:
        return _jax.retrace(as_function(inner), inner)

    return _jax.bind(equation, values, _jax.replace_nested(equation, again))


def rewrite(program: _jax.Program, where: Where, rule: Apply) -> _jax.Program:
    """Replace the equations that ``where`` selects by what ``rule`` computes.

    Args:
      program: A program, left as it is.
      where: Takes an equation.
      rule: Takes such an equation and its input values; returns its outputs.
    """
    if not contains(program, where):
        return program

    def apply(equation: _jax.Equation, operands: Sequence[Any]) -> Sequence[Any]:
        if where(equation):
            return rule(equation, operands)
        if contains_inside(equation, where):
            return bind_with_nested(
                equation, operands, lambda p, v: interpret(p, v, apply)
            )
        return _jax.bind(equation, operands)

    return retrace(program, apply)
