# SPDX-License-Identifier: Apache-2.0
"""``from tessera import schedule``: how steps are scheduled, one function per option.

Called outside a step, a function applies to the steps that are traced after it; inside
a step, to that step. A program depends on its schedule: a step that was compiled with
another one is compiled again. ``graph.trace`` shows the schedule.
"""

from dataclasses import replace

from tessera.errors import PipelineSizeError, SettingValueError
from tessera.tracing import scope

__all__ = ["all_reduce_overlap", "pipeline_microbatches"]


def pipeline_microbatches(count: int | None) -> None:
    """Cut the batches of pipelines into this many microbatches.

    A pipeline that names its own number keeps it.

    Args:
      count: At least 1; None leaves it to the pipeline, which takes as many as it has
        stages.

    Raises:
      PipelineSizeError: [T311] it is no positive whole number.

    Example:
      >>> pipeline_microbatches(8)
      >>> scope.current_plan().microbatches
      8
      >>> pipeline_microbatches(None)
    """
    whole = isinstance(count, int) and not isinstance(count, bool)
    if count is not None and not (whole and count >= 1):
        raise PipelineSizeError(
            "a pipeline's number of microbatches is a positive whole number",
            got=f"pipeline_microbatches({count!r})",
            fix="use 1 or more, or None to leave it to the pipeline",
        )
    scope.set_plan(replace(scope.current_plan(), microbatches=count))


def all_reduce_overlap(enabled: bool | None) -> None:
    """Overlap collectives with computation that does not need them.

    Programs of several GPUs are compiled with options of XLA that let more collectives
    run beside computation: the gradients of a layer are sent while those of
    the layer before it are computed. The predicted timeline of a step on a target says
    which share of the collectives' time is hidden. Options of the user, in
    ``XLA_FLAGS``, hold instead. On TPUs it changes
    nothing, nor on CPUs, where collectives never overlap with computation:
    ``graph.trace`` says so.

    Args:
      enabled: False leaves these options out; True and False also set the option of
        XLA's latency-hiding scheduler on GPUs, which None leaves to XLA.

    Raises:
      SettingValueError: [T502] it is neither True, False nor None.
    """
    if enabled not in (True, False, None):
        raise SettingValueError(
            "all_reduce_overlap is on or off",
            got=f"all_reduce_overlap({enabled!r})",
            fix="use True or False, or None to leave it to XLA",
        )
    scope.set_plan(replace(scope.current_plan(), all_reduce_overlap=enabled))
