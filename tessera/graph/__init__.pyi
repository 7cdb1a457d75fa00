# SPDX-License-Identifier: Apache-2.0
"""``from tessera import graph``: training steps, stages, pipelines, ``trace``.

A facade: every name is defined elsewhere, and nothing in the package imports it.
"""

from tessera.debug.explain import trace as trace
from tessera.graph.gradient_primitive import backward as backward
from tessera.graph.pipelines import pipeline as pipeline
from tessera.graph.training_steps import stage as stage
from tessera.graph.training_steps import training_step as training_step
