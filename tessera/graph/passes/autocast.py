# SPDX-License-Identifier: Apache-2.0
"""Compute in the dtype of ``ts.autocast`` by a table of operations."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from tessera.graph import rewriting
from tessera.graph.ir import Graph
from tessera.graph.narrowing.decisions import analyze
from tessera.graph.narrowing.frames import CallFrame, Scalar, Vector
from tessera.graph.narrowing.rules import (
    CUSTOM_CALLS,
    PAIRWISE,
    RULES,
    SINGLE_INSTRUCTIONS,
    Rule,
    autocast_dtype,
    is_f32,
    rule_of,
)
from tessera.jax_compat import jaxprs, primitives


def autocast(graph: Graph) -> Graph:
    """Compute what is written under ``ts.autocast`` in its dtype. Numerics: changed.

    ``narrowing.rules`` says which operations may be narrow, ``narrowing.decisions``
    which values are then stored in the dtype. An equation is inside by its name scope,
    which differentiation keeps, so backward operations are as their forward ones.
    Matmuls accumulate in f32, and what only f32 operations read of them is not rounded.

    Before:  y:f32 = dot_general x:f32 w:f32                  (in autocast_bfloat16)
             z:f32 = tanh y
             v:f32 = dot_general z u:f32
             s:f32 = exp v
    After:   a:bf16 = convert x; b:bf16 = convert w; c:bf16 = convert u
             y:bf16 = dot_general[preferred_element_type=bf16] a b
             d:f32 = convert y; e:f32 = tanh d; z:bf16 = convert e
             v:f32 = dot_general[preferred_element_type=f32] z c
             s:f32 = exp v

    Source: Micikevicius et al., Mixed Precision Training, arXiv 1710.03740.
    """
    return graph.with_program(_rewritten(graph.program, ""))


def _rewritten(program: jaxprs.Program, scopes: str) -> jaxprs.Program:
    """The program; the same if there is nothing to do."""
    if not _has_casts(program, scopes):
        return program
    frame = analyze(program, scopes)

    def run(*values: Any) -> list[Any]:
        return _Interpreter(frame, values).run()

    return jaxprs.retrace(run, program)


def _has_casts(program: jaxprs.Program, scopes: str) -> bool:
    """Whether a program in such name scopes has matmuls that are to be narrow."""
    return any(
        RULES.get(equation.primitive.name) is Rule.MATMUL
        and _is_cast(equation, f"{path}/{jaxprs.name_scopes(equation)}")
        for each, path in rewriting.programs_in_scopes(program, scopes)
        for equation in jaxprs.equations(each)
    )


def _is_cast(equation: jaxprs.Equation, scopes: str) -> bool:
    return rule_of(equation, autocast_dtype(scopes)) is Rule.MATMUL


class _Interpreter:
    """Interprets a program in which some f32 values are narrow.

    Args:
      frame: The program, and which values are.
      values: Its inputs, in the dtypes of the frame.
    """

    def __init__(self, frame: CallFrame, values: Sequence[Any]) -> None:
        self._frame, self._env = frame, rewriting.Environment(frame.program, values)
        self._converted = dict[tuple[jaxprs.Atom, Any], Any]()

    def run(self) -> list[Any]:
        """The outputs, in the dtypes of the frame."""
        for equation in jaxprs.equations(self._frame.program):
            results = self._results(equation)
            dtypes = [self._frame.narrow.get(v) for v in equation.outvars]
            with jaxprs.source_context(equation):
                results = [
                    value if dtype is None else _converted(value, dtype)
                    for value, dtype in zip(results, dtypes, strict=True)
                ]
            self._env.write(equation.outvars, results)
        pairs = zip(
            jaxprs.outputs(self._frame.program), self._frame.outputs, strict=True
        )
        return [self._read(atom, dtype) for atom, dtype in pairs]

    def _read(self, atom: jaxprs.Atom, dtype: Any = None) -> Any:
        """A value in the dtype that it is declared in, or an f32 one in another."""
        value = self._env.read(atom)
        if not is_f32(atom):
            return value
        dtype = jnp.dtype(jnp.float32) if dtype is None else dtype
        if isinstance(atom, jaxprs.Literal):
            return value if dtype == jnp.float32 else _converted(value, dtype)
        if (atom, dtype) not in self._converted:
            self._converted[atom, dtype] = _converted(value, dtype)
        return self._converted[atom, dtype]

    def _operands(self, equation: jaxprs.Equation, dtype: Any = None) -> list[Any]:
        with jaxprs.source_context(equation):
            return [self._read(atom, dtype) for atom in equation.invars]

    def _results(self, equation: jaxprs.Equation) -> list[Any]:
        """The results of an equation; some may still be in f32."""
        frame, name = self._frame, equation.primitive.name
        inside = frame.dtype_inside(equation)
        rule = rule_of(equation, inside)
        if rule is Rule.MATMUL:
            return self._product(equation, inside)
        if id(equation) in frame.frames and name not in CUSTOM_CALLS:
            return self._call(equation, frame.frames[id(equation)])
        if rule is Rule.MOVE and name in PAIRWISE:
            with jaxprs.source_context(equation):
                pairs = zip(equation.invars, equation.outvars, strict=True)
                values = [self._read(atom, frame.narrow.get(v)) for atom, v in pairs]
            return jaxprs.bind(equation, values)
        if rule is Rule.MOVE:
            dtype = frame.moved_dtype(equation)
            return jaxprs.bind(equation, self._operands(equation, dtype))
        if rule is Rule.NARROW and frame.runs_narrow(equation):
            native = inside if self._is_native(equation, inside) else None
            return jaxprs.bind(equation, self._operands(equation, native))
        return self._f32(equation)

    def _is_native(self, equation: jaxprs.Equation, dtype: Any) -> bool:
        """Whether to compute in a dtype, and not in f32 with a result rounded once.

        Numbers that the dtype does not have are not rounded first.
        """
        if equation.primitive.name not in SINGLE_INSTRUCTIONS:
            return False
        states = [self._frame.state(atom) for atom in equation.invars if is_f32(atom)]
        return all(
            state.is_exact(dtype) if isinstance(state, Scalar) else state != Vector()
            for state in states
        )

    def _product(self, equation: jaxprs.Equation, dtype: Any) -> list[Any]:
        """Of a matmul, as the program reads it: in f32 or rounded once."""
        with jaxprs.source_context(equation):
            narrowed = [self._read(atom, dtype) for atom in equation.invars[:2]]
        # Of a ragged dot the third operand is the sizes of its groups.
        others = [self._read(atom) for atom in equation.invars[2:]]
        is_narrow = self._frame.narrow.get(equation.outvars[0]) == dtype
        result = dtype if is_narrow else jnp.dtype(jnp.float32)
        return [primitives.bind_matmul(equation, [*narrowed, *others], result)]

    def _call(self, equation: jaxprs.Equation, frame: CallFrame) -> list[Any]:
        """The results of a call whose program has other dtypes."""
        inputs = jaxprs.inputs(frame.program)
        dtypes = [frame.narrow.get(variable) for variable in inputs]
        with jaxprs.source_context(equation):
            pairs = zip(equation.invars, dtypes, strict=True)
            values = [self._read(atom, dtype) for atom, dtype in pairs]
        if not _changes(frame):
            return jaxprs.bind(equation, values)

        def run(*values: Any) -> list[Any]:
            return _Interpreter(frame, values).run()

        def again(inner: jaxprs.Program) -> jaxprs.Program:
            return jaxprs.retrace(run, inner, dtypes)

        return jaxprs.bind(equation, values, jaxprs.replace_nested(equation, again))

    def _f32(self, equation: jaxprs.Equation) -> list[Any]:
        """The results of what has f32 operands; nested programs are rewritten."""
        operands, path = self._operands(equation), self._frame.path(equation)
        programs = jaxprs.inner_programs(equation)
        if not any(_has_casts(each, path) for each in programs):
            return jaxprs.bind(equation, operands)

        def run(inner: jaxprs.Program, values: Sequence[Any]) -> list[Any]:
            frame = self._frame.frames.get(id(equation))
            if frame is None:
                frame = analyze(inner, path)
            return _Interpreter(frame, values).run()

        return rewriting.bind_with_nested(equation, operands, run)


def _changes(frame: CallFrame) -> bool:
    """Whether a called program is another one than before."""
    if frame.narrow or any(frame.outputs) or any(map(_changes, frame.frames.values())):
        return True
    return _has_casts(frame.program, frame.scopes)


def _converted(value: Any, dtype: Any) -> Any:
    """An f32 value or a narrow one in another dtype."""
    current = jnp.result_type(value)
    if current == dtype:
        return value
    if jnp.float32 not in (current, dtype):
        value = lax.convert_element_type(value, jnp.float32)
    return lax.convert_element_type(value, dtype)
