# SPDX-License-Identifier: Apache-2.0
"""Pipelines: schedules as tables, checked, drawn, and executed by one loop."""

from tessera.graph.pipelining.balance_stages import balanced, describe
from tessera.graph.pipelining.named_schedules import custom, schedule
from tessera.graph.pipelining.schedule_table import Op, Schedule

__all__ = ["Op", "Schedule", "balanced", "custom", "describe", "schedule"]
