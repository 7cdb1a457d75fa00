# SPDX-License-Identifier: Apache-2.0
"""The ``gradient`` primitive, and gradients of a value that was computed.

While a function is traced, the gradient of a value that was already computed is one
equation, ``gradient loss weight…``, with one result for each weight. The pass
``differentiate_losses`` puts the backward computation in its place, so users' values
stay ordinary arrays and Flax, Optax and ``jnp`` work in between.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from tessera.errors import (
    LossFormError,
    OutsideTraceError,
    UnconnectedGradientError,
)
from tessera.foundations.tree import nest, path_name
from tessera.jax_compat import jaxprs, traces
from tessera.jax_compat.traces import manual_axes
from tessera.ops.operand_layouts import layout_of
from tessera.tracing import scope
from tessera.tracing.object_arguments import hint_of_parameters, parameters_of

gradient_p = jaxprs.Primitive("gradient")
gradient_p.multiple_results = True

# True where gradients are recorded outside of a step: in users' derivative rules, which
# a pass has JAX trace, and in a kernel that runs at once.
_differentiating: ContextVar[bool] = ContextVar("tessera_gradient", default=False)


# Records the loss and the weights of a gradient that was computed at once.
gradient_taken_p = jaxprs.Primitive("gradient_taken")
gradient_taken_p.multiple_results = True
traces.register_no_op(gradient_taken_p)


def _refuse(transform: str) -> NoReturn:
    raise OutsideTraceError(
        f"{transform} cannot look inside ts.grad and graph.backward",
        got=f"a gradient taken in the function that {transform} is applied to",
        fix="use ts.value_and_grad(function) in it, which any transformation takes\n"
        f"or take the gradient outside {transform}, by ts.grad",
    )


jaxprs.refuse_transforms(gradient_p, _refuse)


@gradient_p.def_impl
def _refuse_eager(*_: Any, **__: Any) -> NoReturn:
    raise _eager_error()


def _eager_error() -> OutsideTraceError:
    """The error [T302] for a gradient under ``jax.disable_jit``."""
    return OutsideTraceError(
        "ts.grad and graph.backward need the program that computes a loss",
        got="jax.disable_jit(): operations run one by one",
        fix="leave jax.disable_jit() out: print, jax.debug.print and "
        "jax.debug.breakpoint work in a program\n"
        "or use ts.value_and_grad(function)",
    )


def _batched(
    values: Sequence[Any], dims: Sequence[int | None], **params: Any
) -> tuple[list[Any], Sequence[int | None]]:
    """``jax.vmap`` of a gradient: of one loss per example, by per-example weights."""
    pairs = zip(params["names"], dims[1:], strict=True)
    shared = [name for name, dim in pairs if dim is None]
    if dims[0] is not None and shared:
        names = ", ".join(repr(name) for name in shared if name) or "the weight"
        raise OutsideTraceError(
            "jax.vmap cannot tell gradients by what all examples share apart",
            got=f"a loss for each example, differentiated by {names}",
            fix="use ts.value_and_grad(function) in the function that is mapped\n"
            "or take ts.grad of the sum of the losses, outside jax.vmap",
        )
    return gradient_p.bind(*values, **params), dims[1:]


traces.register_batching(gradient_p, _batched)


def differentiating() -> AbstractContextManager[None]:
    """Record gradients that are taken outside of a step, for ``differentiated``."""
    return scope.holding(_differentiating, True)


@gradient_p.def_abstract_eval
def _abstract(loss: Any, *weights: Any, names: tuple[str, ...], **_: Any) -> list[Any]:
    del loss, names
    return [weight.strip_weak_type() for weight in weights]


def gradients_of(loss: Any, weights: Any, *, allow_unused: bool = False) -> Any:
    """The gradient of a loss that was already computed: ``ts.grad`` of a value."""
    traced, here = isinstance(loss, jaxprs.Tracer), scope.current()
    if not traced and here is not None and here.is_eager:
        raise _eager_error()
    if not traced or not (here or _differentiating.get()):
        kind = "a loss that JAX traces by itself" if traced else _untraced(loss)
        raise OutsideTraceError(
            "ts.grad needs the computation of the loss, which was not recorded",
            got=kind,
            fix="call it in a function decorated with @ts.function, where the loss is "
            "computed",
        )
    check_loss(loss)
    weights = parameters_of(weights)
    hint = hint_of_parameters(weights)
    names, leaves, tree = _weights(weights, hint)
    known = [traces.is_known_where(leaf, loss) for leaf in leaves]
    if not (all(known) or allow_unused):
        missing = [name for name, ok in zip(names, known, strict=True) if not ok]
        raise unconnected_error(missing, len(names), hint=hint)
    with traces.in_trace_of(loss):
        # The loss does not depend on values of inner traces; zeros stand for those.
        operands = [
            leaf if is_known else jnp.zeros(leaf.shape, leaf.dtype)
            for leaf, is_known in zip(leaves, known, strict=True)
        ]
        gradients = gradient_p.bind(
            loss, *operands, names=names, allow_unused=allow_unused, hint=hint
        )
    return jax.tree.unflatten(tree, _in_layout_of(leaves, gradients))


def _weights(weights: Any, hint: str) -> tuple[tuple[str, ...], list[Any], Any]:
    """Names, arrays and the tree of weights; raises [T304] unless all are floats."""
    paths, tree = jax.tree_util.tree_flatten_with_path(weights)
    leaves = [x if isinstance(x, jaxprs.Tracer) else jnp.asarray(x) for _, x in paths]
    names = tuple(path_name(path) for path, _ in paths)
    for name, leaf in zip(names, leaves, strict=True):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise LossFormError(
                f"weight {name!r} cannot be differentiated by",
                got=f"dtype {leaf.dtype.name}, shape {leaf.shape}",
                fix="give ts.grad floating-point weights only"
                + (f"\n{hint}" if hint else ""),
            )
    return names, leaves, tree


def unconnected_error(
    names: Sequence[str],
    count: int,
    line: str = "",
    *,
    is_inner: bool = False,
    hint: str = "",
) -> UnconnectedGradientError:
    """The error for weights that a loss does not depend on.

    Args:
      names: Their paths.
      count: Of how many.
      line: Where the gradient was taken.
      is_inner: Whether that is in the body of a loop, a branch or the like.
      hint: What else to write.
    """
    inner = (
        "\nin a loop or a branch, compute all of the loss in the body, or all before it"
    )
    read = (
        "\na loss has to read these arrays themselves: no copies of them, and in "
        "ts.grad(f)(w) the argument of f, where model.w is another array"
    )
    listed = ", ".join(repr(name) if name else "the weight" for name in names)
    return UnconnectedGradientError(
        f"the loss does not depend on {listed}",
        got=f"{len(names)} of {count} weights have no path to the loss"
        + (f"\nts.grad was called at {line}" if line else ""),
        fix="compute the loss from them, leave them out, or pass allow_unused=True "
        "to get zeros"
        + inner * is_inner
        + read * (len(names) == count)
        + (f"\n{hint}" if hint else ""),
    )


def refuse_closure() -> NoReturn:
    """Raise [T302] for a derivative rule that closes over a traced value.

    A pass has JAX trace the rule when the value is no more.
    """
    raise OutsideTraceError(
        "a function with a derivative rule of its own closes over a traced value",
        got="jax.custom_vjp or jax.custom_jvp, and a gradient by it or by the value",
        fix="pass it to the function that has the rule, as an argument",
    )


def unreached_parameters(program: jaxprs.Program) -> dict[int, frozenset[str]]:
    """For each ``graph.backward``, the parameters that its loss does not depend on.

    Raises:
      UnconnectedGradientError: [T303] a loss depends on no parameter of its step.
    """
    found: dict[int, frozenset[str]] = {}
    for index, equation in enumerate(jaxprs.equations(program)):
        if equation.primitive is gradient_p and "call" in equation.params:
            sources = jaxprs.sources(program, equation.invars[0], before=index)
            names, weights = equation.params["names"], equation.invars[1:]
            if sources.isdisjoint(weights):
                raise _unreached_error(names, jaxprs.source_line(equation))
            pairs = zip(names, weights, strict=True)
            missed = frozenset(name for name, w in pairs if w not in sources)
            found |= {equation.params["call"]: missed} if missed else {}
        for inner in jaxprs.inner_programs(equation):
            found |= unreached_parameters(inner)
    return found


def _unreached_error(names: Sequence[str], line: str) -> UnconnectedGradientError:
    return UnconnectedGradientError(
        "the loss depends on no trainable parameter of the step",
        got=f"none of {len(names)}: {', '.join(map(repr, names[:3]))}"
        + (", …" if len(names) > 3 else "")
        + (f"\ngraph.backward was called at {line}" if line else ""),
        fix="compute the loss from them, at the level where graph.backward is called",
    )


def _untraced(loss: Any) -> str:
    inside = " that does not depend on traced arrays" if scope.current() else ""
    return f"a loss of type {type(loss).__name__}{inside}"


def check_loss(loss: Any) -> None:
    """Raise [T304] unless a loss is one floating-point number."""
    if jnp.ndim(loss) == 0 and jnp.issubdtype(loss.dtype, jnp.floating):
        return
    raise LossFormError(
        "a loss must be one floating-point number",
        got=f"shape {tuple(loss.shape)}, dtype {loss.dtype.name}",
        fix="reduce it first, e.g. with .mean()",
    )


def backward(loss: Any) -> dict[str, Any]:
    """Gradients of a loss by every trainable parameter of the step that it reaches.

    Args:
      loss: One floating-point number, computed in the step being traced.

    Returns:
      Nested dict by parameter name, a part of the tree ``step.params``; each gradient
      has its parameter's shape, dtype and layout.

    Raises:
      OutsideTraceError: [T302] no step is being traced.
      UnconnectedGradientError: [T303] the loss reaches no trainable parameter.
      LossFormError: [T304] the loss is not a floating-point scalar.
    """
    open_scope = scope.current()
    if open_scope is not None and open_scope.is_eager:
        raise _eager_error()
    if open_scope is None or not isinstance(loss, jaxprs.Tracer):
        raise OutsideTraceError(
            "graph.backward differentiates by parameters, and no step is traced",
            fix="call it in a function decorated with @graph.training_step",
        )
    check_loss(loss)
    call = open_scope.backward_calls
    open_scope.backward_calls += 1
    known = {
        name: open_scope.value_of(name)
        for name, declared in open_scope.declared.items()
        if declared.trainable
    }
    skipped = open_scope.unreached.get(call, frozenset())  # an earlier trace knows
    weights = {name: value for name, value in known.items() if name not in skipped}
    if not weights:
        raise UnconnectedGradientError(
            "graph.backward has no parameter to differentiate by",
            got=f"{len(open_scope.declared)} parameters, none of them trainable",
            fix="compute the loss with an operation that owns parameters or with a "
            "trainable dist.tensor, or use ts.grad(loss, weights)",
        )
    gradients = gradient_p.bind(
        loss, *weights.values(), names=tuple(weights), allow_unused=True, call=call
    )
    laid_out = _in_layout_of(list(weights.values()), gradients)
    return nest(dict(zip(weights, laid_out, strict=True)))


def _in_layout_of(weights: list[Any], gradients: list[Any]) -> list[Any]:
    """The gradients, each constrained to the layout declared for it or its weight."""
    if manual_axes():  # blocks of this device: nothing is laid out here
        return gradients
    found = [
        gradient
        if (layout := scope.layout_of(weight, of_gradient=True) or layout_of(weight))
        is None
        else scope.constrain(gradient, *layout)
        for weight, gradient in zip(weights, gradients, strict=True)
    ]
    for gradient in found:
        scope.record_gradient(gradient)
    return found
