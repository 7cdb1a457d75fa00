# SPDX-License-Identifier: Apache-2.0
"""``from tessera.graph.pipelining import schedule``: what is public of this room.

A facade: every name is defined elsewhere, and nothing in the room imports it.
"""

from tessera.graph.pipelining.buffer_slots import allocate as allocate
from tessera.graph.pipelining.device_stages import Stages as Stages
from tessera.graph.pipelining.microbatches import (
    fewer_microbatches_warning as fewer_microbatches_warning,
)
from tessera.graph.pipelining.named_schedules import custom as custom
from tessera.graph.pipelining.named_schedules import schedule as schedule
from tessera.graph.pipelining.schedule_loop import Pipeline as Pipeline
from tessera.graph.pipelining.schedule_table import Kind as Kind
from tessera.graph.pipelining.schedule_table import Op as Op
from tessera.graph.pipelining.schedule_table import Placement as Placement
from tessera.graph.pipelining.schedule_table import Schedule as Schedule
from tessera.graph.pipelining.schedule_table import stage_of as stage_of
