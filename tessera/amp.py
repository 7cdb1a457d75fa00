# SPDX-License-Identifier: Apache-2.0
"""``ts.amp``: mixed precision: ``autocast`` and dynamic loss scaling.

A facade: every name is defined elsewhere, and nothing in the package imports it.
"""

from tessera.ops.loss_scale import LossScale, all_finite
from tessera.tracing.casts import autocast

__all__ = ["LossScale", "all_finite", "autocast"]
