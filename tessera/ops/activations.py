# SPDX-License-Identifier: Apache-2.0
"""The gates of gated MLPs."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Final

import jax

# By the names that configurations have for them.
GATES: Final[Mapping[str, Callable[[jax.Array], jax.Array]]] = MappingProxyType(
    {"gelu_tanh": partial(jax.nn.gelu, approximate=True), "silu": jax.nn.silu}
)
