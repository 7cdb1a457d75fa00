# SPDX-License-Identifier: Apache-2.0
"""``Position``: where a run is; and ``StepInput``: what its next step takes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tessera.train.data.cursor import Cursor
from tessera.train.loop.train_state import TrainState
from tessera.train.rollouts.rollout import Rollout


@dataclass(frozen=True)
class Position:
    """Where a run is.

    Attributes:
      step: Optimizer steps begun.
      state: The state after them, which no other step has taken.
      cursor: How far the data was read for them.
      rollout: What the next steps learn from, of a policy, or None.
    """

    step: int
    state: TrainState
    cursor: Cursor
    rollout: Rollout | None = None


@dataclass(frozen=True)
class StepInput:
    """What one step learns from.

    Attributes:
      batch: Its arrays on their devices.
      cursor: How far the data is read after the step.
      numbers: Metrics of how it was made.
      rollout: What is left for later steps, or None.
    """

    batch: Any
    cursor: Cursor
    numbers: Mapping[str, float] = field(default_factory=dict)
    rollout: Rollout | None = None
