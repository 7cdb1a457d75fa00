# SPDX-License-Identifier: Apache-2.0
"""Decomposes the loss of a batch into a sum of losses of microbatches.

A pipeline begins the backward of one microbatch before it has seen the next, so the
computation from its output to the loss has to be done for each microbatch by itself.
The step is traced twice: for the whole batch, and for one microbatch. Both programs
have the same equations; a dim that is smaller in the second is a batch dim. Row-wise
equations are run for each microbatch, up to the sums over rows; what follows the sums
has to be linear in them, so the loss is ``c + Σ_m Σ_j a_j · s_j(m)``, with coefficients
that are known before the first microbatch. A mean over the unmasked tokens of the whole
batch is one such loss.

What is computed from the inputs alone and mixes rows (the number of these tokens) is
taken from the program of the whole batch.
"""

from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Final, Literal, NoReturn

import jax.numpy as jnp

from tessera.errors import PipelineFormError
from tessera.foundations.primitive_properties import LINEAR
from tessera.graph.pipelining.batch_dims import (
    BatchDims,
    have_same_equations,
)
from tessera.graph.rewriting import variables
from tessera.jax_compat import jaxprs, primitives

# A value with a batch dim, one without, and one that is linear in sums over rows.
Kind = Literal["rows", "replicated", "sum"]

_SUMS: Final = frozenset(("reduce_sum", "dot_general"))


@dataclass
class LossDecomposition:
    """The computation from a pipeline's output to a loss.

    Attributes:
      copies: How many copies of a microbatch of one row the equations are for: JAX
        traces other equations for one row.
      outputs: The microbatch's variables of the pipeline's output.
      equations: Of the microbatch's program, from its output to the sums over rows,
        each with its operands; literals among these are the whole batch's.
      sums: The sums: (whole batch's variable, microbatch's variable).
      rows: What the equations read row by row: (whole, microbatch's, batch dim).
      replicated: What they read as it is: (whole, microbatch's).
      after: Of the whole batch's program: from the sums to the loss.
      dependents: What in the whole batch's program depends on the output.
    """

    copies: int
    outputs: list[Any]
    equations: list[tuple[jaxprs.Equation, list[jaxprs.Atom]]] = field(
        default_factory=list
    )
    sums: list[tuple[Any, Any]] = field(default_factory=list)
    rows: list[tuple[Any, Any, int]] = field(default_factory=list)
    replicated: list[tuple[Any, Any]] = field(default_factory=list)
    after: list[jaxprs.Equation] = field(default_factory=list)
    dependents: set[Any] = field(default_factory=set)


def decompose_loss(
    whole: jaxprs.Program,
    micro: jaxprs.Program,
    output: int,
    loss: int,
    microbatches: int | Fraction,
    copies: int = 1,
) -> LossDecomposition:
    """Find the sums over rows between two equations.

    Args:
      whole: The program of the whole batch, without calls of jitted functions.
      micro: The same of one microbatch.
      output: The index of the equation whose results are the pipeline's output.
      loss: The index of the equation whose first input is the loss.
      microbatches: Rows of the batch over rows of ``micro``; not 1.
      copies: Rows of ``micro`` over rows of a microbatch.

    Raises:
      PipelineFormError: [T312] the loss is not such a sum.
    """
    decomposed = _Decomposer(whole, micro, output, loss, microbatches).run()
    return replace(decomposed, copies=copies)


class _Decomposer:
    """Classifies each variable of the whole batch's program."""

    def __init__(
        self,
        whole: jaxprs.Program,
        micro: jaxprs.Program,
        output: int,
        loss: int,
        microbatches: int | Fraction,
    ) -> None:
        self.whole = jaxprs.equations(whole)[: loss + 1]
        self.micro = jaxprs.equations(micro)[: loss + 1]
        if not have_same_equations(self.whole, self.micro):
            raise PipelineFormError(
                "a step does other things for a microbatch than for the whole batch",
                got=f"{len(jaxprs.equations(whole))} equations for the batch, "
                f"{len(jaxprs.equations(micro))} for a microbatch",
                fix="do not branch on the batch size, and take no rows by their number",
            )
        self.output = output
        self.rows = BatchDims(microbatches)
        self.kind: dict[Any, Kind] = {}
        self.definition: dict[Any, int] = {}
        self.dependents = jaxprs.dependents(self.whole[:-1], self.whole[output].outvars)
        self.frontier: set[Any] = set()
        self.sources = jaxprs.sources(whole, self.whole[-1].invars[0], before=loss)
        self.rows.pair(jaxprs.inputs(whole), jaxprs.inputs(micro))
        for variable in jaxprs.inputs(whole):
            has_rows = self.rows.dim(variable) is not None
            self.kind[variable] = "rows" if has_rows else "replicated"

    def run(self) -> LossDecomposition:
        pairs = zip(self.whole[:-1], self.micro[:-1], strict=True)
        for index, (equation, twin) in enumerate(pairs):
            self.rows.pair(equation.outvars, twin.outvars)
            self.definition.update(dict.fromkeys(equation.outvars, index))
            is_dependent = not self.dependents.isdisjoint(equation.outvars)
            if not self.sources.isdisjoint(equation.outvars):
                kind = self._classify(index, equation, twin, is_dependent)
                self.kind.update(dict.fromkeys(equation.outvars, kind))
        loss = self.whole[-1].invars[0]
        if self.kind.get(loss) != "sum":
            self._refuse(
                self.whole[-1], "the loss is no sum over the rows of the batch"
            )
        return self._collect(loss)

    def _classify(
        self,
        index: int,
        equation: jaxprs.Equation,
        twin: jaxprs.Equation,
        is_dependent: bool,
    ) -> Kind:
        if index == self.output:
            return "rows"
        kinds = {self.kind[v] for v in variables(equation.invars)}
        if "sum" in kinds:
            self._check_linear(equation)
            return "sum"
        is_row_wise = self.rows.is_row_wise(equation, twin)
        is_same = primitives.have_same_parameters(equation, twin)
        if is_row_wise and is_same:
            reads_rows = "rows" in kinds or is_dependent
            if reads_rows or not self.rows.of(equation.invars):
                return "rows"
        if not is_dependent:
            return "replicated"
        if is_row_wise and not is_same:
            name = equation.primitive.name
            self._refuse(equation, f"{name} depends on the size of the batch")
        if not self._sums_rows(equation):
            self._refuse(equation, f"{equation.primitive.name} mixes rows of the batch")
        self.frontier.update(equation.outvars)
        return "sum"

    def _sums_rows(self, equation: jaxprs.Equation) -> bool:
        name, (result, *_) = equation.primitive.name, equation.outvars
        is_sum = name in _SUMS and _is_float(result)
        read = self.rows.of(equation.invars).values()
        reads_rows = bool(read) and -1 not in read
        return is_sum and reads_rows and self.rows.dim(result) is None

    def _check_linear(self, equation: jaxprs.Equation) -> None:
        """Raise [T312] unless a result is linear in the sums that it is made of."""
        name, operands = equation.primitive.name, equation.invars
        sums = [i for i, v in enumerate(operands) if self._is_sum(v)]
        others = set(variables(operands)).difference(operands[i] for i in sums)
        legal = name in LINEAR and self.dependents.isdisjoint(others)
        match name:
            case "mul" | "dot_general":
                legal &= len(sums) == 1
            case "div" | "gather" | "dynamic_slice":
                legal &= sums == [0]
            case "select_n":
                legal &= 0 not in sums
            case "convert_element_type":
                legal &= _is_float(equation.outvars[0])
        if not legal:
            self._refuse(
                equation, f"{name} of a sum over the batch is not linear in it"
            )

    def _is_sum(self, atom: jaxprs.Atom) -> bool:
        return not isinstance(atom, jaxprs.Literal) and self.kind[atom] == "sum"

    def _refuse(self, equation: jaxprs.Equation, why: str) -> NoReturn:
        line = jaxprs.source_line(equation)
        raise PipelineFormError(
            "the loss of a pipeline cannot be computed microbatch by microbatch",
            got=why + (f"\nat {line}" if line else ""),
            fix="reduce the loss by a sum or a mean over rows, or use "
            "schedule='gpipe', which has all of the output before the first backward",
        )

    def _collect(self, loss: Any) -> LossDecomposition:
        outputs = list(self.micro[self.output].outvars)
        decomposition = LossDecomposition(1, outputs, dependents=self.dependents)
        read, after = {loss}, list[jaxprs.Equation]()
        for equation in reversed(self.whole[:-1]):
            sums = read.intersection(equation.outvars)
            if not sums or self.kind[equation.outvars[0]] != "sum":
                continue
            if sums <= self.frontier:
                decomposition.sums += [(v, self.rows.twin[v]) for v in sums]
                continue
            after.append(equation)
            read.update(variables(equation.invars))
        decomposition.after = after[::-1]
        self._collect_rows(decomposition)
        return decomposition

    def _collect_rows(self, decomposition: LossDecomposition) -> None:
        """The microbatch's equations up to the sums, and what they read."""
        todo = [v for v, _ in decomposition.sums]
        seen, indices = set(todo), set[int]()
        while todo:
            variable = todo.pop()
            index, twin = self.definition.get(variable), self.rows.twin[variable]
            if index == self.output:
                continue
            if index is not None and self.kind[variable] != "replicated":
                indices.add(index)
                read = dict.fromkeys(variables(self.whole[index].invars))
                todo += [v for v in read if v not in seen]
                seen.update(read)
            elif (dim := self.rows.dim(variable)) is None:
                decomposition.replicated.append((variable, twin))
            else:
                assert dim >= 0, "one batch dim"
                decomposition.rows.append((variable, twin, dim))
        decomposition.equations = [
            (self.micro[index], self._operands(index)) for index in sorted(indices)
        ]

    def _operands(self, index: int) -> list[jaxprs.Atom]:
        """A microbatch's variables, and the literals of the whole batch."""
        whole, micro = self.whole[index].invars, self.micro[index].invars
        pairs = zip(whole, micro, strict=True)
        return [a if isinstance(a, jaxprs.Literal) else b for a, b in pairs]


def _is_float(variable: Any) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jnp.floating)
