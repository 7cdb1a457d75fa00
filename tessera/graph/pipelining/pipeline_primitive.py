# SPDX-License-Identifier: Apache-2.0
"""Defines the primitive that stands for a pipelined call in the traced step.

``pipeline`` takes the call's arguments, whole batches, and the weights that its stages
read, and returns whole batches. The pass ``schedule_pipelines`` replaces it by the
loop, together with the loss, if there is one.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tessera.errors import (
    OutsideTraceError,
    PipelineFormError,
    TesseraWarning,
    UndecidedRoleError,
)
from tessera.graph.pipelining.schedule_table import Schedule
from tessera.graph.pipelining.split_stages import StagedProgram
from tessera.graph.rewriting import contains
from tessera.jax_compat import jaxprs
from tessera.mesh import Mesh

# The name scope of the pipeline's SPMD region.
SCOPE: Final = "pipeline"

# The most paths that an error lists.
_LISTED: Final = 8

pipeline_p = jaxprs.Primitive("pipeline")
pipeline_p.multiple_results = True


@dataclass(frozen=True, eq=False)
class PipelineCall:
    """The parameters of a pipelined call's equation.

    The equation's inputs are the arguments that have the batch's rows, then everything
    else that the stages read. In a program of another number of rows there are no
    stages, and the inputs are all arguments, then what the function closes over.

    Attributes:
      number: The call's number among the step's pipelined calls.
      name: The function's name.
      schedule: The schedule of the stages.
      mesh: The mesh.
      axis: The pipeline's axis.
      results: The types of its results.
      staged: The stages' programs, for one device's part of a microbatch.
      rows: Rows of the whole batch.
      layouts: For each input that has no rows, its stored layout.
      data_axes: Axes along which each device has a pipeline for its part of the rows.
      mixes: What in the stages mixes rows; "" if nothing is known to.
      remat: The rematerialization policy of each stage.
    """

    number: int
    name: str
    schedule: Schedule
    mesh: Mesh
    axis: str
    results: tuple[Any, ...] = ()
    staged: StagedProgram | None = None
    rows: int = 0
    layouts: tuple[PartitionSpec, ...] = ()
    data_axes: tuple[str, ...] = ()
    mixes: str = ""
    remat: tuple[str, ...] = ()

    @property
    def stages(self) -> StagedProgram:
        """The stages' programs."""
        assert self.staged is not None, "traced for the whole batch"
        return self.staged

    @property
    def parts(self) -> int:
        """How many parts the rows are split into: a device's stage sees one."""
        return self.schedule.microbatches * self.mesh.axis_size(self.data_axes)

    def warn(self) -> None:
        """Warn if a stage mixes the rows of its microbatch.

        Warns:
          TesseraWarning: It does; with the line.
        """
        if self.mixes:
            warnings.warn(
                f"a stage of pipeline {self.name!r} sees one microbatch at a time, and "
                f"its rows are not independent: {self.mixes}",
                TesseraWarning,
                stacklevel=2,
            )

    def __repr__(self) -> str:
        """One line for the program's text."""
        return f"{self.schedule.summary()} over {self.axis!r}"


@pipeline_p.def_abstract_eval
def _abstract(*_: Any, call: PipelineCall) -> list[Any]:
    return list(call.results)


def _refuse(transform: str) -> NoReturn:
    raise OutsideTraceError(
        f"{transform} cannot look inside a pipeline",
        got=f"a pipelined function inside the function that {transform} is applied to",
        fix="take gradients with graph.backward or ts.grad in the step that calls it",
    )


jaxprs.refuse_transforms(pipeline_p, _refuse)


@pipeline_p.def_impl
def _refuse_eager(*_: Any, **__: Any) -> NoReturn:
    raise OutsideTraceError(
        "a pipeline is one compiled loop, and has no operations to run one by one",
        got="jax.disable_jit() around a call with a graph.pipeline",
        fix="leave jax.disable_jit() out, or call the stages without the pipeline",
    )


def bind(call: PipelineCall, arguments: Sequence[Any], weights: Sequence[Any]) -> Any:
    """Bind the primitive to a call's operands; returns its results."""
    return pipeline_p.bind(*arguments, *weights, call=call)


def has_pipeline(program: jaxprs.Program) -> bool:
    """Whether a program calls a pipelined function."""
    return contains(program, lambda equation: equation.primitive is pipeline_p)


def first_of(paths: Sequence[str]) -> str:
    """The first few of some paths, for an error."""
    return ", ".join(paths[:_LISTED]) + (", …" if len(paths) > _LISTED else "")


def undecided_rows(
    name: str, paths: Sequence[str], problem: str = ""
) -> UndecidedRoleError:
    """The error for a pipeline that does not say which of its arguments have rows.

    Args:
      name: The pipeline's.
      paths: Arguments that may have rows.
      problem: Why these cannot all have them; "" where nothing is declared.
    """
    listed = first_of(paths)
    return UndecidedRoleError(
        f"it is not decided which arguments of pipeline {name!r} have a row for each "
        "example",
        got=f"{listed}: {problem}" if problem else listed,
        fix="name those that have: batch=[...] of graph.pipeline or ts.distribute\n"
        "all others are replicated to every stage that reads them",
    )


def first_line(error: Exception) -> str:
    """The first line of an error that JAX raised, for the message of another one."""
    return str(error).partition("\n")[0]


def check_results(avals: Sequence[Any], rows: int) -> None:
    """Raise [T312] unless results have as many rows as the batch."""
    for aval in avals:
        is_float = jnp.issubdtype(aval.dtype, jnp.floating)
        if is_float and aval.shape and aval.shape[0] == rows:
            continue
        raise PipelineFormError(
            "a pipelined function returns a row for each row of its batch",
            got=f"{aval.dtype.name}{list(aval.shape)} for {rows} rows",
            fix="return floating-point arrays with the batch as leading dim, and "
            "reduce them in the step",
        )


def struct_of(leaf: Any, rows: int | None) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an argument, with another number of rows if given."""
    aval = jaxprs.struct(jax.typeof(leaf))
    shape = aval.shape if rows is None else (rows, *aval.shape[1:])
    return jax.ShapeDtypeStruct(shape, aval.dtype)
