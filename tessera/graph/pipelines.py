# SPDX-License-Identifier: Apache-2.0
"""Implements ``graph.pipeline``: a function whose stages run on different devices.

The function is written for one batch, as a chain of stages. In a step it runs in
microbatches, in the order of a schedule, together with the backward of the loss that
``graph.backward`` or ``ts.grad`` differentiates.
"""

import functools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp

from tessera.annotations import argument_names, signature_of
from tessera.errors import (
    NoMeshError,
    PipelineFormError,
    PipelineSizeError,
    SettingConflictError,
    SettingValueError,
    UndecidedRoleError,
    WriteBackError,
    did_you_mean,
)
from tessera.foundations.tree import is_childless, partition
from tessera.graph.pipelining.named_schedules import schedule as schedule_of
from tessera.graph.pipelining.pipeline_call import SplitCall, bind_unsplit
from tessera.graph.pipelining.pipeline_primitive import (
    PipelineCall,
    struct_of,
    undecided_rows,
)
from tessera.graph.pipelining.schedule_table import Schedule
from tessera.graph.pipelining.split_stages import stage_end_p
from tessera.graph.tracer.arguments import as_names, is_in
from tessera.graph.tracer.declared_layouts import Options, is_number
from tessera.graph.training_steps import Stage, Step
from tessera.graph.zero_layouts import split_further
from tessera.mesh import AnyMesh, Mesh, as_mesh
from tessera.ops.rematerialization import NAMED, rule_of
from tessera.shard import ShardSpec
from tessera.tracing import scope


def pipeline(
    stages: Sequence[Stage],
    *,
    mesh: AnyMesh | None = None,
    axis: str = "pp",
    schedule: str | Schedule = "1f1b",
    microbatches: int | None = None,
    batch: str | Collection[str] | None = None,
    remat: str | Sequence[str] = NAMED,
) -> Callable[[Callable[..., Any]], Step]:
    """Run a chain of stages as a pipeline over a mesh axis.

    Parameters are sharded over the axis, and sent to the device of their stage once in
    a step. The mesh's other axes work inside the stages as they do outside. Arguments
    that have a row for each example are split into microbatches, and each microbatch
    over ``dp``; others, and what the function closes over, are replicated to every
    stage that reads them.

    ``batch`` declares which arguments have rows. A function whose arguments hold one
    array, beside scalars, needs no declaration: that array has them.

    Args:
      stages: The stages in order, made by ``graph.stage``: as many as the axis has
        devices; for ``interleaved`` a multiple, and for ``dualpipev`` twice as many.
      mesh: The mesh; by default that of the step.
      axis: The mesh axis whose devices are the pipeline.
      schedule: ``1f1b``, ``gpipe``, ``interleaved``, ``zero_bubble``, ``dualpipev``,
        or a table of your own.
      microbatches: Equal parts of a batch. By default those of
        ``schedule.pipeline_microbatches``, or else as many as there are stages.
      batch: The function's arguments that have a row for each example along their
        leading dim, by name, or paths of arrays inside of them: ``inputs/tokens``.
      remat: What a stage's forward stores for its backward, one policy for all stages
        or one for each, as in ``ts.remat``: ``named``, what ``checkpoint_name`` names,
        or in a stage without names what ``dots`` does; ``dots``, the results of
        matmuls; ``none``, all that is not quick to compute again; ``full``, its input:
        the backward runs the stage again. What a stage rematerializes itself is never
        stored, nor what depends on weights and other arrays without rows alone.

    Returns:
      A decorator. The function calls each stage once, in order, and returns arrays that
      have a row for each row of the batch. It is called in a step, or by itself.

    Raises:
      UnknownAxisError: [T103] the mesh has no such axis.
      PipelineSizeError: [T311] stages, devices and schedule do not fit.
      PipelineFormError: [T312] (when traced) the function is no chain of the stages, or
        its loss cannot be computed microbatch by microbatch.
      UndecidedRoleError: [T324] ``batch`` names no argument; (when traced) there are
        several arrays, and it does not say which of them have rows.
      SettingValueError: [T502] a policy of ``remat`` does not exist, or there is not
        one for each stage.
      BatchSizeError: [T503] (when traced) a batch is not divided by the microbatches.

    Warns:
      TesseraWarning: (when traced) a stage mixes the rows of its microbatch.

    Sources: arXiv 1811.06965, 1806.03377, 2104.04473, 2401.10241, 2412.19437.
    """
    mesh = as_mesh(mesh)
    names = tuple(map(_name, stages))
    rows = None if batch is None else frozenset(as_names(batch))
    policies = _policies(remat, len(names))
    config = _PipelineConfig(names, axis, schedule, microbatches, rows, policies)
    if mesh is not None:
        config.check(mesh, names)

    def decorate(body: Callable[..., Any]) -> Step:
        @functools.wraps(body)
        def piped(*args: Any, **kwargs: Any) -> Any:
            return config.call(body, mesh, args, kwargs)

        name = getattr(body, "__name__", "pipeline")
        options = Options(name=name, mesh=mesh, split_batch=True, batch=rows)
        return Step(piped, options)

    return decorate


def _name(stage: Stage) -> str:
    if isinstance(stage, Stage):
        return stage.options.name
    raise PipelineFormError(
        "a stage of a pipeline is made by graph.stage",
        got=f"{stage!r}",
        fix='write @graph.stage("name") above the function',
    )


def _policies(remat: str | Sequence[str], count: int) -> tuple[str, ...]:
    """One policy for each stage."""
    policies = (remat,) * count if isinstance(remat, str) else tuple(remat)
    for policy in policies:
        rule_of(policy)
    if len(policies) == count:
        return policies
    raise SettingValueError(
        "a list of remat policies needs one for each stage",
        got=f"remat={list(policies)}: {len(policies)} policies, {count} stages",
        fix=f"give {count}, or one name for all stages",
    )


def pipeline_of_arguments(
    body: Callable[..., Any],
    axis: str,
    batch: frozenset[str] | None,
    weights: frozenset[str],
) -> Callable[..., Any]:
    """A function whose weights are arguments, as a pipeline of the stages it calls.

    Args:
      body: The function.
      axis: The mesh axis whose devices are the pipeline.
      batch: Arguments that have rows; None if none are declared.
      weights: Arguments that are replicated.

    Raises:
      PipelineFormError: [T312] (at the call) it is no chain of stages.
      PipelineSizeError: [T311] (at the call) it has not as many stages as the axis has
        devices.
      UndecidedRoleError: [T324] (at the call) it is not declared which arguments have
        rows.
    """
    config = _PipelineConfig(None, axis, "1f1b", None, batch, weights=weights)

    @functools.wraps(body)
    def piped(*args: Any, **kwargs: Any) -> Any:
        return config.call(scope.resolve_callee(body), None, args, kwargs)

    return piped


def _stages_called(function: "_ArrayFunction", here: scope.Scope) -> tuple[str, ...]:
    """The names of the stages that a function calls, in order; inner ones left out."""
    called: list[str] = []
    before, depth, end = here.snapshot(), len(here.path), here.stage_end

    def note(name: str, results: Any) -> Any:
        if len(here.path) == depth + 1:
            called.append(name)
        return results

    here.stage_end = note
    try:
        jax.eval_shape(function, *(struct_of(array, None) for array in function.arrays))
    finally:
        here.stage_end = end
        here.restore(before)
    return tuple(called)


@dataclass(frozen=True)
class _PipelineConfig:
    """The arguments of ``pipeline``.

    Attributes:
      stages: Its stages by name; None for those that the function calls.
      batch: Arguments that have rows, all others being replicated; None if undeclared.
      remat: The policy of each stage; none given is ``named`` for all.
      weights: Arguments that are replicated.
    """

    stages: tuple[str, ...] | None
    axis: str
    schedule: str | Schedule
    microbatches: int | None
    batch: frozenset[str] | None = None
    remat: tuple[str, ...] = ()
    weights: frozenset[str] = frozenset()

    def check(self, mesh: Mesh, stages: Sequence[str]) -> int:
        """Virtual stages for each device; raises [T103] and [T311]."""
        size, count, table = mesh.axis_size(self.axis), len(stages), self.schedule
        if isinstance(table, Schedule):
            fits = (table.stages, table.virtual_stages) == (size, count)
            needs = f"{table.virtual_stages} stages on {table.stages} devices"
        elif table == "dualpipev":
            fits, needs = count == 2 * size, f"{2 * size} stages"
        else:
            is_multiple = bool(count) and count % size == 0
            fits = count == size or (table == "interleaved" and is_multiple)
            needs = f"{size} stages, or a multiple of {size} with "
            needs += "schedule='interleaved'"
        if fits:
            return count // size
        raise PipelineSizeError(
            f"the stages of a pipeline do not fit the devices of axis {self.axis!r}",
            got=f"{count} stages, {size} devices",
            fix=f"use {needs}, or another mesh",
        )

    def call(
        self, body: Callable[..., Any], mesh: Mesh | None, args: Any, kwargs: Any
    ) -> Any:
        """Trace the function for one microbatch, and bind the pipeline primitive."""
        here = scope.current()
        assert here is not None, "a step is being traced"
        if here.plan.rounds_alike:
            raise SettingConflictError(
                "a pipeline sums in an order that depends on the mesh, and a step with "
                "deterministic numerics in none that does",
                got=f"pipeline {getattr(body, '__name__', 'pipeline')!r}",
                fix="call the stages without a pipeline, or set training.numerics=fast",
            )
        mesh = mesh or here.mesh
        if mesh is None:
            raise NoMeshError(
                "a pipeline needs a mesh",
                fix="pass mesh= to graph.pipeline, or call the step in 'with mesh:'",
            )
        function = _ArrayFunction(body, args, kwargs)
        name, number = getattr(body, "__name__", "pipeline"), len(here.pipelined)
        by_row = self._by_row(function, name)
        data = compress(function.arrays, by_row)
        here.pipelined.append(frozenset(array.shape[0] for array in data))
        stages = self.stages
        if stages is None:
            stages = _stages_called(function, here)
        call = PipelineCall(
            number=number,
            name=name,
            schedule=self._schedule(mesh, self.check(mesh, stages), here),
            mesh=mesh,
            axis=self.axis,
            remat=self.remat or (NAMED,) * len(stages),
        )
        with self._tracing_stages(here, mesh, stages):
            if here.is_whole_batch:
                results = SplitCall(function, by_row, call, stages, here).bind()
            else:
                results = bind_unsplit(function, call)
        return jax.tree.unflatten(function.results, results)

    def _by_row(self, function: "_ArrayFunction", name: str) -> tuple[bool, ...]:
        """Which arguments have rows: those declared, or the only array."""
        paths, batch = function.paths, self.batch
        is_array = [array.ndim > 0 for array in function.arrays]
        if batch is None:
            arrays = compress(paths, is_array)
            batch = frozenset(path for path in arrays if not is_in(path, self.weights))
            if len(batch) > 1:
                raise undecided_rows(name, [path for path in paths if path in batch])
        pairs = zip(paths, is_array, strict=True)
        by_row = tuple(is_one and is_in(path, batch) for path, is_one in pairs)
        known = [*compress(paths, by_row), *function.empty]
        for declared in batch:
            if not any(is_in(path, (declared,)) for path in known):
                raise _no_argument(declared, paths)
        if not any(by_row):
            raise PipelineFormError(
                "a pipeline has no batch to split into microbatches",
                got="arguments "
                + ", ".join(str(jax.typeof(a)) for a in function.arrays),
                fix="pass an array whose leading dim counts the rows of the batch",
            )
        return by_row

    def _schedule(self, mesh: Mesh, chunks: int, here: scope.Scope) -> Schedule:
        if isinstance(self.schedule, Schedule):
            return self.schedule
        size = mesh.axis_size(self.axis)
        count = self.microbatches or here.plan.microbatches or size
        is_chunked = self.schedule == "interleaved"
        return schedule_of(self.schedule, size, count, chunks if is_chunked else None)

    @contextmanager
    def _tracing_stages(
        self, here: scope.Scope, mesh: Mesh, names: Sequence[str]
    ) -> Iterator[None]:
        """Let stages mark their ends, and parameters be sharded over the axis."""

        def end(name: str, results: Any) -> Any:
            if name not in names:
                return results
            leaves, tree = jax.tree.flatten(results)
            ended = stage_end_p.bind(*leaves, stage=names.index(name))
            return jax.tree.unflatten(tree, ended)

        def stored(shape: tuple[int, ...], layout: ShardSpec | None) -> ShardSpec:
            spec = (layout or ShardSpec.replicated()).resolve(shape, mesh)
            spec = split_further(spec, shape, mesh, self.axis)
            return ShardSpec(tuple(range(len(spec))), tuple(spec))

        before = (here.stage_end, here.stored, here.mesh)
        here.stage_end, here.stored, here.mesh = end, stored, mesh
        try:
            yield
        finally:
            here.stage_end, here.stored, here.mesh = before


class _ArrayFunction:
    """A function with its arguments, as a function of the arrays among them.

    Attributes:
      arrays: These arrays.
      paths: Their paths in the arguments.
      empty: The paths of what else is there, such as None.
      results: The tree of the results of its last call.
    """

    def __init__(
        self, body: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self._body = body
        names = argument_names(signature_of(body), len(args))
        arguments = (tuple(args), dict(kwargs))
        arrays, self._rest = partition(arguments, is_number)
        self.arrays = list(map(jnp.asarray, arrays))
        nodes, _ = jax.tree_util.tree_flatten_with_path(arguments, is_childless)
        self.paths = tuple(_path(names, path) for path, x in nodes if is_number(x))
        others = [path for path, x in nodes if len(path) > 1 and not is_number(x)]
        self.empty = [_path(names, path) for path in others]
        self.results: Any = None

    def __call__(self, *arrays: Any) -> list[Any]:
        args, kwargs = self._rest.combine(arrays)
        before = jax.tree.leaves((args, kwargs))
        results, self.results = jax.tree.flatten(self._body(*args, **kwargs))
        now, tree = jax.tree.flatten((args, kwargs))
        if tree != self._rest.structure or not all(map(operator.is_, now, before)):
            raise self._changed(now, arrays)
        return [jnp.asarray(leaf) for leaf in results]

    def _changed(self, now: Sequence[Any], arrays: Sequence[Any]) -> WriteBackError:
        count, statics = self._rest.structure.num_leaves, self._rest.statics
        indices = [i for i in range(count) if i not in statics]
        known = zip(self.paths, indices, arrays, strict=True)
        names = [path for path, i, x in known if i >= len(now) or now[i] is not x]
        name = getattr(self._body, "__name__", "pipeline")
        return WriteBackError(
            f"the pipelined function {name!r} changes its arguments, which cannot be "
            "given back",
            got=f"another value of {names[0]!r}" if names else "another tree of them",
            fix="in a stage of a pipeline return what is new",
        )


def _path(names: Sequence[str], path: tuple[Any, ...]) -> str:
    """The name of an array of the arguments, from its path in ``(args, kwargs)``."""
    kind, first, *inner = path
    label = names[first.idx] if kind.idx == 0 else first.key
    rest = jax.tree_util.keystr(tuple(inner), simple=True, separator="/")
    return f"{label}/{rest}" if rest else label


def _no_argument(name: str, names: Sequence[str]) -> UndecidedRoleError:
    return UndecidedRoleError(
        f"a pipeline has no array {name!r} among its arguments to take for its batch",
        fix=did_you_mean(name, names),
    )
