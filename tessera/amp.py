# SPDX-License-Identifier: Apache-2.0
"""``ts.amp``: mixed precision: the matmuls' dtype, and the scale of the loss.

A facade: every name is defined elsewhere, and nothing in the package imports it.
"""

from tessera.ops.loss_scale import LossScale as LossScale
from tessera.ops.loss_scale import all_finite as all_finite
from tessera.scope import autocast as autocast
