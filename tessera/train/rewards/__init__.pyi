# SPDX-License-Identifier: Apache-2.0
"""Where the names of this package come from; see ``tessera/_lazy.py``."""

from tessera.train.rewards.rewards import Rewards as Rewards
from tessera.train.rewards.rewards import Scores as Scores
