# SPDX-License-Identifier: Apache-2.0
"""``Legality``: rejects layouts by the checks of a run, before anything is predicted.

A search asks for tens of thousands of layouts, so each check is made once for all
layouts that it cannot tell apart.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Final

from tessera.errors import TesseraError
from tessera.mesh import Mesh
from tessera.train.config.batch_sizes import with_batch_sizes
from tessera.train.config.config import Config, data_parallel_groups
from tessera.train.config.layout_checks import (
    build_model,
    check_table_size,
    model_problems,
)
from tessera.train.config.settings_checks import check
from tessera.train.planner.layout import Layout
from tessera.train.planner.space import Sizes
from tessera.train.planner.step_time import POLICIES

# Axes that shard no parameter.
_OF_ACTIVATIONS: Final = ("dp", "cp")


class Legality:
    """Says why a run with a layout would be refused.

    Args:
      config: The settings of the run; those that a layout has do not matter.
      global_batch_size: Sequences of a step.
      schedule: Makes the schedule of a layout with a pipeline, or raises T311.
    """

    def __init__(
        self,
        config: Config,
        global_batch_size: int,
        schedule: Callable[[Layout], object],
    ) -> None:
        self.config = config
        self.global_batch_size = global_batch_size
        self._schedule = schedule
        self._found = dict[Hashable, TesseraError | None]()

    def of_mesh(self, mesh: Sizes) -> TesseraError | None:
        """Why no layout has this mesh; None if one may."""
        total = self.global_batch_size
        training = replace(self.config.training, global_batch_size=total)
        try:
            with_batch_sizes(replace(self.config, training=training), dict(mesh))
        except TesseraError as error:
            return error
        return self._model_problem(Layout(mesh, 1, 1))

    def problem(self, layout: Layout) -> TesseraError | None:
        """Why a run with this layout would be refused; None if it would not.

        Args:
          layout: One whose microbatches make the global batch.
        """
        return (
            self._settings_problem(layout)
            or self._model_problem(layout)
            or self._schedule_problem(layout)
        )

    def _settings_problem(self, layout: Layout) -> TesseraError | None:
        """What ``settings_checks`` finds, which reads few of the sizes of a mesh."""
        sizes = tuple((name, size > 1) for name, size in layout.mesh)
        groups = data_parallel_groups(layout.sizes)
        key = (
            sizes,
            groups,
            layout.num_devices,
            str(layout.remat),
            replace(layout, mesh=(), remat=None),
        )
        return self._once(key, lambda: check(layout.applied(self.config)))

    def _model_problem(self, layout: Layout) -> TesseraError | None:
        """What ``layout_checks`` and the layouts of the parameters find."""
        # The policies of the planner apply to all layers, so none is a mistake.
        remat = "none" if layout.remat in POLICIES else str(layout.remat)
        key = layout.mesh, layout.chunks, layout.sequence_parallel, remat

        def problems() -> Sequence[TesseraError]:
            return model_problems(layout.applied(self.config), _placed(layout.mesh))

        return self._once(key, problems) or self._parameter_problem(layout)

    def _parameter_problem(self, layout: Layout) -> TesseraError | None:
        axes = [axis for axis in layout.mesh if axis[0] not in _OF_ACTIVATIONS]
        mesh = tuple(axes) or (("fsdp", 1),)

        def problems() -> Sequence[TesseraError]:
            plain, placed = Layout(mesh, 1, 1, chunks=layout.chunks), _placed(mesh)
            build_model(plain.applied(self.config), placed).layouts(placed)
            return ()

        return self._once((mesh, layout.chunks), problems)

    def _schedule_problem(self, layout: Layout) -> TesseraError | None:
        if not layout.schedule:
            return None
        stages, count = layout.sizes["pp"], layout.microbatches

        def problems() -> Sequence[TesseraError]:
            check_table_size(stages, count)
            self._schedule(layout)
            return ()

        return self._once((layout.schedule, stages, count, layout.chunks), problems)

    def _once(
        self, key: Hashable, problems: Callable[[], Sequence[TesseraError]]
    ) -> TesseraError | None:
        """The first problem that a check finds, or raises; asked once for each key."""
        if key not in self._found:
            try:
                self._found[key] = next(iter(problems()), None)
            except TesseraError as error:
                self._found[key] = error
        return self._found[key]


def _placed(mesh: Sizes) -> Mesh:
    return Mesh([name for name, _ in mesh], shape=[size for _, size in mesh])
