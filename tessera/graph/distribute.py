# SPDX-License-Identifier: Apache-2.0
"""``ts.distribute``: parallelizes a function over a mesh by a named strategy.

Most strategies only assign layouts: ``ts.function`` compiles the function for global
arrays, and the partitioner inserts the communication. ``tensor_parallel`` runs the body
as an SPMD region, ``pipeline_parallel`` as the stages of a pipeline.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import Parameter
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from tessera.annotations import annotations_of, signature_of
from tessera.errors import StrategyError, did_you_mean
from tessera.graph.function import Function
from tessera.graph.jit_options import one_of
from tessera.graph.pipelines import pipeline_of_arguments
from tessera.graph.tracer.arguments import as_names
from tessera.graph.tracer.declared_layouts import Options
from tessera.graph.tracer.spmd_region import TensorParallel, spmd_function
from tessera.graph.tracer.strategies import (
    ExpertParallel,
    PipelineParallel,
    Strategy,
)
from tessera.graph.tracer.strategy_roles import (
    BATCH,
    GRADIENTS,
    PARAMS,
    ROLES,
    STATE,
)
from tessera.graph.tracer.zero_owner import as_any_owner
from tessera.mesh import AnyMesh, as_mesh

__all__ = ["STRATEGIES", "distribute"]

Names: TypeAlias = str | Sequence[str] | None

# Default axis and ZeRO stage of each; zero_redundancy_optimizer takes a stage.
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


def distribute(  # noqa: PLR0913 - a mesh, and the roles of arguments
    strategy: str,
    *,
    stage: int | None = None,
    mesh: AnyMesh | None = None,
    mesh_axes: Sequence[str] | None = None,
    params: Names = None,
    gradients: Names = None,
    optimizer_state: Names = None,
    batch: Names = None,
    experts: Names = None,
) -> Callable[[Callable[..., Any]], Function]:
    """Parallelize a function over a mesh by a strategy, named for what it splits.

    Five strategies are layouts: the function is compiled for global arrays, and the
    partitioner writes the communication. ``data_parallel`` splits the batch along the
    leading dim of each of its arrays and replicates everything else over its axis;
    splits over other axes, such as ``tp``, stay. ``fsdp`` splits the batch, parameters,
    gradients and optimizer state.
    ``zero_redundancy_optimizer`` does it by stages: 1 splits the optimizer state, 2
    also the gradients, 3 also the parameters. An array is split along the largest dim
    that nothing splits and that the axis divides; one without such a dim stays whole.
    In its body ``ts.mesh.current().rank`` is the rank of a parameter's owner: it equals
    every rank, so ``if rank == owner:`` is taken, and ``recv_from`` after ``else`` is
    not. ``expert_parallel`` splits the batch, and
    ``experts`` along their leading dim.

    ``tensor_parallel`` runs the body once for each device of the axes, on its blocks.
    Every array has to be annotated. A dim is split if none of its symbols appear in the
    first array, or in the one that ``batch`` names; of several such dims the first.
    ``3*F`` means three blocks, each of which is split separately. A result that differs
    from device to device is concatenated along its dim of that kind; the body calls
    collectives itself, and ``ts.mesh.current()`` is the mesh of the axes.

    ``pipeline_parallel`` runs the ``graph.stage`` s that the function calls on one
    device each, in the order 1f1b, in as many microbatches as
    ``schedule.pipeline_microbatches`` says. What has no rows is split like ``fsdp``'s
    parameters, and sent to the stage that reads it. ``batch`` or ``params`` declares
    which arguments have rows, as for ``graph.pipeline``, which takes more options.

    The mesh is that of ``ts.function`` (its ``mesh=``, the innermost that is open, or
    what the arguments live on); without any, every device there is along one axis.
    Called inside another function, this one becomes part of it: the layouts of arrays
    are then those of that function.

    The roles of arguments are inferred from the function, or declared by the keywords.
    ``ts.grad`` is taken by parameters; what a loss reads beside them is the batch, if
    it is one argument; what no loss reads is optimizer state, in whatever container.
    Without ``ts.grad``, parameters are the one argument that the results replace, as
    ``weights - rate * gradients`` replaces ``weights``, and what has their paths and
    shapes is optimizer state. An undecided role is an error. ``ts.grad`` by
    parameters gives gradients in their layout. A result with the tree and the shapes of
    an argument, or of a part of one, is laid out like it.

    Args:
      strategy: One of the names above.
      stage: Of ``zero_redundancy_optimizer``: 1, 2 or 3; 2 by default.
      mesh: As for ``ts.function``, where that does not declare it.
      mesh_axes: The axes to split over, the last of them for what is no batch and no
        expert. By default ``dp``, ``fsdp``, ``tp``, ``pp`` or ``ep``.
      params: Arguments that are parameters, by name, or paths in arguments:
        ``state/params``.
      gradients: ... that are gradients.
      optimizer_state: ... that are the optimizer's state.
      batch: ... that are the batch: its arrays have a row for each example.
      experts: Parameters whose leading dim counts experts, for ``expert_parallel``;
        optimizer state with their paths and shapes is split with them.

    Returns:
      A decorator that gives a ``ts.function``.

    Raises:
      StrategyError: [T313] there is no such strategy, stage or argument; at the call, a
        rank is used for something else than to find an owner, or a result differs from
        device to device unawares.
      UndecidedRoleError: [T324] (at the call) nothing decides what an argument is, or
        what a result replaces.
      UnknownAxisError: [T103] (at the call) the mesh lacks the axis.
      ShardDivisibilityError: [T201] (at the call) the axes do not divide a dim.
      LayoutMismatchError: [T205] (at the call) arrays live on the mesh in another
        layout.
      PipelineFormError: [T312] (at the call) the function is no chain of stages.
      PipelineSizeError: [T311] (at the call) it has not a stage for each device.

    Warns:
      TesseraWarning: (at the call) a large array cannot be split, and stays whole.

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
    zero_stage = _stage(strategy, fixed_stage, stage)
    roles = {PARAMS: params, GRADIENTS: gradients, STATE: optimizer_state, BATCH: batch}
    axes = tuple(mesh_axes) if mesh_axes is not None else (default_axis,)
    named = as_names(experts)
    if (strategy == "expert_parallel") != bool(named):
        raise StrategyError(
            "strategy 'expert_parallel' has to know which parameters are experts"
            if not named
            else f"strategy {strategy!r} splits no experts",
            got=f"experts={experts!r}",
            fix="say experts='weights/experts', whose arrays are [experts, in, out]"
            if not named
            else "use strategy='expert_parallel', or leave experts= out",
        )

    def decorate(body: Callable[..., Any]) -> Function:
        options, body = _undecorated(strategy, body)
        options = replace(options, mesh=one_of("mesh", as_mesh(mesh), options.mesh))
        settings: dict[str, Any] = {"name": strategy, "stage": zero_stage, "axes": axes}
        declared = _declared_roles(body, options.name, {**roles, "experts": named})
        plan: Strategy
        match strategy:
            case "tensor_parallel":
                settings["common"] = _common(declared)
                plan = TensorParallel(**settings, annotations=annotations_of(body))
                body = spmd_function(body, plan)
            case "expert_parallel":
                plan = ExpertParallel(**settings, declared=declared, experts=named)
            case "pipeline_parallel":
                plan = PipelineParallel(**settings, declared=declared)
                body = _pipelined(body, plan)
            case "zero_redundancy_optimizer":
                plan = Strategy(**settings, declared=declared)
                body = as_any_owner(body, plan)
            case _:
                plan = Strategy(**settings, declared=declared)
        return Function(body, replace(options, strategy=plan))

    return decorate


def _common(declared: Mapping[str, str]) -> str | None:
    """The argument whose dims are whole under ``tensor_parallel``, if declared."""
    if len(declared) <= 1 and set(declared.values()) <= {BATCH}:
        return next(iter(declared), None)
    raise StrategyError(
        "strategy 'tensor_parallel' goes by annotations, and by one array of the batch",
        got=", ".join(f"{path!r} is {role}" for path, role in declared.items()),
        fix="leave roles out; batch='x' names the array whose dims are whole, if it is "
        "not the first",
    )


def _pipelined(body: Callable[..., Any], plan: Strategy) -> Callable[..., Any]:
    rows = frozenset(name for name, role in plan.declared.items() if role == BATCH)
    weights = frozenset(plan.declared) - rows
    return pipeline_of_arguments(body, plan.axes[-1], rows or None, weights)


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
    if not isinstance(strategy, str):  # as DistributedDataParallel(model)
        raise StrategyError(
            "ts.distribute takes a strategy first, and then the function",
            got=f"{type(strategy).__name__} {getattr(strategy, '__name__', '')}",
            fix='ts.distribute("data_parallel")(step)',
        )
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


def _declared_roles(
    body: Callable[..., Any], name: str, roles: Mapping[str, Names]
) -> dict[str, str]:
    """The declared roles of arguments, or of parts of them, by path."""
    parameters = signature_of(body).parameters.values()
    arguments = [parameter.name for parameter in parameters]
    has_more = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters)
    declared: dict[str, str] = {}
    for role, names in roles.items():
        for path in as_names(names):
            if path.partition("/")[0] not in arguments and not has_more:
                raise StrategyError(
                    f"{name!r} has no argument {path!r}",
                    got=f"{role}={names!r}",
                    fix=did_you_mean(path, arguments),
                )
            if role in ROLES:
                declared[path] = role
    return declared
