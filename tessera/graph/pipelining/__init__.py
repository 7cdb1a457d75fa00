# SPDX-License-Identifier: Apache-2.0
"""Pipelines: schedules as tables, checked, drawn, and executed by one loop."""

from tessera.graph.pipelining.legality import check
from tessera.graph.pipelining.microbatches import (
    check_batch,
    fewer_microbatches_warning,
)
from tessera.graph.pipelining.partition import balanced, describe
from tessera.graph.pipelining.schedules import (
    custom,
    gpipe,
    interleaved,
    one_f_one_b,
    schedule,
    zero_bubble,
    zero_bubble_fused,
)
from tessera.graph.pipelining.slots import Slots
from tessera.graph.pipelining.table import Op, Schedule

__all__ = [
    "Op",
    "Schedule",
    "Slots",
    "balanced",
    "check",
    "check_batch",
    "custom",
    "describe",
    "fewer_microbatches_warning",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "schedule",
    "zero_bubble",
    "zero_bubble_fused",
]
