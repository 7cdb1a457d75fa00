# SPDX-License-Identifier: Apache-2.0
"""A pipelined call as one equation of the traced step.

``pipeline`` takes the call's arguments, whole batches, and the weights that its stages
read, and gives whole batches. The pass ``schedule_pipelines`` puts the loop in its
place, together with the loss, where there is one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import jax
from jax.sharding import PartitionSpec

from tessera import _jax
from tessera.errors import OutsideTraceError
from tessera.graph.pipelining.cutting import StagedProgram
from tessera.graph.pipelining.table import Schedule
from tessera.mesh import Mesh

# The name scope of everything that a pipeline's devices do.
SCOPE: Final = "pipeline"

pipeline_p = _jax.Primitive("pipeline")
pipeline_p.multiple_results = True


@dataclass(frozen=True, eq=False)
class PipelineCall:
    """What is to be run where the mark stands.

    Attributes:
      staged: The stages' programs, for what one device has of a microbatch.
      schedule: Their order.
      mesh: Where they run.
      axis: The pipeline's axis.
      rows: Rows of the whole batch.
      by_row: For each argument, whether its leading dim counts rows.
      layouts: For each weight, how it is stored.
      is_part: Whether the arguments are one part of the rows already.
      data_axes: Axes along which there is a pipeline for each part of the rows.
    """

    staged: StagedProgram
    schedule: Schedule
    mesh: Mesh
    axis: str
    rows: int
    by_row: tuple[bool, ...]
    layouts: tuple[PartitionSpec, ...]
    is_part: bool
    data_axes: tuple[str, ...] = ()

    @property
    def parts(self) -> int:
        """Into how many the rows are cut: what one device's stage sees is one."""
        return self.schedule.microbatches * self.mesh.axis_size(self.data_axes)

    def __repr__(self) -> str:
        """One line for the program's text."""
        return f"{self.schedule.summary()} over {self.axis!r}"


@pipeline_p.def_abstract_eval
def _abstract(*_: Any, call: PipelineCall) -> list[Any]:
    given = call.rows // call.parts if call.is_part else call.rows
    avals = [atom.aval for atom in _jax.outputs(call.staged.program)]
    return [aval.update(shape=(given, *aval.shape[1:])) for aval in avals]


def _refuse(transform: str) -> NoReturn:
    raise OutsideTraceError(
        f"{transform} cannot look inside a pipeline",
        got=f"a pipelined function inside the function that {transform} is applied to",
        fix="take gradients with graph.backward or ts.grad in the step that calls it",
    )


_jax.refuse_transforms(pipeline_p, _refuse)


def bind(call: PipelineCall, arguments: Sequence[Any], weights: Sequence[Any]) -> Any:
    """The call's results, as traced values."""
    return pipeline_p.bind(*arguments, *weights, call=call)


def struct_of(leaf: Any, rows: int | None) -> jax.ShapeDtypeStruct:
    """The form of an argument, with another number of rows where one is given."""
    aval = _jax.struct(jax.typeof(leaf))
    shape = aval.shape if rows is None else (rows, *aval.shape[1:])
    return jax.ShapeDtypeStruct(shape, aval.dtype)
