# SPDX-License-Identifier: Apache-2.0
"""Pipelines: schedules as tables, checked, drawn, and executed by one loop."""

from tessera.graph.pipelining.legality import check
from tessera.graph.pipelining.schedules import (
    custom,
    gpipe,
    interleaved,
    one_f_one_b,
    schedule,
    zero_bubble,
)
from tessera.graph.pipelining.slots import Slots
from tessera.graph.pipelining.table import Op, Schedule

__all__ = [
    "Op",
    "Schedule",
    "Slots",
    "check",
    "custom",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "schedule",
    "zero_bubble",
]
