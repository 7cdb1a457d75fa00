# SPDX-License-Identifier: Apache-2.0
"""Runs the passes over a graph, in the order of one tuple, and verifies changes."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, TypeAlias

from tessera.errors import UnknownPassError, did_you_mean
from tessera.graph.ir import Graph, verify
from tessera.graph.passes.assign_output_layouts import assign_output_layouts
from tessera.graph.passes.autocast import autocast
from tessera.graph.passes.differentiate_losses import differentiate_losses
from tessera.graph.passes.orient_matmuls import orient_matmuls
from tessera.graph.passes.schedule_pipelines import schedule_pipelines
from tessera.graph.passes.widen_sums import widen_sums
from tessera.graph.program_diff import diff_programs

Pass: TypeAlias = Callable[[Graph], Graph]

# Pipelines come first: differentiation then sees the loop's loss and not its inside.
# Passes over matmuls come after differentiation, to see those of the backward pass.
PASSES: Final[tuple[Pass, ...]] = (
    schedule_pipelines,
    differentiate_losses,
    autocast,
    widen_sums,
    orient_matmuls,
    assign_output_layouts,
)


# Passes that rewrite ordinary code for the sake of one backend.
BACKEND_PASSES: Final = ("orient_matmuls",)


@dataclass(frozen=True)
class PassRecord:
    """What one pass did to one graph.

    Attributes:
      name: The pass; ``trace`` for the graph that the passes were given.
      graph: The graph after it.
      seconds: Wall time of the pass.
      skipped: Whether it was skipped by name.
    """

    name: str
    graph: Graph
    seconds: float = 0.0
    skipped: bool = False

    def diff(self, before: Graph) -> str:
        """The lines that the pass changed, as a unified diff; empty if none."""
        return diff_programs(before.as_text(), self.graph.as_text(), name=self.name)


def run_passes(graph: Graph, *, skip: Collection[str] = ()) -> tuple[PassRecord, ...]:
    """Run every pass in order, and verify the graph after each that changes it.

    Args:
      graph: The traced graph.
      skip: Names of passes to leave out.

    Returns:
      The input graph as ``trace``, then one record for each pass.

    Raises:
      UnknownPassError: [T307] ``skip`` names a pass that does not exist.
    """
    check_names(skip)
    verify(graph)
    records = [PassRecord("trace", graph)]
    for apply in PASSES:
        name = apply.__name__
        if name in skip:
            records.append(PassRecord(name, graph, skipped=True))
            continue
        start = time.perf_counter()
        before, graph = graph, apply(graph)
        record = PassRecord(name, graph, time.perf_counter() - start)
        try:
            if graph is not before:
                verify(graph)
        except Exception as error:
            error.add_note(f"the graph was well formed before the pass {name!r}")
            raise
        records.append(record)
    return tuple(records)


def check_names(skip: Collection[str]) -> None:
    """Raise [T307] for a name that no pass has."""
    names = [apply.__name__ for apply in PASSES]
    for name in skip:
        if name not in names:
            raise UnknownPassError(
                f"there is no pass {name!r} to skip", fix=did_you_mean(name, names)
            )
