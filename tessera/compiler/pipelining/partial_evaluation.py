# SPDX-License-Identifier: Apache-2.0
"""A program as two halves: some outputs first, the others later from what crosses.

Walking back from the first outputs finds the equations of the first half. The others
are the second half, as far as its outputs want them. A ``scan`` is in both: each half
has a scan of its own, over the part of the body and the carries that it wants. Other
equations with programs inside them (``cond``, ``while``, ``shard_map``, Pallas kernels)
are in one half as a whole.

What crosses is kept for a long time, so it is kept small:

- What depends on free inputs alone, which both halves have, is computed again.
- So is what an elementwise operation makes of smaller operands, or of such as cross.
- What the second half makes less of is made by the first: a sum for the gradient of a
  bias or a scale, the one product of two operands.

No product of matrices is computed twice, or earlier than it has to be.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import jax
from jax import lax

from tessera import _jax
from tessera.compiler.rewriting import Environment, contains
from tessera.primitive_properties import ARITHMETIC, BROADCASTS, EXPENSIVE, RESHAPES

Key: TypeAlias = Any  # a variable of a jaxpr, or a _Stack
Half: TypeAlias = Literal["first", "second"]

_BARRIER = "optimization_barrier"
_SHAPE_ONLY = RESHAPES | BROADCASTS | {"convert_element_type"}
_ELEMENTWISE = _SHAPE_ONLY | ARITHMETIC | {"dynamic_slice", "slice"}
_EARLY = _ELEMENTWISE | {"reduce_sum"}


@dataclass
class _Part:
    """One half's part of a program.

    Attributes:
      results: The results it has of each equation, by the equation's place.
      reads: Every variable that it reads or puts out.
    """

    results: dict[int, set[Key]] = field(default_factory=dict)
    reads: set[Key] = field(default_factory=set)


class Halves:
    """Which half, or both, each equation of a program is in.

    Attributes:
      program: A program without calls.
      parts: What each half computes and reads.
      crossing: What the first half computes and the second reads.
    """

    def __init__(self, program: _jax.Program, free: Iterable[_jax.Atom]) -> None:
        """Find the loops, and what depends on ``free`` inputs alone."""
        self.program = program
        self.parts: dict[Half, _Part] = {"first": _Part(), "second": _Part()}
        self.crossing: list[Key] = []
        self._equations = _jax.equations(program)
        self._loops: dict[int, _Loop] = {}
        self._early: set[int] = set()
        self._free: set[Key] = {*free, *_jax.constant_inputs(program)}
        for place, equation in enumerate(self._equations):
            if equation.primitive.name == "scan":
                self._loops[place] = _Loop(equation, self.is_free)
            self._free |= self._known(place, self._free)

    def is_free(self, atom: _jax.Atom) -> bool:
        """Whether both halves can compute a value from the free inputs."""
        return _is_among(atom, self._free)

    def plan(self, is_first: Sequence[bool]) -> None:
        """Let the first half compute those outputs, and the second one the others."""
        is_second = [not first for first in is_first]
        self.plan_first(is_first)
        self.plan_second(is_second)
        self.plan_early(set(_jax.inputs(self.program)))
        self.plan_first(is_first)
        self.plan_second(is_second)

    def plan_first(self, outputs: Sequence[bool]) -> None:
        """Let the first half compute those outputs, and what it does early."""
        part = self.parts["first"] = _Part(reads=_chosen(self.program, outputs))
        for place, equation in reversed(list(enumerate(self._equations))):
            used = part.reads.intersection(equation.outvars)
            if not used and not equation.effects and not self.has_early(place):
                continue
            if place in self._loops:
                part.results[place] = used
                part.reads |= self._loops[place].plan_first(used)
            else:
                is_barrier = equation.primitive.name == _BARRIER
                part.results[place] = used if is_barrier else set(equation.outvars)
                part.reads |= _variables(_reads(equation, used))

    def plan_early(self, inputs: set[Key]) -> set[Key]:
        """Choose what the first half had better do of the second's equations.

        Returns:
          The variables that the first half has, or could have early.
        """
        known = {*inputs, *self._free}
        smaller = self._made_smaller()
        for place, equation in enumerate(self._equations):
            if place in self._loops:
                known |= self._loops[place].plan_early(known)
            elif place in self.parts["first"].results:
                known |= self.parts["first"].results[place]
            elif equation.primitive.name in _EARLY:
                results = self._known(place, known)
                known |= results
                if results and place in smaller:
                    self._early.add(place)
        return known

    def _made_smaller(self) -> set[int]:
        """The second half's sums, and what makes less of what crosses for it alone."""
        part = self.parts["second"]
        made = set[Key]().union(*part.results.values())
        atoms = [atom for i in part.results for atom in self._equations[i].invars]
        readers = Counter(filter(_is_variable, atoms + _jax.outputs(self.program)))
        smaller = set[int]()
        for place, results in part.results.items():
            equation = self._equations[place]
            operands = _variables(equation.invars) - made - self._free
            if equation.primitive.name == "reduce_sum":
                operands = _variables(equation.invars) - self._free
            elif equation.primitive.name in _ELEMENTWISE:
                operands = {v for v in operands if readers[v] == 1}
            else:
                continue
            if sum(map(_nbytes, results)) < sum(map(_nbytes, operands)):
                smaller.add(place)
        return smaller

    def has_early(self, place: int | None = None) -> bool:
        """Whether an equation, or any, is done early, or one in its body."""
        if place is None:
            return any(map(self.has_early, range(len(self._equations))))
        inside = place in self._loops and self._loops[place].halves.has_early()
        return inside or place in self._early

    def plan_second(self, outputs: Sequence[bool]) -> None:
        """Let the second half compute those outputs, of what the first has computed."""
        self._plan_second(outputs, frozenset())
        if again := self._cheaper_again():
            self._plan_second(outputs, again)

    def _plan_second(self, outputs: Sequence[bool], again: frozenset[int]) -> None:
        part = self.parts["second"] = _Part(reads=_chosen(self.program, outputs))
        self.crossing = []
        for place, equation in reversed(list(enumerate(self._equations))):
            wanted = part.reads.intersection(equation.outvars)
            if place in self._loops:  # unwanted ones too: an earlier plan wanted some
                crossing, reads = self._loops[place].plan_second(wanted)
            elif not wanted:
                continue
            else:
                done = self.parts["first"].results.get(place, set()) & wanted
                crossing = [v for v in equation.outvars if v in done - self._free]
                crossing = [] if place in again else crossing
                reads = _variables(_reads(equation, wanted.difference(crossing)))
            own = wanted.difference(crossing)
            if own:
                part.results[place] = own
                part.reads |= reads
            self.crossing += crossing

    def _cheaper_again(self) -> frozenset[int]:
        """The equations that are cheaper computed again than their results kept."""
        there, again = self._free | self.parts["second"].reads, set[int]()
        crossing = set(self.crossing)
        for place, equation in enumerate(self._equations):
            name = equation.primitive.name
            if name not in _ELEMENTWISE or equation.outvars[0] not in crossing:
                continue
            more = _variables(equation.invars) - there
            extra, saved = sum(map(_nbytes, more)), _nbytes(equation.outvars[0])
            if extra < saved or (extra == saved and name in _SHAPE_ONLY):
                again.add(place)
                there |= more
        return frozenset(again)

    def _known(self, place: int, known: set[Key]) -> set[Key]:
        """The results of an equation that are quick to compute from known values."""
        equation = self._equations[place]
        if place in self._loops:
            return self._loops[place].free_results()
        if equation.effects or _is_dear(equation):
            return set()
        return {
            v
            for v in equation.outvars
            if all(_is_among(atom, known) for atom in _reads(equation, [v]))
        }

    def environment(self, values: dict[Key, Any]) -> Environment:
        """An environment with those inputs that a half reads."""
        inputs = _jax.inputs(self.program)
        env = Environment(self.program, [values.get(v) for v in inputs])
        env.write(values.keys(), values.values())
        return env

    def run(self, env: Environment, half: Half) -> None:
        """Compute what a half computes."""
        results = self.parts[half].results
        for place in sorted(results):
            if place in self._loops:
                self._loops[place].run(env, half)
            else:
                _run(self._equations[place], results[place], env)


@dataclass(frozen=True, eq=False)
class _Stack:
    """One variable of a loop's body in every iteration, as one array."""

    of: Key
    aval: jax.ShapeDtypeStruct


@dataclass(frozen=True)
class _Carry:
    """One carry of a loop, outside of it and in its body."""

    initial: _jax.Atom
    before: _jax.Atom
    after: _jax.Atom
    final: _jax.Atom


class _Loop:
    """A ``scan`` as two: each half has the part of the body and the carries it wants.

    What crosses in the body becomes a further stacked result of the first scan.
    """

    def __init__(
        self, equation: _jax.Equation, is_free: Callable[[_jax.Atom], bool]
    ) -> None:
        self.equation = equation
        body = equation.params["jaxpr"]
        inputs, outputs = _jax.inputs(body), _jax.outputs(body)
        outer, results = equation.invars, equation.outvars
        consts, carries = _jax.scan_sizes(equation)
        xs = consts + carries
        columns = outer[consts:xs], inputs[consts:xs], outputs[:carries]
        self.carries = list(map(_Carry, *columns, results[:carries]))
        self.consts = dict(zip(inputs[:consts], outer[:consts], strict=True))
        self.xs = dict(zip(inputs[xs:], outer[xs:], strict=True))
        self.ys = list(zip(outputs[carries:], results[carries:], strict=True))
        self.given = {**self.consts, **self.xs}
        self.halves = Halves(body, [v for v, x in self.given.items() if is_free(x)])
        # Of each half: the places of its carries, and the results that it computes.
        self.carried: dict[Half, set[int]] = {"first": set(), "second": set()}
        self.results: dict[Half, set[Key]] = {"first": set(), "second": set()}
        self.stacks: list[_Stack] = []

    def free_results(self) -> set[Key]:
        """The results that depend, in each iteration, on free inputs alone."""
        return {y for atom, y in self.ys if self.halves.is_free(atom)}

    def plan_early(self, known: set[Key]) -> set[Key]:
        """Choose what is done early in the body; return the results known then."""
        carries = [self.carries[i] for i in self.carried["first"]]
        inputs = {v for v, x in self.given.items() if _is_among(x, known)}
        inside = self.halves.plan_early(inputs | {c.before for c in carries})
        results = {y for atom, y in self.ys if _is_among(atom, inside)}
        return results | {c.final for c in carries}

    def plan_first(self, used: set[Key]) -> set[Key]:
        """Let the first half compute those results, of the variables returned."""
        return self._plan("first", used, self.halves.plan_first)

    def plan_second(self, wanted: set[Key]) -> tuple[list[Key], set[Key]]:
        """Let the second half compute those results.

        Returns:
          What crosses: carries of the first half, and stacks. And what the rest reads.
        """
        done = [self.carries[i] for i in sorted(self.carried["first"])]
        crossing = [c.final for c in done if c.final in wanted]
        own = wanted.difference(crossing)
        reads = self._plan("second", own, self.halves.plan_second)
        inside = self.halves.parts["second"].reads
        keys = [*self.halves.crossing, *(c.before for c in done if c.before in inside)]
        self.stacks = [_Stack(key, self._stacked(key.aval)) for key in keys]
        return crossing + self.stacks, reads

    def _plan(
        self, half: Half, results: set[Key], plan: Callable[[Sequence[bool]], None]
    ) -> set[Key]:
        """Plan the body until it reads no carry that is not among its half's."""
        done = set() if half == "first" else self.carried["first"]
        carried = {i for i, c in enumerate(self.carries) if c.final in results}
        while True:
            chosen = [i in carried for i in range(len(self.carries))]
            plan(chosen + [y in results for _, y in self.ys])
            reads = self.halves.parts[half].reads
            more = {i for i, c in enumerate(self.carries) if c.before in reads} - done
            if more <= carried:
                break
            carried |= more
        self.carried[half], self.results[half] = carried, results
        initial = [self.carries[i].initial for i in carried]
        return _variables([*initial, *(x for v, x in self.given.items() if v in reads)])

    def run(self, env: Environment, half: Half) -> None:
        """Scan over a half's part of the body."""
        reads = self.halves.parts[half].reads
        slices = {v: env.read(x) for v, x in self.xs.items() if v in reads}
        same = {v: env.read(x) for v, x in self.consts.items() if v in reads}
        ys = [pair for pair in self.ys if pair[1] in self.results[half]]
        if half == "first":
            ys += [(stack.of, stack) for stack in self.stacks]
        else:
            slices |= {stack.of: env.read(stack) for stack in self.stacks}
        # What is a stack of slices already needs no loop.
        there = [(atom, y) for atom, y in ys if atom in slices]
        env.write([y for _, y in there], [slices[atom] for atom, _ in there])
        ys = [pair for pair in ys if pair not in there]
        carries = [self.carries[i] for i in sorted(self.carried[half])]
        if not ys and not carries and not self.equation.effects:
            return

        def body(carry: list[Any], now: list[Any]) -> tuple[list[Any], list[Any]]:
            before = {c.before: value for c, value in zip(carries, carry, strict=True)}
            values = same | before | dict(zip(slices, now, strict=True))
            inner = self.halves.environment(values)
            self.halves.run(inner, half)
            after = [inner.read(c.after) for c in carries]
            return after, [inner.read(atom) for atom, _ in ys]

        final, stacked = self._scan(
            body, [env.read(c.initial) for c in carries], slices
        )
        env.write([c.final for c in carries], final)
        env.write([y for _, y in ys], stacked)

    def _scan(self, body: Any, initial: list[Any], slices: dict[Key, Any]) -> Any:
        params, xs = self.equation.params, list(slices.values())
        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        with _jax.source_context(self.equation):
            return lax.scan(body, initial, xs, **options)

    def _stacked(self, aval: Any) -> jax.ShapeDtypeStruct:
        shape = (self.equation.params["length"], *aval.shape)
        return jax.ShapeDtypeStruct(shape, aval.dtype)


# --- equations and variables


def _run(equation: _jax.Equation, results: set[Key], env: Environment) -> None:
    if equation.primitive.name != _BARRIER:
        env.run([equation])
        return
    values = [env.read(atom) for atom in _reads(equation, results)]
    with _jax.source_context(equation):
        passed = lax.optimization_barrier(values)
    env.write([v for v in equation.outvars if v in results], passed)


def _reads(equation: _jax.Equation, results: Iterable[Key]) -> list[_jax.Atom]:
    """The operands that results of an equation come from, literals included."""
    if equation.primitive.name != _BARRIER:
        return list(equation.invars)
    results = set(results)
    pairs = zip(equation.invars, equation.outvars, strict=True)
    return [operand for operand, result in pairs if result in results]


def _is_dear(equation: _jax.Equation, scopes: str = "") -> bool:
    """Whether an equation is a product or a kernel, or has one inside."""
    inner = _jax.inner_programs(equation)
    return equation.primitive.name in EXPENSIVE or any(
        contains(p, _is_dear) for p in inner
    )


def _chosen(program: _jax.Program, outputs: Sequence[bool]) -> set[Key]:
    pairs = zip(_jax.outputs(program), outputs, strict=True)
    return _variables(atom for atom, is_chosen in pairs if is_chosen)


def _variables(atoms: Iterable[_jax.Atom]) -> set[Key]:
    return set(filter(_is_variable, atoms))


def _is_variable(atom: _jax.Atom) -> bool:
    return not isinstance(atom, _jax.Literal)


def _is_among(atom: _jax.Atom, known: Iterable[Key]) -> bool:
    """Whether a value is a literal or one of those known."""
    return isinstance(atom, _jax.Literal) or atom in known


def _nbytes(variable: _jax.Atom) -> int:
    aval = variable.aval
    return math.prod(aval.shape) * aval.dtype.itemsize
