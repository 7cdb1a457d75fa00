# SPDX-License-Identifier: Apache-2.0
"""How a pass changes a program: run it, doing some equations another way.

JAX's own style: a program is interpreted equation by equation under a new trace, and
what comes out is the new program. Source lines and name scopes are carried over, and
nested programs (of ``scan``, ``cond``, ``jit``, ``shard_map``) are rewritten in place.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from tessera import _jax

Where: TypeAlias = Callable[[_jax.Equation, str], bool]
Rule: TypeAlias = Callable[[_jax.Equation, Sequence[Any], str], Sequence[Any]]
Interpreter: TypeAlias = Callable[[_jax.Program, Sequence[Any]], Sequence[Any]]


class Environment:
    """The values of a program's variables while it is interpreted."""

    def __init__(self, program: _jax.Program, values: Sequence[Any]) -> None:
        self._values: dict[Any, Any] = {}
        self.write(_jax.constant_inputs(program), _jax.constants(program))
        self.write(_jax.inputs(program), values)

    @classmethod
    def of(cls, values: Mapping[_jax.Atom, Any]) -> "Environment":
        """An environment that knows some variables."""
        env = object.__new__(cls)
        env._values = dict(values)
        return env

    def read(self, atom: _jax.Atom) -> Any:
        """The value of a variable or literal."""
        return atom.val if isinstance(atom, _jax.Literal) else self._values[atom]

    def write(self, atoms: Iterable[_jax.Atom], values: Iterable[Any]) -> None:
        """Give variables their values."""
        self._values.update(zip(atoms, values, strict=True))

    def run(self, equations: Iterable[_jax.Equation]) -> None:
        """Apply equations as they are."""
        for equation in equations:
            values = [self.read(atom) for atom in equation.invars]
            self.write(equation.outvars, _jax.bind(equation, values))

    def copy(self) -> "Environment":
        """An environment of its own with the same values."""
        return Environment.of(self._values)


def contains(program: _jax.Program, where: Where, scopes: str = "") -> bool:
    """Whether some equation is one that ``where`` means, nested programs included."""
    for equation in _jax.equations(program):
        path = f"{scopes}/{_jax.name_scopes(equation)}"
        if where(equation, path):
            return True
        if any(contains(p, where, path) for p in _jax.inner_programs(equation)):
            return True
    return False


def nested_with_operands(
    equation: _jax.Equation,
) -> Iterator[tuple[_jax.Program, list[_jax.Atom]]]:
    """The programs in an equation, each with what its inputs are given at first.

    Those that JAX gives something else, such as a kernel its blocks, are left out.
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


def without_jits(program: _jax.Program) -> _jax.Program:
    """The program with the equations of nested ``jax.jit`` s in their place."""
    if not any(map(_jax.is_jit, _jax.equations(program))):
        return program

    def interpret(
        inner: _jax.Program, values: Sequence[Any], call: _jax.Equation = None
    ) -> list[Any]:
        env = Environment(inner, values)
        for equation in _jax.equations(inner):
            if call is not None and not _jax.source_line(equation):
                # What a library jitted has no line of the user's; its call has.
                lines = equation.source_info.replace(
                    traceback=call.source_info.traceback
                )
                equation = equation.replace(source_info=lines)
            if not _jax.is_jit(equation):
                env.run([equation])
                continue
            operands = [env.read(atom) for atom in equation.invars]
            with _jax.source_context(equation):
                results = interpret(equation.params["jaxpr"], operands, equation)
            env.write(equation.outvars, results)
        return [env.read(atom) for atom in _jax.outputs(inner)]

    def run(*values: Any) -> list[Any]:
        return interpret(program, values)

    return _jax.retrace(run, program)


def bind_with_nested(
    equation: _jax.Equation, values: Sequence[Any], interpret: Interpreter
) -> list[Any]:
    """Apply an equation whose nested programs are run by ``interpret``."""
    if _jax.is_manual_region(equation):
        body = equation.params["jaxpr"]

        def run_body(*blocks: Any) -> Sequence[Any]:
            return interpret(body, blocks)

        return _jax.bind_manual_region(equation, values, run_body)

    def again(inner: _jax.Program) -> _jax.Program:
        def run_inner(*arguments: Any) -> Sequence[Any]:
            return interpret(inner, arguments)

        return _jax.retrace(run_inner, inner)

    return _jax.bind(equation, values, _jax.replace_nested(equation, again))


def rewrite(program: _jax.Program, where: Where, rule: Rule) -> _jax.Program:
    """Replace the equations that ``where`` means by what ``rule`` computes.

    Args:
      program: A program, left as it is.
      where: Takes an equation and the path of name scopes that it is in.
      rule: Takes such an equation, its input values and the path; returns its outputs.
    """
    if not contains(program, where):
        return program

    def interpret(
        program: _jax.Program, values: Sequence[Any], scopes: str
    ) -> list[Any]:
        env = Environment(program, values)
        for equation in _jax.equations(program):
            path = f"{scopes}/{_jax.name_scopes(equation)}"
            inner = _jax.inner_programs(equation)
            operands = [env.read(atom) for atom in equation.invars]
            if where(equation, path):
                results = rule(equation, operands, path)
            elif any(contains(part, where, path) for part in inner):
                results = bind_with_nested(
                    equation, operands, lambda p, v, path=path: interpret(p, v, path)
                )
            else:
                results = _jax.bind(equation, operands)
            env.write(equation.outvars, results)
        return [env.read(atom) for atom in _jax.outputs(program)]

    def run(*values: Any) -> list[Any]:
        return interpret(program, values, "")

    return _jax.retrace(run, program)
