# SPDX-License-Identifier: Apache-2.0
"""Refuses what code per device, or per microbatch, would silently get wrong.

In an SPMD region a value is the same on all devices along an axis, or it differs; so it
is with the microbatches of a batch. Two things look right and are not. The gradient by
weights that are the same everywhere is the sum over all devices already, and another
reduction multiplies it. And random numbers from a key that is the same everywhere are
repeated for each block of rows, which one device would give other numbers. Both are
found in the traced program, before anything is compiled.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, Final, TypeAlias

import jax

from tessera.errors import CollectiveError, RandomNumbersError
from tessera.jax_compat import jaxprs, primitives, traces

MICROBATCHES: Final = "microbatches"
"""The axis over which the microbatches of a batch differ."""

Axes: TypeAlias = frozenset[str]
_NONE: Final[Axes] = frozenset()
_Run: TypeAlias = Callable[[Any, list["_Value"]], list["_Value"]]

# Whether a collective's result is the same on all devices of its axes.
_COLLECTIVES: Final = {
    **dict.fromkeys(("psum", "psum_invariant", "pmax", "pmin"), True),
    **dict.fromkeys(("all_gather", "all_gather_invariant"), True),
    **dict.fromkeys(("reduce_scatter", "all_to_all", "ppermute"), False),
}
# The number of the result with random numbers.
_RANDOM: Final = {"random_bits": 0, "random_gamma": 0, "rng_bit_generator": 1}


@dataclass(frozen=True)
class _Value:
    """What is known of a value.

    Attributes:
      differs: The axes over which it may differ.
      is_data: Whether it was computed from an input, and not from numbers in the
        program and random numbers alone.
      drawn: Of random numbers, their shape and the line that drew them.
      summed: The axes over which it is, or was computed from, a sum of all devices'
        gradients, where it is the same on these.
    """

    differs: Axes = _NONE
    is_data: bool = False
    drawn: str = ""
    summed: Axes = _NONE

    def with_(self, other: "_Value") -> "_Value":
        """What is known of a value computed from both."""
        differs, is_data = self.differs | other.differs, self.is_data or other.is_data
        drawn = "" if is_data else self.drawn or other.drawn
        return _Value(differs, is_data, drawn, (self.summed | other.summed) - differs)


def check_region(mapped: Callable[..., Any], *operands: Any) -> None:
    """Check the body of an SPMD region, by tracing it.

    Args:
      mapped: A ``jax.shard_map`` of the body.
      operands: Its arguments, or their types.

    Raises:
      CollectiveError: [T206] gradients are reduced that are sums already.
      RandomNumbersError: [T211] random numbers are the same on devices whose blocks
        differ.
    """
    program = jax.make_jaxpr(mapped)(*operands)
    for equation in filter(jaxprs.is_shard_map, jaxprs.equations(program)):
        body = primitives.body(equation)
        shape = dict(primitives.region(equation).mesh.shape)
        inputs = [_of_type(variable) for variable in jaxprs.inputs(body)]
        _Checks({axis for axis, size in shape.items() if size > 1}).run(body, inputs)


def check_microbatches(program: jaxprs.Program, has_rows: Iterable[bool]) -> None:
    """Check a program that runs once for each microbatch.

    Args:
      program: The program.
      has_rows: For each input, whether microbatches have different ones.

    Raises:
      RandomNumbersError: [T211] all of them draw the same random numbers.
    """
    rows = _Value(frozenset((MICROBATCHES,)), is_data=True)
    inputs = [rows if each else replace(rows, differs=_NONE) for each in has_rows]
    _Checks({MICROBATCHES}).run(program, inputs)


def _of_type(variable: Any) -> _Value:
    """An input of a region, which differs as its type says."""
    return _Value(traces.varying_axes_of(variable.aval), is_data=True)


@dataclass(frozen=True)
class _Surroundings:
    """Where an equation is.

    Attributes:
      call: The outermost call of a jitted function around it. JAX traces that once, so
        lines inside are those of the first call.
      in_backward: Whether it is in a backward pass.
      in_loop: Whether it is in a loop.
    """

    call: jaxprs.Equation | None = None
    in_backward: bool = False
    in_loop: bool = False

    def inside(self, equation: jaxprs.Equation) -> "_Surroundings":
        """The place of an equation, and of those in its nested programs."""
        is_loop = equation.primitive.name in ("scan", "while")
        return _Surroundings(
            self.call or (equation if jaxprs.is_jit(equation) else None),
            self.in_backward or jaxprs.is_transposed(equation),
            self.in_loop or is_loop,
        )


class _Checks:
    """Follows values through a program.

    Args:
      axes: Those over which values can differ.
    """

    def __init__(self, axes: Iterable[str]) -> None:
        self._axes = frozenset(axes)

    def run(
        self,
        program: jaxprs.Program,
        inputs: Sequence[_Value],
        around: _Surroundings = _Surroundings(),
    ) -> list[_Value]:
        """What is known of a program's outputs, of that of its inputs."""
        known = dict(zip(jaxprs.inputs(program), inputs, strict=True))
        known.update((v, _of_type(v)) for v in jaxprs.constant_inputs(program))

        def read(atoms: Iterable[jaxprs.Atom]) -> list[_Value]:
            return [
                _Value() if isinstance(a, jaxprs.Literal) else known[a] for a in atoms
            ]

        for equation in jaxprs.equations(program):
            place = around.inside(equation)
            operands = read(equation.invars)
            results = _of_nested(equation, operands, partial(self.run, around=place))
            if results is None:
                results = self._results(equation, operands, place)
            known.update(zip(equation.outvars, results, strict=True))
        return read(jaxprs.outputs(program))

    def _results(
        self, equation: jaxprs.Equation, operands: list[_Value], place: _Surroundings
    ) -> list[_Value]:
        name = equation.primitive.name
        line = jaxprs.source_line(place.call or equation)
        if name == "gradient":
            return _gradients(equation, operands)
        if name in _COLLECTIVES:
            is_backward = place.in_backward
            return [self._sent(equation, each, line, is_backward) for each in operands]
        if not name.startswith("random_"):  # which derive keys from keys
            self._check_random(operands, line)
        result = reduce(_Value.with_, operands, _Value())
        if name == "axis_index":
            result = replace(result, differs=primitives.axis_names(equation))
        results = [result] * len(equation.outvars)
        if (number := _RANDOM.get(name)) is not None:
            shape = equation.outvars[number].aval.shape
            # A number by itself is for all rows, as it is on one device; in a loop it
            # may be one for each row.
            if shape or place.in_loop:
                results[number] = _Value(result.differs, drawn=f"{shape}{_at(line)}")
        return results

    def _sent(
        self, equation: jaxprs.Equation, operand: _Value, line: str, is_backward: bool
    ) -> _Value:
        """The result of a collective; in a backward pass it sums gradients."""
        axes = primitives.axis_names(equation)
        is_alike = _COLLECTIVES[equation.primitive.name]
        if not is_backward and operand.summed & axes & self._axes:
            raise _summed_already(operand.summed, line)
        differs = operand.differs - axes if is_alike else operand.differs | axes
        summed = operand.summed | axes if is_backward else operand.summed
        return _Value(differs, is_data=True, summed=summed - differs)

    def _check_random(self, operands: Iterable[_Value], line: str) -> None:
        """Raise [T211] where random numbers meet values that differ more than they."""
        values = list(operands)
        data = _NONE.union(*(v.differs for v in values if v.is_data))
        for value in values:
            axes = (data - value.differs) & self._axes
            if value.drawn and axes:
                raise _repeated_numbers(value.drawn, line, sorted(axes))


def _gradients(equation: jaxprs.Equation, operands: list[_Value]) -> list[_Value]:
    """Of ``gradient loss weight…``: each device's own by weights of its own."""
    loss, *weights = operands
    own = [traces.varying_axes_of(v.aval) for v in equation.outvars]
    return [
        _Value(
            w.differs | loss.differs & axes, is_data=True, summed=loss.differs - axes
        )
        for w, axes in zip(weights, own, strict=True)
    ]


# --- loops, branches and calls


def _of_nested(
    equation: jaxprs.Equation, operands: list[_Value], run: _Run
) -> list[_Value] | None:
    """The results of an equation with nested programs; None of another."""
    inner = jaxprs.inner_programs(equation)
    match equation.primitive.name:
        case "scan":
            return _scan(equation, operands, run)
        case "while":
            return _while(equation, operands, run)
        case "cond":
            return _cond(equation, operands, run)
    if len(inner) == 1 and len(jaxprs.inputs(inner[0])) == len(operands):
        return run(inner[0], operands)
    return None


def _scan(equation: jaxprs.Equation, operands: list[_Value], run: _Run) -> list[_Value]:
    first, number = jaxprs.scan_sizes(equation)
    last = first + number

    def turn(carry: list[_Value]) -> list[_Value]:
        given = [*operands[:first], *carry, *operands[last:]]
        return run(primitives.body(equation), given)

    carry = _repeated(lambda carry: turn(carry)[:number], operands[first:last])
    return [*carry, *turn(carry)[number:]]


def _while(
    equation: jaxprs.Equation, operands: list[_Value], run: _Run
) -> list[_Value]:
    loop = primitives.while_loop(equation)
    first = loop.num_condition_constants
    last = first + loop.num_body_constants

    def turn(carry: list[_Value]) -> list[_Value]:
        return run(loop.body, [*operands[first:last], *carry])

    carry = _repeated(turn, operands[last:])
    (goes_on,) = run(loop.condition, [*operands[:first], *carry])
    return [_chosen(value, goes_on) for value in carry]


def _cond(equation: jaxprs.Equation, operands: list[_Value], run: _Run) -> list[_Value]:
    index, *rest = operands
    branches = [run(branch, rest) for branch in primitives.branches(equation)]
    return [_chosen(value, index) for value in map(_union, *branches)]


def _chosen(value: _Value, by: _Value) -> _Value:
    """A value that a condition decides on."""
    differs = value.differs | by.differs
    return replace(value, differs=differs, summed=value.summed - differs)


def _union(*values: _Value) -> _Value:
    return reduce(_Value.with_, values)


def _repeated(
    turn: Callable[[list[_Value]], list[_Value]], carry: list[_Value]
) -> list[_Value]:
    """What a loop carries, after any number of turns."""
    while True:
        after = [*map(_union, carry, turn(carry))]
        if after == carry:
            return carry
        carry = after


def _summed_already(axes: Axes, line: str) -> CollectiveError:
    named = sorted(axes)
    shown = repr(named[0]) if len(named) == 1 else repr(tuple(named))
    return CollectiveError(
        f"these gradients are summed over {', '.join(map(repr, named))} already",
        got="computed from a gradient by values that are the same on every device"
        + _at(line),
        fix="differentiate by each device's own values, and then reduce: "
        f"own = dist.per_device(weights, axis={shown})\n"
        "or leave this reduction out: it is the gradient of the sum of all devices' "
        "losses",
    )


def _repeated_numbers(drawn: str, line: str, axes: Sequence[str]) -> RandomNumbersError:
    got = f"random numbers of shape {drawn}\nused with values that differ{_at(line)}"
    if MICROBATCHES in axes:
        return RandomNumbersError(
            "every microbatch draws the same random numbers",
            got=got,
            fix="draw them for the whole batch, and pass them as an argument that has "
            "rows\nor pass a key for each row, and draw with jax.vmap",
        )
    named = ", ".join(map(repr, axes))
    return RandomNumbersError(
        f"every device along {named} draws the same random numbers",
        got=got,
        fix="draw them outside, and pass them as an argument with a layout: they are "
        "then the same on every mesh\n"
        "or give each device a key of its own: jax.random.fold_in(key, "
        f"jax.lax.axis_index({axes[0]!r}))",
    )


def _at(line: str) -> str:
    return f", at {line}" if line else ""
