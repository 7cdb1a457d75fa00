# SPDX-License-Identifier: Apache-2.0
"""Tessera: write a step for one device, declare a mesh, run it on any.

``import tessera as ts``, then ``from tessera import dist, graph, op``. ``__init__.pyi``
lists the names and their modules; each is imported at its first use.
"""

from tessera._lazy import lazy_names
from tessera.errors.torch_names import NAMES as _NAMES

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
