# SPDX-License-Identifier: Apache-2.0
"""``ts.distribute``: a function written for one device, spread by a named strategy.

Most strategies are layouts and nothing else: the function is compiled by
``ts.function`` for global arrays, and the partitioner writes the communication. One
runs the body on each device's blocks, and one as the stages of a pipeline.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from tessera.annotations import annotations_of
from tessera.errors import StrategyError, did_you_mean
from tessera.graph.function import Function
from tessera.graph.pipeline import PipelineOfArguments
from tessera.graph.tracing.declarations import Options
from tessera.graph.tracing.owners import AsOwner
from tessera.graph.tracing.per_device import PerDevice, TensorParallel
from tessera.graph.tracing.strategies import (
    BATCH,
    GRADIENTS,
    PARAMS,
    STATE,
    ExpertParallel,
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
        "pipeline_parallel": ("pp", 3),
        "expert_parallel": ("ep", 0),
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
    """Spread a function over a mesh by a strategy, named for what it splits.

    Five strategies are layouts: the function is compiled for global arrays, and the
    partitioner writes the communication. ``data_parallel`` splits the batch along the
    leading dim of each of its arrays and holds everything else whole on every device,
    or as others split it: an axis that is not the strategy's, such as ``tp``, stays
    where it is. ``fsdp`` splits the batch, parameters, gradients and optimizer state.
    ``zero_redundancy_optimizer`` does it by stages: 1 splits the optimizer state, 2
    also the gradients, 3 also the parameters. An array is split along the largest dim
    that nothing splits and that the axis divides; one without such a dim stays whole.
    In its body ``ts.mesh.current().rank`` is the rank of whoever owns a parameter: it
    equals every rank that there is, so ``if rank == owner:`` is taken, and
    ``recv_from`` after ``else`` is not. ``expert_parallel`` splits the batch, and along
    their leading dim parameters that have ``expert`` at the beginning of a component of
    their path, such as ``weights/experts/up``.

    ``tensor_parallel`` runs the body once for each device of the axes, on its blocks.
    Every array has to be annotated. A dim is split if the first array has none of its
    symbols; of several the first. ``3*F`` means three blocks, each of which is split by
    itself. A result that differs from device to device is put together along its dim
    of that kind; collectives are written by hand, and ``ts.mesh.current()`` is the mesh
    of the axes.

    ``pipeline_parallel`` runs the ``graph.stage`` s that the function calls on one
    device each, in the order 1f1b, in as many microbatches as
    ``schedule.pipeline_microbatches`` says. Parameters are split like ``fsdp``'s, and
    sent to the stage that reads them. See ``graph.pipeline``, which takes more options.

    The mesh is that of ``ts.function`` (its ``mesh=``, the innermost ``with mesh:``, or
    what the arguments live on); without any, every device there is along one axis.
    Called inside another function, this one becomes part of it: the layouts of arrays
    are then those of that function.

    Which argument is what is told by its name; see the keywords. Other arguments keep
    the layout that they come with. ``ts.grad`` by parameters gives gradients in their
    layout. A result that has the tree and the shapes of an argument, or the elements of
    a tuple or dict that do, is laid out like it: the first that is like the parameters
    is taken for parameters, a second for optimizer state, a third for gradients.

    Args:
      strategy: One of the names above.
      stage: Of ``zero_redundancy_optimizer``: 1, 2 or 3; 2 by default.
      mesh_axes: The axes to split over, the last of them for what is no batch and no
        expert. By default ``dp``, ``fsdp``, ``tp``, ``pp`` or ``ep``.
      params: Names of the arguments that are parameters: ``params``, ``weights``.
      gradients: ... that are gradients: ``gradients``, ``grads``.
      optimizer_state: ... that are the optimizer's state: ``optimizer_state``.
      batch: ... that are the batch: ``batch``.
      results: What each result is, where its form does not say it: a role by the name
        of its keyword here, or None.

    Returns:
      A decorator that gives a ``ts.function``.

    Raises:
      StrategyError: [T313] there is no such strategy or stage, or the function has
        nothing that it could split; at the call, a rank is used for something else than
        to find an owner, or a result differs from device to device unawares.
      UnknownAxisError: [T103] (at the call) the mesh lacks the axis.
      ShardDivisibilityError: [T201] (at the call) the axes do not divide a dim.
      LayoutMismatchError: [T205] (at the call) arrays live on the mesh in another
        layout.
      PipelineFormError: [T312] (at the call) the function is no chain of stages.
      PipelineSizeError: [T311] (at the call) it has not a stage for each device.

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

    Sources: ZeRO's stages, arXiv 1910.02054; columns, rows and heads over devices,
    Megatron-LM, arXiv 1909.08053; experts, GShard, arXiv 2006.16668.
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
        known: dict[str, Any] = {
            "name": strategy,
            "stage": chosen,
            "axes": axes,
            "results": tuple(results) if results is not None else None,
        }
        if strategy == "tensor_parallel":
            split = TensorParallel(**known, annotations=annotations_of(body))
            return Function(PerDevice(body, split), replace(options, strategy=split))
        arguments = list(signature(body).parameters)
        known["roles"] = _roles(strategy, options.name, arguments, given)
        plan = (ExpertParallel if strategy == "expert_parallel" else Strategy)(**known)
        if strategy == "zero_redundancy_optimizer":
            body = AsOwner(body, plan)
        elif strategy == "pipeline_parallel":
            body = PipelineOfArguments(body, axes[-1], plan.roles)
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
        if role == BATCH and strategy == "pipeline_parallel":
            continue  # it is cut into microbatches
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
    if not roles and strategy != "pipeline_parallel":  # stages may own parameters
        raise StrategyError(
            f"strategy {strategy!r} finds nothing to lay out in {name!r}",
            got=f"arguments {', '.join(arguments) or 'none'}",
            fix="say which they are: params=, gradients=, optimizer_state=, batch=",
        )
    return roles
