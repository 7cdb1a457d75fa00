# SPDX-License-Identifier: Apache-2.0
"""``from tessera import graph``: training steps, stages, pipelines, ``trace``.

A facade: every name is defined elsewhere, and nothing in the package imports it.
"""

from tessera.api.pipeline import pipeline as pipeline
from tessera.api.training_step import stage as stage
from tessera.api.training_step import training_step as training_step
from tessera.compiler.gradient_primitive import backward as backward
from tessera.debug.explain import trace as trace
