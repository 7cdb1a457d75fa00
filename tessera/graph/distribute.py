# SPDX-License-Identifier: Apache-2.0
"""``ts.distribute``: a function written for one device, spread by a named strategy.

The strategies here are layouts and nothing else: the function is compiled by
``ts.function`` for global arrays, and the partitioner writes the communication.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from tessera.annotations import annotations_of
from tessera.errors import StrategyError, did_you_mean
from tessera.graph.function import Function
from tessera.graph.tracing.declarations import Options
from tessera.graph.tracing.owners import AsOwner
from tessera.graph.tracing.per_device import PerDevice, TensorParallel
from tessera.graph.tracing.strategies import (
    BATCH,
    GRADIENTS,
    PARAMS,
    STATE,
    Strategy,
)

Names: TypeAlias = str | Sequence[str] | None

# The axis and the stage of each; only zero_redundancy_optimizer is given one.
STRATEGIES: Final[Mapping[str, tuple[str, int | None]]] = MappingProxyType(
    {
        "data_parallel": ("dp", 0),
        "fsdp": ("fsdp", 3),
        "zero_redundancy_optimizer": ("dp", None),
        "tensor_parallel": ("tp", 0),
    }
)

_DEFAULT_NAMES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        PARAMS: ("params", "weights"),
        GRADIENTS: ("gradients", "grads"),
        STATE: ("optimizer_state",),
        BATCH: ("batch",),
    }
)


def distribute(
    strategy: str,
    *,
    stage: int | None = None,
    mesh_axes: Sequence[str] | None = None,
    params: Names = None,
    gradients: Names = None,
    optimizer_state: Names = None,
    batch: Names = None,
    results: Sequence[str | None] | None = None,
) -> Callable[[Callable[..., Any]], Function]:
    """Lay the arguments and the results of a function out by a strategy.

    ``data_parallel`` splits the batch along the leading dim of each of its arrays and
    holds everything else whole on every device, or as others split it: an axis that is
    not the strategy's, such as ``tp``, stays where it is. ``fsdp`` splits the batch,
    parameters, gradients and optimizer state. ``zero_redundancy_optimizer`` does it by
    stages: 1 splits the optimizer state, 2 also the gradients, 3 also the parameters.
    An array is split along the largest dim that nothing splits and that the axis
    divides; one without such a dim stays whole.

    The mesh is that of ``ts.function`` (its ``mesh=``, the innermost ``with mesh:``, or
    what the arguments live on); without any, every device there is along one axis.

    Which argument is what is told by its name; see the keywords. Other arguments keep
    the layout that they come with. ``ts.grad`` by parameters gives gradients in their
    layout. A result that has the tree and the shapes of an argument, or the elements of
    a tuple or dict that do, is laid out like it: the first that is like the parameters
    is taken for parameters, a second for optimizer state, a third for gradients.

    Args:
      strategy: ``data_parallel``, ``fsdp`` or ``zero_redundancy_optimizer``.
      stage: Of ``zero_redundancy_optimizer``: 1, 2 or 3; 2 by default.
      mesh_axes: The axes to split over, the last of them for what is no batch: ``dp``
        by default, for ``fsdp`` ``fsdp``.
      params: Names of the arguments that are parameters: ``params``, ``weights``.
      gradients: ... that are gradients: ``gradients``, ``grads``.
      optimizer_state: ... that are the optimizer's state: ``optimizer_state``.
      batch: ... that are the batch: ``batch``.
      results: What each result is, where its form does not say it: a role by the name
        of its keyword here, or None.

    Returns:
      A decorator that gives a ``ts.function``.

    Raises:
      StrategyError: [T313] there is no such strategy or stage, or the function has no
        argument that it could split.
      UnknownAxisError: [T103] (at the call) the mesh lacks the axis.
      ShardDivisibilityError: [T201] (at the call) the axes do not divide the batch.
      LayoutMismatchError: [T205] (at the call) arrays live on the mesh in another
        layout.

    Example:
      >>> import jax.numpy as jnp, numpy as np, tessera as ts
      >>> mesh = ts.Mesh(["dp"], devices=range(4))
      >>> @ts.function(mesh=mesh)
      ... @ts.distribute("data_parallel")
      ... def step(weights, batch):
      ...     loss = jnp.mean((batch @ weights) ** 2)
      ...     return weights - 0.1 * ts.grad(loss, weights)
      >>> traced = step.trace(np.ones((3,), "f"), np.ones((8, 3), "f"))
      >>> [value.spec for value in traced.graph.inputs]
      [P(), P('dp',)]

    Source: stages, Rajbhandari et al., ZeRO, arXiv 1910.02054.
    """
    default_axis, fixed_stage = _known(strategy)
    chosen = _stage(strategy, fixed_stage, stage)
    given = {
        PARAMS: params,
        GRADIENTS: gradients,
        STATE: optimizer_state,
        BATCH: batch,
    }
    _check_results(strategy, results)
    axes = tuple(mesh_axes) if mesh_axes is not None else (default_axis,)

    def decorate(body: Callable[..., Any]) -> Function:
        options, body = _undecorated(strategy, body)
        known = {
            "name": strategy,
            "stage": chosen,
            "axes": axes,
            "results": tuple(results) if results is not None else None,
        }
        if strategy == "tensor_parallel":
            split = TensorParallel(**known, annotations=annotations_of(body))
            return Function(PerDevice(body, split), replace(options, strategy=split))
        arguments = list(signature(body).parameters)
        plan = Strategy(**known, roles=_roles(strategy, options.name, arguments, given))
        if strategy == "zero_redundancy_optimizer":
            body = AsOwner(body, plan)
        return Function(body, replace(options, strategy=plan))

    return decorate


def _undecorated(
    strategy: str, body: Callable[..., Any]
) -> tuple[Options, Callable[..., Any]]:
    """A function's options, and itself without them."""
    if not isinstance(body, Function):
        return Options(name=getattr(body, "__name__", "function")), body
    if type(body) is not Function:
        raise StrategyError(
            f"strategy {strategy!r} is for functions whose parameters are arguments",
            got=f"{body.options.name!r}, whose operations declare them",
            fix="give its mesh data axes and its operations layouts instead",
        )
    return body.options, body.body


def _known(strategy: str) -> tuple[str, int | None]:
    if strategy not in STRATEGIES:
        raise StrategyError(
            f"there is no strategy {strategy!r}", fix=did_you_mean(strategy, STRATEGIES)
        )
    return STRATEGIES[strategy]


def _stage(strategy: str, fixed: int | None, stage: int | None) -> int:
    if fixed is None:
        if stage in (1, 2, 3, None):
            return stage or 2
        fix = "use stage=1, 2 or 3"
    elif stage is None:
        return fixed
    else:
        fix = "leave it out, or use strategy='zero_redundancy_optimizer'"
    raise StrategyError(
        f"strategy {strategy!r} has no such stage", got=f"stage={stage!r}", fix=fix
    )


def _check_results(strategy: str, results: Sequence[str | None] | None) -> None:
    for role in results or ():
        if role is not None and role not in _DEFAULT_NAMES:
            raise StrategyError(
                f"strategy {strategy!r} knows no result {role!r}",
                got=f"results={results!r}",
                fix=did_you_mean(role, _DEFAULT_NAMES),
            )


def _roles(
    strategy: str, name: str, arguments: list[str], given: Mapping[str, Names]
) -> dict[str, str]:
    """What each argument is, by its name."""
    roles: dict[str, str] = {}
    for role, names in given.items():
        chosen = _DEFAULT_NAMES[role] if names is None else names
        for argument in (chosen,) if isinstance(chosen, str) else chosen:
            if argument in arguments:
                roles[argument] = role
            elif names is not None:
                raise StrategyError(
                    f"{name!r} has no argument {argument!r}",
                    got=f"{role}={names!r}",
                    fix=did_you_mean(argument, arguments),
                )
    if not roles:
        raise StrategyError(
            f"strategy {strategy!r} finds nothing to lay out in {name!r}",
            got=f"arguments {', '.join(arguments) or 'none'}",
            fix="say which they are: params=, gradients=, optimizer_state=, batch=",
        )
    return roles
