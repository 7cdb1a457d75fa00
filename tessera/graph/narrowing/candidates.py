# SPDX-License-Identifier: Apache-2.0
"""Finds, going forward, which values of a program may be narrow."""

from collections.abc import Sequence
from typing import Any, TypeAlias

from tessera.foundations.primitive_properties import ARITHMETIC, BROADCASTS, RESHAPES
from tessera.graph.narrowing.frames import CallFrame, Narrow, Scalar, State, Vector
from tessera.graph.narrowing.rules import (
    CUSTOM_CALLS,
    PAIRWISE,
    RULES,
    Rule,
    is_f32,
    rule_of,
)
from tessera.jax_compat import jaxprs

# What is known about each of several values, and which are computed.
_Known: TypeAlias = tuple[list[State], list[bool]]


def find_candidates(
    frame: CallFrame, states: Sequence[State], computed: Sequence[bool]
) -> None:
    """Write into a frame which values may be narrow.

    Args:
      frame: The frame.
      states: Of the inputs.
      computed: Which inputs some equation computed.
    """
    inputs = jaxprs.inputs(frame.program)
    frame.states = dict(zip(inputs, states, strict=True))
    frame.computed = {v for v, is_so in zip(inputs, computed, strict=True) if is_so}
    for equation in jaxprs.equations(frame.program):
        results, are_computed = _results(frame, equation)
        known = zip(equation.outvars, results, are_computed, strict=True)
        for variable, state, is_computed in known:
            frame.states[variable] = state if is_f32(variable) else None
            if is_computed:
                frame.computed.add(variable)


def _known(frame: CallFrame, atoms: Sequence[jaxprs.Atom]) -> _Known:
    return [frame.state(a) for a in atoms], [frame.is_computed(a) for a in atoms]


def _results(frame: CallFrame, equation: jaxprs.Equation) -> _Known:
    """What is known about the results of an equation."""
    inner, count = _called(equation), len(equation.outvars)
    if inner is not None:
        new = CallFrame(inner, frame.path(equation))
        called = frame.frames.setdefault(id(equation), new)
        return _results_of_call(equation, called, *_known(frame, equation.invars))
    if rule_of(equation, None) is not Rule.MOVE:
        return [_result(frame, equation)] * count, [True] * count
    if equation.primitive.name in PAIRWISE:
        return _known(frame, equation.invars)
    atoms = [atom for atom in equation.invars if is_f32(atom)]
    is_computed = any(map(frame.is_computed, atoms))
    return [_moved(frame, equation, atoms)] * count, [is_computed] * count


def _called(equation: jaxprs.Equation) -> jaxprs.Program | None:
    """The program of a call or of a ``scan``; other nested ones have f32 boundaries."""
    name = equation.primitive.name
    if RULES.get(name) is not Rule.INSIDE and name not in CUSTOM_CALLS:
        return None
    programs = jaxprs.inner_programs(equation)
    if len(programs) != 1 or len(jaxprs.inputs(programs[0])) != len(equation.invars):
        return None
    return programs[0]


def _result(frame: CallFrame, equation: jaxprs.Equation) -> State:
    """What is known about the results of a matmul or of arithmetic."""
    name, dtype = equation.primitive.name, frame.dtype_inside(equation)
    rule, is_forward = rule_of(equation, dtype), not frame.is_backward(equation)
    if rule is Rule.MATMUL:
        return Narrow(dtype, True, is_forward)
    states = [frame.state(atom) for atom in equation.invars if is_f32(atom)]
    arrays = [state for state in states if not isinstance(state, Scalar)]
    if states and not arrays:
        if name == "convert_element_type":  # only the weak type is another
            return states[0]
        return Scalar(None) if name in ARITHMETIC else None
    if rule is not Rule.NARROW:
        return None
    if name == "add" and Vector() in arrays:  # the bias of a layer is cast with it
        arrays = [state for state in arrays if state != Vector()]
        if not arrays or not all(getattr(s, "is_product", False) for s in arrays):
            return None
    return Narrow(dtype, False, is_forward) if _are_narrow(arrays, dtype) else None


def _moved(
    frame: CallFrame, equation: jaxprs.Equation, atoms: Sequence[jaxprs.Atom]
) -> State:
    """What is known about the results of an equation that moves its operands."""
    states = [frame.state(atom) for atom in atoms]
    arrays = [state for state in states if not isinstance(state, Scalar)]
    if not arrays:
        return states[0] if len(set(states)) == 1 else None
    if len(atoms) == 1 and arrays[0] in (None, Vector()):
        return Vector() if _is_spread(frame, equation, atoms[0]) else None
    dtype = getattr(arrays[0], "dtype", None)
    numbers = (state for state in states if isinstance(state, Scalar))
    if not _are_narrow(arrays, dtype) or not all(n.fits(dtype) for n in numbers):
        return None
    narrow = [state for state in arrays if isinstance(state, Narrow)]
    return Narrow(
        dtype, all(s.is_product for s in narrow), all(s.is_forward for s in narrow)
    )


def _is_spread(frame: CallFrame, equation: jaxprs.Equation, atom: jaxprs.Atom) -> bool:
    """Whether a parameter of one dim gets more dims, or has got them."""
    if frame.is_computed(atom):
        return False
    name, sizes = equation.primitive.name, equation.outvars[0].aval.shape
    is_vector = _is_one_dim(atom.aval.shape) or frame.state(atom) == Vector()
    return is_vector and (
        name in BROADCASTS or (name in RESHAPES and _is_one_dim(sizes))
    )


def _is_one_dim(sizes: Sequence[int]) -> bool:
    return sum(size > 1 for size in sizes) == 1


def _are_narrow(states: Sequence[State], dtype: Any) -> bool:
    return all(isinstance(s, Narrow) and s.dtype == dtype for s in states)


def _results_of_call(
    equation: jaxprs.Equation,
    frame: CallFrame,
    states: list[State],
    computed: list[bool],
) -> _Known:
    """What is known about the results of a call, whose frame this is."""
    if equation.primitive.name == "scan":
        return _results_of_loop(equation, frame, states, computed)
    find_candidates(frame, states, computed)
    results = _known(frame, jaxprs.outputs(frame.program))
    if equation.primitive.name in CUSTOM_CALLS:  # it has f32 operands
        count = len(states)
        find_candidates(frame, [None] * count, [False] * count)
    return results


def _results_of_loop(
    equation: jaxprs.Equation,
    frame: CallFrame,
    states: list[State],
    computed: list[bool],
) -> _Known:
    """The same of a loop, when what is known about its carries does not change."""
    consts, carries = jaxprs.scan_sizes(equation)
    carried = slice(consts, consts + carries)
    states[carried] = [s if isinstance(s, Narrow) else None for s in states[carried]]
    computed[carried] = [True] * carries
    while True:
        find_candidates(frame, states, computed)
        results, are_computed = _known(frame, jaxprs.outputs(frame.program))
        both = zip(states[carried], results[:carries], strict=True)
        agreed: list[State] = [_agreed(first, later) for first, later in both]
        if agreed == states[carried]:
            break
        states[carried] = agreed
    stacked = [None if state == Vector() else state for state in results[carries:]]
    return [*agreed, *stacked], [True] * carries + are_computed[carries:]


def _agreed(first: State, later: State) -> State:
    """What a carry is, by its first value and the next one."""
    if not isinstance(first, Narrow) or not isinstance(later, Narrow):
        return None
    if first.dtype != later.dtype:
        return None
    return Narrow(
        first.dtype,
        first.is_product and later.is_product,
        first.is_forward and later.is_forward,
    )
