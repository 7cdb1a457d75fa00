# SPDX-License-Identifier: Apache-2.0
"""Stage 3, lower: ``Graph`` -> ``jax.jit`` with ``NamedSharding``, compiled."""
