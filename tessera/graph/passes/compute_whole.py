# SPDX-License-Identifier: Apache-2.0
"""Compute a deterministic step whole on every device."""

from typing import Any, Final

import jax
from jax.sharding import PartitionSpec

from tessera.errors import SettingConflictError
from tessera.graph.ir import Graph
from tessera.jax_compat import jaxprs
from tessera.ops.deterministic_sums import optimization_barrier
from tessera.ops.operand_layouts import region_mesh

# What divides a computation over a mesh.
_DIVIDES: Final = ("shard_map", "sharding_constraint", "reshard")


def compute_whole(graph: Graph) -> Graph:
    """Let every device compute all of a deterministic step. Numerics: exact.

    Inputs are gathered before it, and each device keeps its blocks of the results. What
    is between is compiled alike on every mesh.

    Before:  y = dot_general x w
    After:   y = shard_map[in_specs=P(), P()] { y = cond _ { y = dot_general x w } } x w

    Raises:
      SettingConflictError: [T507] the step divides a computation itself.
    """
    if not graph.is_deterministic:
        return graph
    _refuse_division(graph.program)
    if not any(value.aval.size for value in graph.inputs):
        raise SettingConflictError(
            "with deterministic numerics a function has an array to compute from",
            got=f"{graph.name!r}, whose result is constant",
            fix="pass it an array, or leave numerics fast",
        )

    def replay(*arrays: Any) -> list[Any]:
        return jaxprs.replay(graph.program, *arrays)

    def whole(*arrays: Any) -> list[Any]:
        return optimization_barrier(replay, *arrays)

    if graph.mesh is not None:
        whole = jax.shard_map(
            whole,
            mesh=region_mesh(graph.mesh),
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    return graph.with_program(jaxprs.retrace(whole, graph.program))


def _refuse_division(program: jaxprs.Program) -> None:
    for equation in jaxprs.equations(program):
        if equation.primitive.name in _DIVIDES:
            raise SettingConflictError(
                "with deterministic numerics every device computes all of a function, "
                "which can divide nothing over a mesh itself",
                got=f"{equation.primitive.name} at {jaxprs.source_line(equation)}",
                fix="declare layouts of arguments and results alone (in_specs, "
                "out_specs), or leave numerics fast",
            )
        for inner in jaxprs.inner_programs(equation):
            _refuse_division(inner)
