# SPDX-License-Identifier: Apache-2.0
"""Replaces ``gradient`` equations by the backward computation that they stand for.

The equations between the weights and the loss become one function, run once under
``jax.vjp``; its intermediate values serve the rest of the program too. The work of the
pass ``differentiate_losses``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from tessera.errors import UndifferentiableError
from tessera.graph import rewriting
from tessera.graph.cached_linearization import CachedLinearization
from tessera.graph.gradient_primitive import (
    differentiating,
    gradient_p,
    refuse_closure,
    unconnected_error,
)
from tessera.jax_compat import jaxprs, primitives, traces

# How JAX's error about while loops begins.
_NO_BACKWARD = "Reverse-mode differentiation does not work"


def differentiated(
    program: jaxprs.Program, *, is_inner: bool = False
) -> jaxprs.Program:
    """A program with backward passes in place of its ``gradient`` equations.

    Args:
      program: The program, left as it is.
      is_inner: Whether it is the body of a loop, a branch or the like.

    Raises:
      UnconnectedGradientError: [T303] a loss does not depend on one of its weights.
      UndifferentiableError: [T317] a loop of unknown length leads to a loss, or a rule
        gives a gradient of another shape.
    """
    # One at a time, for a later loss may use a gradient.
    with differentiating():
        if not is_inner and rewriting.contains(program, _is_gradient):
            program = _with_own_references(program)
            program = rewriting.rewrite(
                program, lambda e: primitives.num_closed_over(e) > 0, _fix_closures
            )
        while rewriting.contains(program, _is_gradient):
            program = _without_next_gradient(program, is_inner)
            if _holds_ended_traces(program):
                refuse_closure()
    return program


def _with_own_references(program: jaxprs.Program) -> jaxprs.Program:
    """A program that works on copies of the mutable arrays that it takes.

    JAX takes no gradient through those that are made outside of it.
    """
    avals = [variable.aval for variable in jaxprs.inputs(program)]
    references = [i for i, aval in enumerate(avals) if traces.is_reference(aval)]

    def run(*values: Any) -> list[Any]:
        own = list(values)
        for i in references:
            own[i] = jax.new_ref(values[i][...], kind=avals[i].kind)
        results = jaxprs.evaluate(program, *own)
        for i in references:
            values[i][...] = own[i][...]
        return results

    return jaxprs.retrace(run, program) if references else program


def _fix_closures(equation: jaxprs.Equation, operands: Sequence[Any]) -> Sequence[Any]:
    """Refuse gradients by what the function closes over: JAX would give zeros."""
    count = primitives.num_closed_over(equation)
    return jaxprs.bind(equation, [*map(_fixed, operands[:count]), *operands[count:]])


def _holds_ended_traces(program: jaxprs.Program) -> bool:
    """Whether a rule put values of an ended trace, which it closes over, into it."""
    return any(map(traces.is_of_ended_trace, jaxprs.constants(program))) or any(
        _holds_ended_traces(inner)
        for equation in jaxprs.equations(program)
        for _, inner in jaxprs.nested(equation)
    )


def _is_gradient(equation: jaxprs.Equation) -> bool:
    return equation.primitive is gradient_p


def _has_gradient_inside(equation: jaxprs.Equation) -> bool:
    return rewriting.contains_inside(equation, _is_gradient)


def _without_next_gradient(program: jaxprs.Program, is_inner: bool) -> jaxprs.Program:
    equations = jaxprs.equations(program)
    if any(map(_has_gradient_inside, equations)):
        return rewriting.retrace(program, _differentiate_inside)
    index = next(i for i, equation in enumerate(equations) if _is_gradient(equation))
    gradient = equations[index]
    ancestors = jaxprs.sources(program, gradient.invars[0], before=index)
    if not gradient.params["allow_unused"]:
        _require_connected(gradient, ancestors, is_inner)
    plan = _plan(program, index, ancestors)

    def run(*values: Any) -> list[Any]:
        env = rewriting.Environment(program, values)
        env.record(plan.before, program, news=[])
        _differentiate(env, plan)
        env.record(plan.after, program, news=[*plan.shared, *plan.gradient.outvars])
        return env.outputs(program)

    return jaxprs.retrace(run, program)


def _differentiate_inside(
    equation: jaxprs.Equation, operands: Sequence[Any]
) -> Sequence[Any]:
    """The results of an equation, with its nested programs differentiated."""
    if not _has_gradient_inside(equation):
        return jaxprs.bind(equation, operands)
    return rewriting.bind_with_nested(
        equation,
        operands,
        lambda p, v: jaxprs.evaluate(differentiated(p, is_inner=True), *v),
    )


@dataclass(frozen=True)
class _Plan:
    """The equations of a program sorted around one ``gradient`` equation.

    Attributes:
      gradient: The equation.
      outer_weights: Weights that the loss depends on and that are computed before the
        region.
      inner_weights: Weights that the region itself computes from other weights.
      before: Equations that do not depend on the weights.
      region: Equations that lead from the weights to the loss.
      shared: Results of the region that other equations, or the outputs, use.
      after: All the others.
    """

    gradient: jaxprs.Equation
    outer_weights: list[jaxprs.Atom]
    inner_weights: list[jaxprs.Atom]
    before: list[jaxprs.Equation]
    region: list[jaxprs.Equation]
    shared: list[jaxprs.Atom]
    after: list[jaxprs.Equation]


def _plan(program: jaxprs.Program, index: int, ancestors: set[jaxprs.Atom]) -> _Plan:
    equations = jaxprs.equations(program)
    gradient = equations[index]
    weights = [v for v in rewriting.variables(gradient.invars[1:]) if v in ancestors]
    moved: set[jaxprs.Atom] = set()
    while True:
        before, region, after = _sorted(equations[:index], weights, ancestors, moved)
        references = {v for equation in region for v in jaxprs.references(equation)}
        # A call may take more than what its results of the loss are made of.
        operands = {v for each in region for v in rewriting.variables(each.invars)}
        if references <= moved and operands <= ancestors:
            break
        moved |= references  # what the region mutates, it has to create as well
        ancestors = ancestors | operands
    after += equations[index + 1 :]
    made = dict.fromkeys(v for equation in region for v in equation.outvars)
    used = {v for equation in after for v in rewriting.variables(equation.invars)}
    used.update(rewriting.variables(jaxprs.outputs(program)))
    return _Plan(
        gradient=gradient,
        outer_weights=[weight for weight in weights if weight not in made],
        inner_weights=[weight for weight in weights if weight in made],
        before=before,
        region=region,
        shared=[v for v in made if v in used],
        after=after,
    )


def _sorted(
    equations: Sequence[jaxprs.Equation],
    weights: Sequence[jaxprs.Atom],
    ancestors: set[jaxprs.Atom],
    moved: set[jaxprs.Atom],
) -> tuple[list[jaxprs.Equation], ...]:
    """Equations before, in and after the region, with all that read ``moved`` in it."""
    before, region, after = list[Any](), list[Any](), list[Any]()
    dependent = {*weights, *moved}
    for equation in equations:
        if dependent.isdisjoint(
            (*rewriting.variables(equation.invars), *equation.outvars)
        ):
            before.append(equation)
            continue
        dependent.update(equation.outvars, jaxprs.references(equation))
        leads_to_loss = not ancestors.isdisjoint(
            (*equation.outvars, *jaxprs.references(equation))
        )
        (region if leads_to_loss else after).append(equation)
    return before, region, after


def _differentiate(env: rewriting.Environment, plan: _Plan) -> None:
    """Run the region once, forward and backward, and write its results."""
    loss_atom, *weight_atoms = plan.gradient.invars
    equations = CachedLinearization()

    def forward(values: list[Any], offsets: list[Any]) -> tuple[Any, list[Any]]:
        local = env.copy()
        local.write(plan.outer_weights, values)
        taps = dict(zip(plan.inner_weights, offsets, strict=True))
        for equation in plan.region:
            values = [local.read(atom) for atom in equation.invars]
            local.write(equation.outvars, equations.bind(equation, values))
            for weight in taps.keys() & set(equation.outvars):
                local.write([weight], [_tap(local.read(weight), taps[weight])])
        return local.read(loss_atom), [local.read(v) for v in plan.shared]

    try:
        loss, pull_back, shared = jax.vjp(
            forward,
            [env.read(weight) for weight in plan.outer_weights],
            [jaxprs.zeros(weight.aval) for weight in plan.inner_weights],
            has_aux=True,
        )
        with jaxprs.line_context(plan.gradient):
            by_outer, by_inner = pull_back(_cotangent_of(loss))
    except traces.NoGradientByClosure:
        refuse_closure()
    except ValueError as error:
        if _NO_BACKWARD not in str(error):
            raise
        raise _undifferentiable(plan) from error
    for weight, gradient in zip(plan.outer_weights, by_outer, strict=True):
        if gradient.shape != weight.aval.shape:
            raise _of_another_shape(plan, weight, gradient)
    gradients = dict(zip(plan.outer_weights, by_outer, strict=True))
    gradients |= zip(plan.inner_weights, by_inner, strict=True)
    env.write(plan.shared, shared)
    env.write(
        plan.gradient.outvars,
        [
            _strong(gradients[atom])
            if not isinstance(atom, jaxprs.Literal) and atom in gradients
            else jaxprs.zeros(atom.aval)
            for atom in weight_atoms
        ],
    )


def _cotangent_of(loss: jax.Array) -> jax.Array:
    """One, of the type that JAX asks for to differentiate a number by.

    Over Explicit axes an unreduced number has a reduced cotangent, and the reverse.
    """
    layout = jax.typeof(loss).sharding
    unreduced, reduced = layout.spec.unreduced, layout.spec.reduced
    if not (unreduced or reduced):
        return jnp.ones_like(loss)
    spec = PartitionSpec(unreduced=reduced, reduced=unreduced)
    return jnp.ones((), loss.dtype, out_sharding=NamedSharding(layout.mesh, spec))


def _of_another_shape(
    plan: _Plan, weight: jaxprs.Atom, gradient: jax.Array
) -> UndifferentiableError:
    """The error for what JAX lets through under ``jax_disable_bwd_checks``."""
    line = jaxprs.source_line(plan.gradient)
    return UndifferentiableError(
        "a derivative rule gives a gradient of another shape than its argument's",
        got=f"shape {gradient.shape} for a weight of shape {weight.aval.shape}\n"
        f"ts.grad was called at {line}",
        fix="return a gradient of the shape of each argument from the rule",
    )


def _undifferentiable(plan: _Plan) -> UndifferentiableError:
    line = jaxprs.source_line(plan.gradient)
    loops = [f"the loop at {where}" for where in dict.fromkeys(_loops(plan.region))]
    return UndifferentiableError(
        "a gradient cannot go through a loop whose number of iterations is not known "
        "before it runs",
        got="\n".join([*loops, f"ts.grad was called at {line}"]),
        fix="loop over a Python number, such as an upper bound, with `if` and `break`, "
        "or use jax.lax.scan\n"
        "or take the gradient inside of the loop",
    )


def _loops(equations: Sequence[jaxprs.Equation]) -> Iterator[str]:
    """The lines of the loops among some equations, nested ones included."""
    for equation in equations:
        if equation.primitive.name == "while":
            yield jaxprs.source_line(equation) or "an unknown line"
        for inner in jaxprs.inner_programs(equation):
            yield from _loops(jaxprs.equations(inner))


def _strong(gradient: jax.Array) -> jax.Array:
    """A gradient of strong dtype, as the type of the ``gradient`` equation says."""
    return jax.lax.convert_element_type(gradient, gradient.dtype)


@jax.custom_jvp
def _tap(value: Any, offset: Any) -> Any:
    """``value + offset`` for an offset of zero, to differentiate by inner values.

    The forward program has no trace of it.
    """
    del offset
    return value


@_tap.defjvp
def _tap_jvp(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    return primals[0], tangents[0] + tangents[1]


@jax.custom_jvp
def _fixed(value: Any) -> Any:
    """The value, by which no gradient may be taken."""
    return value


@_fixed.defjvp
def _fixed_jvp(primals: Any, tangents: Any) -> Any:
    del primals, tangents
    refuse_closure()


def _require_connected(
    gradient: jaxprs.Equation, ancestors: set[jaxprs.Atom], is_inner: bool
) -> None:
    names = gradient.params["names"]
    loose = [
        name
        for name, weight in zip(names, gradient.invars[1:], strict=True)
        if isinstance(weight, jaxprs.Literal) or weight not in ancestors
    ]
    if loose:
        line, hint = jaxprs.source_line(gradient), gradient.params.get("hint", "")
        raise unconnected_error(loose, len(names), line, is_inner=is_inner, hint=hint)
