# SPDX-License-Identifier: Apache-2.0
"""``ts.amp``: mixed precision: ``autocast`` and dynamic loss scaling.

A facade: every name is defined elsewhere, and nothing in the package imports it.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from tessera._lazy import no_attribute as _no_attribute
from tessera.errors.torch_names import AMP as _AMP
from tessera.ops.loss_scale import LossScale, all_finite
from tessera.tracing.casts import autocast

__all__ = ["LossScale", "all_finite", "autocast"]

if not _TYPE_CHECKING:  # to type checkers, a name that it lacks stays an error

    def __getattr__(name: str) -> object:
        raise _no_attribute("tessera.amp", name, _AMP)
