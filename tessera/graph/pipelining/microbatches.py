# SPDX-License-Identifier: Apache-2.0
"""Checks the number of a pipeline's microbatches, before anything is traced."""

import warnings

from tessera.errors import BatchSizeError, TesseraWarning, nearest_multiples
from tessera.graph.pipelining.schedule_table import Schedule
from tessera.ops.operand_checks import nearest_divisors


def check_batch(rows: int, microbatches: int) -> None:
    """Check that a batch splits into equal microbatches.

    Args:
      rows: Rows of the batch: its first dim.
      microbatches: Parts to split it into.

    Raises:
      BatchSizeError: [T503] the number of rows is not a multiple of the microbatches.

    Example:
      >>> check_batch(rows=32, microbatches=8)
    """
    if rows > 0 and rows % microbatches == 0:
        return
    numbers = nearest_divisors(rows, microbatches)
    raise BatchSizeError(
        f"a batch cannot be split into {microbatches} equal microbatches",
        got=f"{rows} rows, {microbatches} microbatches: "
        f"{rows} % {microbatches} = {rows % microbatches}",
        fix=f"use a batch of {nearest_multiples(microbatches, rows)} rows"
        + (f", or {numbers} microbatches" if numbers else ""),
    )


def fewer_microbatches_warning(schedule: Schedule) -> None:
    """Warn where there are fewer microbatches than stages, with the idle time.

    Warns:
      TesseraWarning: There are.

    Example:
      >>> from tessera.graph.pipelining import schedule
      >>> fewer_microbatches_warning(schedule("1f1b", stages=4, microbatches=4))
    """
    if schedule.microbatches < schedule.stages:
        warnings.warn(
            f"{schedule.microbatches} microbatches for {schedule.stages} pipeline "
            f"stages: under {schedule.name!r} the devices wait for "
            f"{100 * schedule.idle_fraction():.0f} % of the time; use at least "
            f"{schedule.stages} microbatches, better several times as many",
            TesseraWarning,
            stacklevel=3,
        )
