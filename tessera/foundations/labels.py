# SPDX-License-Identifier: Apache-2.0
"""The label of tokens without a target, for losses and for data; imports no JAX."""

from typing import Final

# As in PyTorch's cross-entropy.
IGNORE_INDEX: Final = -100
