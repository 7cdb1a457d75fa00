# SPDX-License-Identifier: Apache-2.0
"""Phase 3, lower: ``Graph`` -> ``jax.jit`` with ``NamedSharding``, compiled."""
