# SPDX-License-Identifier: Apache-2.0
"""``import tessera.distributed``: another name of ``tessera.dist``."""

from tessera.dist import *  # noqa: F403  # all of its names
from tessera.dist import __all__ as __all__
