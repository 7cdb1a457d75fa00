# SPDX-License-Identifier: Apache-2.0
"""``Legality``: rejects layouts by the checks of a run, before anything is predicted.

A search asks for tens of thousands of layouts, so each check is made once for all
layouts that it cannot tell apart.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from tessera.errors import TesseraError
from tessera.train.config.layout_checks import (
    LARGEST_TABLE,
    model_problems,
    parameter_problems,
    schedule_problems,
)
from tessera.train.config.run_config import Config, data_parallel_groups
from tessera.train.config.settings_checks import batch_problems, value_problems
from tessera.train.planner.layout import Layout
from tessera.train.planner.lockstep import is_simple
from tessera.train.planner.search_space import REMAT

# Axes that shard no parameter.
_OF_ACTIVATIONS: Final = ("dp", "cp")


class Legality:
    """Says why a run with a layout would be refused.

    Args:
      config: The settings of the run; those that a layout has do not matter.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self._found = dict[str, TesseraError | None]()

    def problem(self, layout: Layout) -> TesseraError | None:
        """Why a run with this layout would be refused; None if it would not."""
        problem = (
            self._settings_problem(layout)
            or self.model_problem(layout)
            or self.parameter_problem(layout)
        )
        if problem is None and layout.schedule:
            stages, count = layout.sizes["pp"], layout.microbatches
            read = layout.schedule, layout.chunks, stages, count
            if stages * count > LARGEST_TABLE or not is_simple(*read):
                problem = self._first(schedule_problems, layout, *read)
        return problem

    def model_problem(self, layout: Layout) -> TesseraError | None:
        """Why the model cannot be computed so, whatever its microbatches."""
        # The policies of the planner apply to all layers, so none is a mistake; the
        # default is none for models without layers, too.
        plain = Layout(
            layout.mesh,
            1,
            1,
            remat="named" if layout.remat in REMAT else layout.remat,
            chunks=layout.chunks,
            sequence_parallel=layout.sequence_parallel,
        )
        return self._first(model_problems, plain)

    def parameter_problem(self, layout: Layout) -> TesseraError | None:
        """Why the parameters cannot be stored so."""
        mesh = tuple(axis for axis in layout.mesh if axis[0] not in _OF_ACTIVATIONS)
        stored = Layout(mesh or (("fsdp", 1),), 1, 1, chunks=layout.chunks)
        return self._first(parameter_problems, stored)

    def _settings_problem(self, layout: Layout) -> TesseraError | None:
        """What ``settings_checks`` finds, which reads few of the sizes of a mesh."""
        splits = tuple((name, size > 1) for name, size in layout.mesh)
        groups, count = data_parallel_groups(layout.sizes), layout.microbatches
        rows = layout.num_devices, groups, layout.micro_batch_size, count
        others = replace(layout, mesh=(), micro_batch_size=1, microbatches=1)
        return self._first(batch_problems, layout, splits, rows) or self._first(
            value_problems, layout, splits, others
        )

    def _first(
        self,
        problems: Callable[[Config], Iterable[TesseraError]],
        layout: Layout,
        *read: object,
    ) -> TesseraError | None:
        """The first problem of a layout, found once for all that are alike.

        Args:
          problems: A check of a run.
          layout: The layout.
          *read: What the check reads of it; nothing means all.
        """
        key = f"{problems.__name__} {read or layout}"
        if key not in self._found:
            found = iter(problems(layout.applied(self.config)))
            self._found[key] = next(found, None)
        return self._found[key]
