# SPDX-License-Identifier: Apache-2.0
"""``ts.grad`` and ``ts.value_and_grad``: gradients by weights, or by arguments.

``ts.grad`` of a value that was computed is an equation of the step, and that of a
function is a part of ``ts.value_and_grad`` of it.

Inside a step the call is traced separately and differentiated at once, so that it works
inside ``jax.vmap`` and ``jax.grad``; a call with a pipeline is differentiated by the
step's passes instead, as ``ts.grad`` is. Outside of steps it is a ``ts.function``.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core.primitives import copy_p

from tessera.annotations import (
    argument_names,
    check_call,
    refuse_options,
    signature_of,
)
from tessera.errors import ArgumentError, did_you_mean
from tessera.foundations.tree import partition
from tessera.graph.differentiation import differentiated
from tessera.graph.function import Function
from tessera.graph.gradient_primitive import gradient_taken_p, gradients_of
from tessera.graph.pipelining.pipeline_primitive import has_pipeline
from tessera.graph.tracer.argument_leaves import is_array
from tessera.graph.tracer.declared_layouts import Options, is_number
from tessera.jax_compat import jaxprs
from tessera.jax_compat.tracebacks import at_boundary
from tessera.ops.operand_layouts import layout_of
from tessera.shard import is_tensor
from tessera.tracing import scope
from tessera.tracing.object_arguments import (
    changes_in_place,
    is_object,
    parameters_of,
    split_result,
)

__all__ = ["grad", "value_and_grad"]

Which: TypeAlias = int | str

# Options of jax.grad, and what takes their place.
_BY_JAX = "use jax.grad or jax.value_and_grad, which work in a step as well"
_ELSEWHERE: Final = {"holomorphic": _BY_JAX, "allow_int": _BY_JAX}
_MISSING: Final = object()


def grad(
    loss: Any,
    weights: Any = _MISSING,
    *,
    argnums: Which | Sequence[Which] = 0,
    has_aux: bool = False,
    allow_unused: bool = False,
    **others: Any,
) -> Any:
    """The gradient of a loss: of a value by weights, or of a function, as ``jax.grad``.

    Of a value that was already computed, by any traced weights::

        loss = jnp.mean((x @ weights - y) ** 2)
        gradients = ts.grad(loss, weights)

    Of a function, by its arguments::

        gradients = ts.grad(loss_of)(weights, x, y)

    Outside of steps what it then returns is compiled at its first call, so keep it for
    the next one.

    Args:
      loss: One floating-point number, computed in the function being traced; or a
        function, as for ``ts.value_and_grad``.
      weights: Tree of floating-point arrays that the value was computed from:
        arguments, parameters or intermediate values. In the body of a loop or a branch
        it may be a loss from before, by weights from before. An ``nnx.Module`` in it
        stands for ``nnx.state(module, nnx.Param)``. Of a function these are
        ``argnums``, as they are the second argument of ``jax.grad``.
      argnums: Of a function, as for ``ts.value_and_grad``.
      has_aux: Whether the function returns a pair, of which the second is no loss.
      allow_unused: Give zeros for weights that the loss does not depend on.
      **others: None: those of ``jax.grad`` that are left say what takes their place.

    Returns:
      A tree like ``weights``: same shapes, dtypes and, for inputs of the step, layouts
      (under ZeRO from stage 2 on, the layouts of its gradients). Of a function, a
      function that returns such a tree, and with ``has_aux`` a pair of it and the rest.

    Raises:
      ArgumentError: [T301] a function is given with weights, or a value without.
      OutsideTraceError: [T302] the loss is a value that Tessera does not trace.
      UnconnectedGradientError: [T303] the loss does not depend on a weight (raised when
        the program is differentiated, with the weight's path).
      LossFormError: [T304] the loss is not a floating-point scalar.
      UndifferentiableError: [T317] (as T303) a loop of unknown length is in the way.

    Example:
      >>> import tessera as ts, jax.numpy as jnp
      >>> @ts.function
      ... def slope(x):
      ...     return ts.grad(jnp.sum(x**2), x)
      >>> print(slope(jnp.array([1.0, 2.0])))
      [2. 4.]
      >>> print(ts.grad(lambda x: jnp.sum(x**2))(jnp.array([1.0, 2.0])))
      [2. 4.]
    """
    refuse_options(others, grad, _ELSEWHERE)
    if not callable(loss):
        if weights is _MISSING or has_aux or argnums != 0:
            raise ArgumentError(
                "ts.grad of a value takes the weights to differentiate it by",
                got=f"a {type(loss).__name__}, which is no function",
                fix="ts.grad(loss, weights), or ts.grad(function, argnums)(*arguments)",
            )
        return gradients_of(loss, weights, allow_unused=allow_unused)
    which = argnums if weights is _MISSING else weights
    both = value_and_grad(loss, which, has_aux=has_aux, allow_unused=allow_unused)

    @at_boundary
    @functools.wraps(both)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return gradient


def value_and_grad(
    function: Callable[..., Any],
    argnums: Which | Sequence[Which] = 0,
    *,
    has_aux: bool = False,
    allow_unused: bool = False,
    **others: Any,
) -> Callable[..., Any]:
    """A function that gives a loss and its gradient by arguments of that loss.

    It differentiates by what ``function`` does with the arguments, and by nothing that
    it closes over. In a ``ts.function`` it becomes part of that program, and may be
    used inside ``jax.vmap``, ``jax.grad`` or itself; elsewhere it is compiled as a
    ``ts.function`` is. By an ``nnx.Module`` it differentiates as ``nnx.value_and_grad``
    does, by its ``nnx.Param`` s; changes of its other state persist.

    Args:
      function: Gives one floating-point number; with ``has_aux`` a pair of it and
        anything else.
      argnums: Position or name of the argument to differentiate by, or several.
      has_aux: Whether the function returns a pair.
      allow_unused: Give zeros for arrays that the loss does not depend on.
      **others: None: those of ``jax.value_and_grad`` that are left say what takes their
        place.

    Returns:
      A function of the same arguments. It gives ``(loss, gradients)``, with ``has_aux``
      ``((loss, aux), gradients)``; the gradients are a tree like the argument, or a
      tuple of them where several were asked for. Shapes, dtypes and layouts are those
      of ``ts.grad``.

    Raises:
      ArgumentError: [T301] it is no function, or ``argnums`` are neither positions nor
        names; (at the call) there is no such argument.
      UnconnectedGradientError: [T303] (at the call) the loss does not depend on an
        array, which is named by its path.
      LossFormError: [T304] (at the call) the loss is not one floating-point number, or
        an array is none of such numbers.

    Example:
      >>> import tessera as ts, jax.numpy as jnp
      >>> def loss(weights, x):
      ...     return jnp.sum((weights["scale"] * x) ** 2)
      >>> value, slope = ts.value_and_grad(loss)({"scale": 2.0}, jnp.ones(3))
      >>> print(value, slope["scale"])
      12.0 12.0
    """
    refuse_options(others, value_and_grad, _ELSEWHERE)
    request = _GradientRequest(
        function,
        which=_which(function, argnums),
        is_single=isinstance(argnums, (int, str)),
        has_aux=has_aux,
        allow_unused=allow_unused,
    )

    name = getattr(function, "__name__", type(function).__name__)

    @at_boundary
    @functools.wraps(function)
    def with_gradient(*args: Any, **kwargs: Any) -> Any:
        here = scope.current()
        check_call(function, len(args), kwargs, name=name)
        if here is None:
            args, kwargs = request.with_changed(jnp.asarray, args, kwargs)
            return compiled(*args, **kwargs)  # which comes back here, in a step
        # A separate program would have copies of objects.
        if changes_in_place((args, kwargs)):
            return request.bind(*args, **kwargs)
        before = here.snapshot()
        with jax.disable_jit(False):  # the loss is a program in any case
            own = _OwnProgram(request.bind, args, kwargs)
        if own.has_pipeline:
            here.restore(before)
            return request.bind(*args, **kwargs)
        result, gradients = own.run()
        gradient_taken_p.bind(request.loss(result), *request.weights(args, kwargs))
        return result, gradients

    compiled = Function(with_gradient, Options(name=f"value_and_grad_{name}"))
    return with_gradient


def _which(function: Any, argnums: Any) -> tuple[Which, ...]:
    """The arguments to differentiate by.

    Raises:
      ArgumentError: [T301] there is no function, or arrays in place of their positions.
    """
    which = (argnums,) if isinstance(argnums, (int, str)) else argnums
    is_listed = isinstance(which, (tuple, list))
    if callable(function) and is_listed and all(isinstance(w, Which) for w in which):
        return tuple(which)
    given = "a function" if callable(function) else f"a {type(function).__name__}"
    raise ArgumentError(
        "a function is differentiated by arguments, which are those of the call",
        got=f"{given}, and a {type(argnums).__name__} to differentiate by",
        fix="ts.grad(function)(weights, ...), or argnums= for others than the first\n"
        "ts.grad(loss, weights) is for a loss that was computed in a ts.function",
    )


@dataclass(frozen=True)
class _GradientRequest:
    """A function to differentiate, and by which arguments."""

    function: Callable[..., Any]
    which: tuple[Which, ...]
    is_single: bool
    has_aux: bool
    allow_unused: bool

    def bind(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result, and the gradients of its loss as one primitive."""
        args, kwargs = self.with_changed(_copied, args, kwargs)
        weights = tuple(map(parameters_of, self._chosen(args, kwargs)))
        # Their present arrays: Flax's transformations give objects other ones.
        weights = jax.tree.unflatten(
            jax.tree.structure(weights), jax.tree.leaves(weights)
        )
        result = scope.resolve_callee(self.function)(*args, **kwargs)
        gradients = gradients_of(
            self.loss(result),
            weights[0] if self.is_single else weights,
            allow_unused=self.allow_unused,
        )
        return result, gradients

    def loss(self, result: Any) -> Any:
        """The loss in the function's result."""
        return result[0] if self.has_aux else result

    def weights(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Every array that is differentiated by."""
        leaves = jax.tree.leaves(self._chosen(args, kwargs), is_leaf=is_tensor)
        return list(map(jnp.asarray, leaves))

    def _chosen(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """The arguments to differentiate by."""
        keys = self._keys(args, kwargs)
        return [args[key] if isinstance(key, int) else kwargs[key] for key in keys]

    def with_changed(
        self, change: Callable[[Any], Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with every leaf changed that is differentiated by."""

        def is_whole(node: object) -> bool:
            return is_tensor(node) or is_object(node)

        def one(leaf: Any) -> Any:
            return leaf if is_object(leaf) else change(leaf)

        changed, named = list(args), dict(kwargs)
        for key in self._keys(args, kwargs):
            container: Any = changed if isinstance(key, int) else named
            container[key] = jax.tree.map(one, container[key], is_leaf=is_whole)
        return tuple(changed), named

    def _keys(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Which]:
        """The arguments to differentiate by, as positions or names of a call."""
        signature = signature_of(self.function)
        names = argument_names(signature, len(signature.parameters))
        keys: list[Which] = []
        for which in self.which:
            is_position = isinstance(which, int)
            if is_position and -len(args) <= which < len(args):
                keys.append(which % len(args))
                continue
            within = is_position and 0 <= which < len(names)
            name = names[which] if within else which
            if name in kwargs:
                keys.append(name)
            elif name in names[: len(args)]:
                keys.append(names.index(str(name)))
            else:
                raise self._no_such(which, [*names[: len(args)], *kwargs])
        return keys

    def _no_such(self, which: Which, arguments: list[str]) -> ArgumentError:
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return ArgumentError(
            f"{name!r} is not called with what ts.value_and_grad differentiates by",
            got=f"argnums={which!r}, arguments {', '.join(arguments) or 'none'}",
            fix=did_you_mean(str(which), arguments)
            if isinstance(which, str)
            else "give the position or the name of one of them",
        )


def _copied(leaf: Any) -> Any:
    """A copy of the value, from which nothing else is computed."""
    return _laid_out_like(copy_p.bind(jnp.asarray(leaf)), leaf)


def _laid_out_like(value: Any, like: Any) -> Any:
    """A value recorded to have the layouts of another one and of its gradient."""
    if (layout := layout_of(like)) is not None:
        scope.record_layout(value, *layout)
    if (layout := scope.layout_of(like, of_gradient=True)) is not None:
        scope.record_layout(value, *layout, of_gradient=True)
    return value


class _OwnProgram:
    """A call traced as a separate program and differentiated at once.

    JAX's transformations cannot look inside a ``gradient`` primitive in the step.
    """

    def __init__(
        self,
        body: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> None:
        own, arguments = partition((args, kwargs), is_array, is_leaf=is_tensor)
        self._arrays = list(map(jnp.asarray, own))

        def of_arrays(*arrays: Any) -> list[Any]:
            args, kwargs = arguments.combine(map(_laid_out_like, arrays, own))
            result, self._restore = split_result(body(*args, **kwargs))
            results, self._result = partition(result, is_number)
            return list(map(jnp.asarray, results))

        forms = [jaxprs.struct(jax.typeof(array)) for array in self._arrays]
        self._program = jax.make_jaxpr(of_arrays)(*forms)

    @property
    def has_pipeline(self) -> bool:
        """Whether it has a pipelined call, which only the step's passes can expand."""
        return has_pipeline(self._program)

    def run(self) -> Any:
        """The call's result and its gradients."""
        with jax.disable_jit(False):
            program = differentiated(self._program)
        results = jaxprs.evaluate(program, *self._arrays)
        return self._restore(self._result.combine(results))
