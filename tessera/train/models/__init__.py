# SPDX-License-Identifier: Apache-2.0
"""Model families in flax.nnx, by name, and as trees of parameters with layouts."""

from tessera._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
