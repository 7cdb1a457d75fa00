# SPDX-License-Identifier: Apache-2.0
"""The way of a step: trace -> passes -> lower -> run.

1. ``tracing``: a callable and its arguments -> ``Graph`` (``ir.py``).
2. ``passes``: ``Graph`` -> ``Graph``, in the order of ``pass_runner.PASSES``.
3. ``lowering``: ``Graph`` -> ``jax.jit`` with ``NamedSharding``.
4. ``function`` and ``training_step``: the compiled program is run, and found again.
"""

from tessera.graph.explain import trace as trace
from tessera.graph.pipeline import pipeline as pipeline
from tessera.graph.tracing.gradient import backward as backward
from tessera.graph.training_step import stage as stage
from tessera.graph.training_step import training_step as training_step
