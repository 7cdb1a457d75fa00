# SPDX-License-Identifier: Apache-2.0
"""Where the names of this package come from; see ``tessera/_lazy.py``."""

from tessera.train.checkpoints.loop_checkpoint import latest_step as latest_step
from tessera.train.checkpoints.loop_checkpoint import (
    restore_checkpoint as restore_checkpoint,
)
from tessera.train.checkpoints.loop_checkpoint import save_checkpoint as save_checkpoint
