# SPDX-License-Identifier: Apache-2.0
"""A loss over a batch as a sum of losses over microbatches.

A pipeline begins the backward of one microbatch before it has seen the next, so the
computation from its output to the loss has to be done for each microbatch by itself.
The step is traced twice: for the whole batch, and for one microbatch. Both programs
have the same equations; a dim that is smaller in the second counts rows. Equations that
treat each row by itself are run for each microbatch, up to the sums over rows; what
follows the sums has to be linear in them, so the loss is ``c + Σ_m Σ_j a_j · s_j(m)``,
with coefficients that are known before the first microbatch. A mean over the tokens
that count, which are as many as the whole batch has, is one of these.

What is computed from the batch alone and mixes its rows (that number of tokens) is
taken from the program of the whole batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NoReturn

import numpy as np

from tessera import _jax
from tessera.errors import PipelineFormError

Kind = Literal["rows", "whole", "sum"]

_ALONG: Final = {
    "cumsum": "axis",
    "cumprod": "axis",
    "cummax": "axis",
    "cummin": "axis",
    "cumlogsumexp": "axis",
    "sort": "dimension",
    "concatenate": "dimension",
}
# fmt: off
_LINEAR: Final = frozenset((
    "add", "add_any", "broadcast_in_dim", "convert_element_type", "copy", "div",
    "dot_general", "expand_dims", "integer_pow", "mul", "neg", "reduce_sum", "reshape",
    "select_n", "squeeze", "sub", "transpose",
))
_MIXING: Final = ("scatter", "conv_general_dilated", "reduce_window", "fft", "top_k")
# fmt: on
_SUMS: Final = frozenset(("reduce_sum", "dot_general"))


@dataclass
class Separated:
    """The way from a pipeline's output to a loss.

    Attributes:
      microbatches: How many.
      outputs: The microbatch's variables of the pipeline's output.
      equations: Of the microbatch's program: from its output to the sums over rows.
      sums: The sums: (whole batch's variable, microbatch's variable).
      rows: What the equations read row by row: (whole, microbatch's, dim of rows).
      wholes: What they read as it is: (whole, microbatch's).
      after: Of the whole batch's program: from the sums to the loss.
      tainted: Everything in the whole batch's program that the output leads to.
    """

    microbatches: int
    outputs: list[Any]
    equations: list[_jax.Equation] = field(default_factory=list)
    sums: list[tuple[Any, Any]] = field(default_factory=list)
    rows: list[tuple[Any, Any, int]] = field(default_factory=list)
    wholes: list[tuple[Any, Any]] = field(default_factory=list)
    after: list[_jax.Equation] = field(default_factory=list)
    tainted: set[Any] = field(default_factory=set)


def separate(
    whole: _jax.Program, micro: _jax.Program, output: int, loss: int, microbatches: int
) -> Separated:
    """Find the sums over rows between two equations.

    Args:
      whole: The program of the whole batch, without calls of jitted functions.
      micro: The same of one microbatch.
      output: The place of the equation whose results are the pipeline's output.
      loss: The place of the equation whose first input is the loss.
      microbatches: How many make the batch; at least 2.

    Raises:
      PipelineFormError: [T312] the loss is not such a sum.
    """
    return _Separation(whole, micro, output, loss, microbatches).run()


class _Separation:
    """What is known of each variable of the whole batch's program."""

    def __init__(
        self,
        whole: _jax.Program,
        micro: _jax.Program,
        output: int,
        loss: int,
        microbatches: int,
    ) -> None:
        self.whole = _jax.equations(whole)[: loss + 1]
        self.micro = _jax.equations(micro)[: loss + 1]
        self.output, self.count = output, microbatches
        self.twin: dict[Any, Any] = {}
        self.kind: dict[Any, Kind] = {}
        self.maker: dict[Any, int] = {}
        self.tainted: set[Any] = set()
        self.frontier: set[Any] = set()
        self._pair(_jax.inputs(whole), _jax.inputs(micro))
        for variable in _jax.inputs(whole):
            rows = self.dim(variable) is not None
            self.kind[variable] = "rows" if rows else "whole"

    def run(self) -> Separated:
        if [e.primitive for e in self.whole] != [e.primitive for e in self.micro]:
            raise PipelineFormError(
                "a step does other things for a microbatch than for the whole batch",
                got=f"{len(self.whole)} and {len(self.micro)} equations to the loss",
                fix="do not branch on the batch size in the step",
            )
        pairs = zip(self.whole[:-1], self.micro[:-1], strict=True)
        for place, (equation, twin) in enumerate(pairs):
            self._pair(equation.outvars, twin.outvars)
            self.maker.update(dict.fromkeys(equation.outvars, place))
            kind = self._classified(place, equation, twin)
            self.kind.update(dict.fromkeys(equation.outvars, kind))
        loss = self.whole[-1].invars[0]
        if self.kind.get(loss) != "sum":
            self._refuse(
                self.whole[-1], "the loss is no sum over the rows of the batch"
            )
        return self._collected(loss)

    def dim(self, variable: Any) -> int | None:
        """The dim of a variable that counts rows; -1 where several do."""
        long, short = variable.aval.shape, self.twin[variable].aval.shape
        if len(long) != len(short):
            return -1
        differ = [
            d
            for d, sizes in enumerate(zip(long, short, strict=True))
            if sizes[0] != sizes[1]
        ]
        if not differ:
            return None
        first = differ[0]
        exact = len(differ) == 1 and long[first] == self.count * short[first]
        return first if exact else -1

    def _pair(self, whole: Sequence[Any], micro: Sequence[Any]) -> None:
        self.twin.update(zip(whole, micro, strict=True))

    def _classified(
        self, place: int, equation: _jax.Equation, twin: _jax.Equation
    ) -> Kind:
        if place == self.output:
            self.tainted.update(equation.outvars)
            return "rows"
        inputs = _variables(equation.invars)
        kinds = {self.kind[v] for v in inputs}
        tainted = not self.tainted.isdisjoint(inputs)
        if tainted:
            self.tainted.update(equation.outvars)
        if "sum" in kinds:
            self._check_linear(equation)
            return "sum"
        if self._is_by_row(equation, twin, "rows" in kinds):
            return "rows"
        if not tainted:
            return "whole"
        if not self._sums_rows(equation):
            self._refuse(equation, f"{equation.primitive.name} mixes rows of the batch")
        self.frontier.update(equation.outvars)
        return "sum"

    def _is_by_row(
        self, equation: _jax.Equation, twin: _jax.Equation, reads_rows: bool
    ) -> bool:
        """Whether a microbatch's results are the rows of the whole batch's."""
        dims = [self.dim(v) for v in equation.outvars]
        if any(dim is None or dim < 0 for dim in dims):
            return False
        dim = dims[0]
        assert dim is not None
        if not reads_rows:
            return _is_alike_in_rows(equation, dim)
        if not _same_literals(equation, twin):
            return False
        given = [(v, self.dim(v)) for v in _variables(equation.invars)]
        rows = {v: d for v, d in given if d is not None}
        return -1 not in rows.values() and self._keeps_apart(equation, rows, dim)

    def _keeps_apart(
        self, equation: _jax.Equation, rows: dict[Any, int], dim: int
    ) -> bool:
        """Whether rows stay apart, given their dims in the inputs and the results."""
        name, params = equation.primitive.name, equation.params
        if name in _ALONG:
            return params[_ALONG[name]] != dim
        if name == "rev":
            return dim not in params["dimensions"]
        if name == "reshape":
            result = equation.outvars[0]
            return all(_keeps_rows(v, d, result, dim) for v, d in rows.items())
        if name == "gather":
            return _gathers_by_row(equation, rows.get(equation.invars[0]))
        if name.startswith(_MIXING):
            return False
        if name == "scan":
            first = params["num_consts"] + params["num_carry"]
            scanned = _variables(equation.invars[first:])
            return not self._mixes_inside(equation) and all(
                rows.get(v) != 0 for v in scanned
            )
        if _jax.inner_programs(equation):
            return not self._mixes_inside(equation)
        sizes = {v.aval.shape[d] for v, d in rows.items()}
        return sizes <= {v.aval.shape[dim] for v in equation.outvars}

    def _mixes_inside(self, equation: _jax.Equation) -> bool:
        """Whether a nested program does anything that may mix rows."""
        mixing = {*_ALONG, *_SUMS, "rev", "reshape", "gather", "scatter", "transpose"}
        names = {
            inner.primitive.name
            for program in _jax.inner_programs(equation)
            for inner in _jax.equations(program)
        }
        return not mixing.isdisjoint(names)

    def _sums_rows(self, equation: _jax.Equation) -> bool:
        return equation.primitive.name in _SUMS and all(
            self.dim(v) is None for v in equation.outvars
        )

    def _check_linear(self, equation: _jax.Equation) -> None:
        name = equation.primitive.name
        sums = [
            place
            for place, v in enumerate(equation.invars)
            if not isinstance(v, _jax.Literal) and self.kind[v] == "sum"
        ]
        legal = name in _LINEAR
        if name in ("mul", "dot_general"):
            legal = len(sums) == 1
        if name == "div":
            legal = sums == [0]
        if name == "select_n":
            legal = 0 not in sums
        if name == "integer_pow":
            legal = equation.params["y"] == 1
        if not legal:
            self._refuse(
                equation, f"{name} of a sum over the batch is not linear in it"
            )

    def _refuse(self, equation: _jax.Equation, why: str) -> NoReturn:
        line = _jax.source_line(equation)
        raise PipelineFormError(
            "the loss of a pipeline cannot be computed microbatch by microbatch",
            got=why + (f"\nat {line}" if line else ""),
            fix="reduce the loss by a sum or a mean over rows, or use "
            "schedule='gpipe', which has all of the output before the first backward",
        )

    def _collected(self, loss: Any) -> Separated:
        found = Separated(self.count, list(self.micro[self.output].outvars))
        wanted, after = {loss}, list[_jax.Equation]()
        for equation in reversed(self.whole[:-1]):
            made = wanted.intersection(equation.outvars)
            if not made or self.kind[equation.outvars[0]] != "sum":
                continue
            if made <= self.frontier:
                found.sums += [(v, self.twin[v]) for v in equation.outvars if v in made]
                continue
            after.append(equation)
            wanted.update(_variables(equation.invars))
        found.after, found.tainted = after[::-1], self.tainted
        self._collect_rows(found)
        return found

    def _collect_rows(self, found: Separated) -> None:
        """The microbatch's equations up to the sums, and what they read."""
        wanted = {v for v, _ in found.sums}
        places: set[int] = set()
        todo, seen = list(wanted), set(wanted)
        while todo:
            variable = todo.pop()
            place = self.maker.get(variable)
            is_made = self.kind[variable] == "rows" or variable in wanted
            if place == self.output:
                continue
            if place is not None and is_made:
                places.add(place)
                more = set(_variables(self.whole[place].invars)) - seen
                todo += more
                seen |= more
                continue
            dim, twin = self.dim(variable), self.twin[variable]
            if dim is None:
                found.wholes.append((variable, twin))
            else:
                assert dim >= 0, "rows are counted by one dim"
                found.rows.append((variable, twin, dim))
        found.equations = [self.micro[place] for place in sorted(places)]


def _is_alike_in_rows(equation: _jax.Equation, dim: int) -> bool:
    """Whether something that reads no rows is the same in all of them."""
    name, params = equation.primitive.name, equation.params
    if name == "iota":
        return params["dimension"] != dim
    return name == "broadcast_in_dim" and dim not in params["broadcast_dimensions"]


def _same_literals(equation: _jax.Equation, twin: _jax.Equation) -> bool:
    pairs = zip(equation.invars, twin.invars, strict=True)
    return all(
        np.array_equal(a.val, b.val)
        for a, b in pairs
        if isinstance(a, _jax.Literal) and isinstance(b, _jax.Literal)
    )


def _keeps_rows(before: Any, dim: int, after: Any, to: int) -> bool:
    """Whether a reshape keeps rows in order, alone or as the outer part of a dim."""
    return math.prod(before.aval.shape[:dim]) == math.prod(after.aval.shape[:to])


def _gathers_by_row(equation: _jax.Equation, dim: int | None) -> bool:
    """Whether each row's results are gathered from that row, or from no row."""
    if dim is None:
        return True
    numbers = equation.params["dimension_numbers"]
    return dim in numbers.operand_batching_dims


def _variables(atoms: Sequence[_jax.Atom]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, _jax.Literal)]
