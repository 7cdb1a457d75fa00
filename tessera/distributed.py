# SPDX-License-Identifier: Apache-2.0
"""``import tessera.distributed``: another name of ``tessera.dist``."""

from tessera import dist as _dist
from tessera.dist import *  # noqa: F403  # all of its names
from tessera.dist import __all__ as __all__


def __getattr__(name: str) -> object:
    return getattr(_dist, name)
