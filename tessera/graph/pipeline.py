# SPDX-License-Identifier: Apache-2.0
"""``graph.pipeline``: a function whose stages run on different devices.

The function is written for one batch, as a chain of stages. In a step it runs in
microbatches, in the order of a schedule, together with the backward of the loss that
``graph.backward`` or ``ts.grad`` differentiates.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tessera import _jax, scope
from tessera.errors import NoMeshError, PipelineFormError, PipelineSizeError
from tessera.graph.differentiation import differentiated
from tessera.graph.pipelining.cutting import StagedProgram, cut, stage_end_p
from tessera.graph.pipelining.mark import PipelineCall, bind, struct_of
from tessera.graph.pipelining.microbatches import (
    check_batch,
    fewer_microbatches_warning,
)
from tessera.graph.pipelining.schedules import schedule as schedule_of
from tessera.graph.pipelining.table import Schedule
from tessera.graph.rewriting import contains
from tessera.graph.tracing.declarations import Options, is_number
from tessera.graph.training_step import Stage, Step
from tessera.graph.zero import split_further
from tessera.mesh import Mesh
from tessera.ops.layouts import layout_of
from tessera.shard import ShardSpec
from tessera.spec import axes_of_dims

# Weights are split over fsdp, too.
_ROWS_ALONE = ("dp",)


def pipeline(
    stages: Sequence[Stage],
    *,
    mesh: Mesh | None = None,
    axis: str = "pp",
    schedule: str | Schedule = "1f1b",
    microbatches: int | None = None,
) -> Callable[[Callable[..., Any]], Step]:
    """Run a chain of stages as a pipeline over a mesh axis.

    Each device holds the parameters of its own stages: stored in parts over the axis,
    they are sent to their stage once in a step. The mesh's other axes work inside the
    stages as they do outside. Arrays among the arguments whose leading dim is that of
    the first are split into microbatches, and along ``dp`` into a part of each for each
    device; the others are given to every stage whole.

    Args:
      stages: The stages in order, made by ``graph.stage``: as many as the axis has
        devices, or, for ``interleaved``, a multiple.
      mesh: The mesh; by default that of the step.
      axis: The mesh axis whose devices are the pipeline.
      schedule: ``1f1b``, ``gpipe``, ``interleaved``, ``zero_bubble``,
        ``zero_bubble_fused``, or a table of your own.
      microbatches: Equal parts of a batch. By default what
        ``schedule.pipeline_microbatches`` said, or else as many as there are stages.

    Returns:
      A decorator. The function calls each stage once, in order, and returns arrays that
      have a row for each row of the batch. It is called in a step, or by itself.

    Raises:
      UnknownAxisError: [T103] the mesh has no such axis.
      PipelineSizeError: [T311] stages, devices and schedule do not fit.
      PipelineFormError: [T312] (when traced) the function is no chain of the stages, or
        its loss cannot be computed microbatch by microbatch.
      BatchSizeError: [T503] (when traced) a batch is not divided by the microbatches.

    Sources: arXiv 1811.06965, 1806.03377, 2104.04473, 2401.10241.
    """
    names = tuple(map(_name, stages))
    wanted = _Pipeline(names, axis, schedule, microbatches)
    if mesh is not None:
        wanted.check(mesh)

    def decorate(body: Callable[..., Any]) -> Step:
        @functools.wraps(body)
        def piped(*args: Any, **kwargs: Any) -> Any:
            return wanted.call(body, mesh, args, kwargs)

        name = getattr(body, "__name__", "pipeline")
        return Step(piped, Options(name=name, mesh=mesh, split_batch=True))

    return decorate


def _name(stage: Stage) -> str:
    if isinstance(stage, Stage):
        return stage.options.name
    raise PipelineFormError(
        "a stage of a pipeline is made by graph.stage",
        got=f"{stage!r}",
        fix='write @graph.stage("name") above the function',
    )


class PipelineOfArguments:
    """A function whose weights are arguments, as a pipeline of the stages it calls."""

    def __init__(
        self, body: Callable[..., Any], axis: str, weights: Collection[str]
    ) -> None:
        functools.update_wrapper(self, body)
        self._body, self._axis, self._weights = body, axis, weights

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result.

        Raises:
          PipelineFormError: [T312] it is no chain of stages.
          PipelineSizeError: [T311] it has not as many stages as the axis has devices.
        """
        signature = inspect.signature(self._body)
        given = dict(signature.bind(*args, **kwargs).arguments)
        # Closed over, a weight belongs to the stage that reads it.
        held = {name: given[name] for name in given if name in self._weights}
        names = [name for name in given if name not in held]

        def of_rows(*values: Any) -> Any:
            arguments = held | dict(zip(names, values, strict=True))
            call = inspect.BoundArguments(signature, arguments)
            return scope.as_called(self._body)(*call.args, **call.kwargs)

        rows = [given[name] for name in names]
        stages = _stages_called(of_rows, rows)
        return _Pipeline(stages, self._axis, "1f1b", None).call(of_rows, None, rows, {})


def _stages_called(body: Callable[..., Any], args: Sequence[Any]) -> tuple[str, ...]:
    """The names of the stages that a function calls, in order; inner ones left out."""
    here = scope.current()
    assert here is not None, "a step is being traced"
    found: list[str] = []
    before, depth, end = here.mark(), len(here.path), here.stage_end

    def note(name: str, results: Any) -> Any:
        if len(here.path) == depth + 1:
            found.append(name)
        return results

    function = _OfArrays(body, *jax.tree.flatten((tuple(args), {})))
    here.stage_end = note
    try:
        jax.eval_shape(function, *(struct_of(array, None) for array in function.arrays))
    finally:
        here.stage_end = end
        here.go_back(before)
    return tuple(found)


@dataclass(frozen=True)
class _Pipeline:
    """What ``pipeline`` was told, its stages by name."""

    stages: tuple[str, ...]
    axis: str
    schedule: str | Schedule
    microbatches: int | None

    def check(self, mesh: Mesh) -> int:
        """Virtual stages for each device; raises [T103] and [T311]."""
        size = mesh.axis_size(self.axis)
        count = len(self.stages)
        is_interleaved = self.schedule == "interleaved" or (
            isinstance(self.schedule, Schedule) and self.schedule.chunks > 1
        )
        if count == size or (is_interleaved and count and count % size == 0):
            return count // size
        raise PipelineSizeError(
            f"the stages of a pipeline do not fit the devices of axis {self.axis!r}",
            got=f"{count} stages, {size} devices",
            fix=f"use {size} stages, or a multiple of {size} with "
            "schedule='interleaved', or another mesh",
        )

    def call(
        self, body: Callable[..., Any], mesh: Mesh | None, args: Any, kwargs: Any
    ) -> Any:
        """Trace the function for one microbatch, and mark where it was called."""
        here = scope.current()
        assert here is not None, "a step is being traced"
        mesh = mesh or here.mesh
        if mesh is None:
            raise NoMeshError(
                "a pipeline needs a mesh",
                fix="pass mesh= to graph.pipeline, or call the step in 'with mesh:'",
            )
        chunks = self.check(mesh)
        function = _OfArrays(body, *jax.tree.flatten((args, kwargs)))
        arrays = function.arrays
        order = self._schedule(mesh, chunks, here)
        rows, by_row = self._rows(arrays, order, here)

        def traced(axes: tuple[str, ...]) -> tuple[StagedProgram, list[Any]]:
            part = rows // (order.microbatches * mesh.axis_size(axes))
            structs = [
                struct_of(array, part if row else None)
                for array, row in zip(arrays, by_row, strict=True)
            ]
            with self._telling_stages_apart(here, mesh):
                found = jax.make_jaxpr(function)(*structs)
            program, weights = _jax.lift_constants(found)
            staged = cut(differentiated(program), len(arrays), self.stages)
            _check_results(staged, part)
            return staged, weights

        data_axes, before = self._data_axes(mesh, rows, order), here.mark()
        staged, weights = traced(data_axes)
        layouts = tuple(map(_layout, weights))
        if data_axes and _is_for_all_rows(staged, layouts, data_axes):
            here.go_back(before)
            data_axes = ()
            staged, weights = traced(data_axes)
        call = PipelineCall(
            staged=staged,
            schedule=order,
            mesh=mesh,
            axis=self.axis,
            rows=rows,
            by_row=by_row,
            layouts=layouts,
            is_part=here.row_parts is not None,
            data_axes=data_axes,
        )
        return jax.tree.unflatten(function.results, bind(call, arrays, weights))

    def _data_axes(self, mesh: Mesh, rows: int, order: Schedule) -> tuple[str, ...]:
        """Axes that divide each microbatch's rows, and split nothing else."""
        axes = tuple(a for a in _ROWS_ALONE if a in mesh.axes and a != self.axis)
        parts = mesh.axis_size(axes)
        is_divided = parts > 1 and rows % (order.microbatches * parts) == 0
        return axes if is_divided else ()

    def _schedule(self, mesh: Mesh, chunks: int, here: scope.Scope) -> Schedule:
        if isinstance(self.schedule, Schedule):
            return self.schedule
        size = mesh.axis_size(self.axis)
        count = self.microbatches or here.plan.microbatches or size
        given = chunks if self.schedule == "interleaved" else None
        order = schedule_of(self.schedule, size, count, given)
        if here.row_parts is not None:  # which a step is traced for once
            fewer_microbatches_warning(order)
        return order

    def _rows(
        self, arrays: Sequence[Any], order: Schedule, here: scope.Scope
    ) -> tuple[int, tuple[bool, ...]]:
        """Rows of the whole batch, and which arguments have them."""
        given = next((array.shape[0] for array in arrays if array.ndim), None)
        if given is None:
            raise PipelineFormError(
                "a pipeline has no batch to cut into microbatches",
                got=f"arguments {', '.join(str(jax.typeof(a)) for a in arrays)}",
                fix="pass an array whose leading dim counts the rows of the batch",
            )
        by_row = tuple(array.ndim > 0 and array.shape[0] == given for array in arrays)
        if here.row_parts is not None:
            return given * here.row_parts, by_row
        check_batch(given, order.microbatches)
        return given, by_row

    @contextmanager
    def _telling_stages_apart(self, here: scope.Scope, mesh: Mesh) -> Iterator[None]:
        """Let stages mark their results, and parameters be stored over the axis."""
        names = self.stages

        def end(name: str, results: Any) -> Any:
            if name not in names:
                return results
            leaves, tree = jax.tree.flatten(results)
            marked = stage_end_p.bind(*leaves, stage=names.index(name))
            return jax.tree.unflatten(tree, marked)

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


class _OfArrays:
    """A function with its arguments, as one of the arrays among them.

    Attributes:
      arrays: These arrays.
      results: The tree of what it returned when it was called last.
    """

    def __init__(self, body: Callable[..., Any], leaves: list[Any], tree: Any) -> None:
        self._body, self._leaves, self._tree = body, leaves, tree
        self._places = [i for i, leaf in enumerate(leaves) if is_number(leaf)]
        self.arrays = [jnp.asarray(leaves[i]) for i in self._places]
        self.results: Any = None

    def __call__(self, *arrays: Any) -> list[Any]:
        given = list(self._leaves)
        for place, array in zip(self._places, arrays, strict=True):
            given[place] = array
        args, kwargs = jax.tree.unflatten(self._tree, given)
        found, self.results = jax.tree.flatten(self._body(*args, **kwargs))
        return [jnp.asarray(leaf) for leaf in found]


def _check_results(staged: StagedProgram, rows: int) -> None:
    for atom in _jax.outputs(staged.program):
        aval = atom.aval
        is_float = jnp.issubdtype(aval.dtype, jnp.floating)
        if is_float and aval.shape and aval.shape[0] == rows:
            continue
        raise PipelineFormError(
            "a pipelined function returns a row for each row of its batch",
            got=f"{aval.dtype.name}{list(aval.shape)} for a microbatch of {rows} rows",
            fix="return floating-point arrays with the batch as leading dim, and "
            "reduce them in the step",
        )


def _is_for_all_rows(
    staged: StagedProgram, layouts: Sequence[PartitionSpec], axes: Sequence[str]
) -> bool:
    """Whether stages have to do with a data axis: in weights' layouts, in kernels."""
    if contains(staged.program, lambda equation, _: _jax.is_manual_region(equation)):
        return True
    named = {a for spec in layouts for names in axes_of_dims(spec, 0) for a in names}
    return not named.isdisjoint(axes)


def _layout(weight: Any) -> PartitionSpec:
    known = layout_of(weight)
    return PartitionSpec() if known is None else known[1]
