# SPDX-License-Identifier: Apache-2.0
"""Completions of prompts: how they are sampled, and what a policy learns from them."""

from tessera._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
