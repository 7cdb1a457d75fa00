# SPDX-License-Identifier: Apache-2.0
"""Pipelines: schedules as tables, checked, drawn, and executed by one loop."""

from tessera.compiler.pipelining.balance_stages import balanced, describe
from tessera.compiler.pipelining.buffer_slots import Slots
from tessera.compiler.pipelining.legality import check
from tessera.compiler.pipelining.microbatches import (
    check_batch,
    fewer_microbatches_warning,
)
from tessera.compiler.pipelining.named_schedules import (
    custom,
    gpipe,
    interleaved,
    one_f_one_b,
    schedule,
    zero_bubble,
)
from tessera.compiler.pipelining.schedule_table import Op, Schedule

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
]
