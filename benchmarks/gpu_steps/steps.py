# SPDX-License-Identifier: Apache-2.0
"""The steps of a day on a GPU, in the order in which they run.

A step is a function of one of the modules beside this one.
``docs/contributing/measured-on-gpus.md`` says what was measured, and when.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Step:
    """A function that runs in a process of its own.

    Attributes:
      name: On the command line and in the results.
      target: ``module:function``.
      limit: Seconds after which it is killed.
      expected: Seconds on an H200; with less than half of them left it is not begun.
      memory: Share of the GPU's memory that JAX reserves; None reserves nothing, for
        steps that share the GPU, or start processes that need its memory.
      shared: Runs beside the shared steps before and after it. These judge
        correctness: nothing is timed meanwhile, and XLA does not autotune.
      default: Runs without being named.
    """

    name: str
    target: str
    limit: float
    expected: float
    memory: float | None = None
    shared: bool = False
    default: bool = True


STEPS: Final = (
    # What judges correctness.
    Step("doctor", "gpu_steps.commands:doctor", 30, 6, shared=True),
    Step("pytest_gpu", "gpu_steps.commands:pytest_gpu", 130, 90, shared=True),
    Step("grouped_exact", "gpu_steps.grouped_matmul:exact", 90, 55, shared=True),
    Step("profile", "gpu_steps.tiny:profile", 80, 30, shared=True),
    Step("torch_cache", "gpu_steps.peer_steps:torch_cache", 150, 85, shared=True),
    Step("attention_exact", "gpu_steps.attention_exact:attention", 90, 40, shared=True),
    Step("others_exact", "gpu_steps.attention_exact:others", 70, 40, shared=True),
    Step("tiny", "gpu_steps.tiny:settings", 110, 60, shared=True),
    # What is timed.
    Step("peers_03b", "gpu_steps.peer_steps:peers_03b", 130, 80, 0.92),
    Step("generation", "gpu_steps.generation_steps:generation", 80, 50, 0.5),
    Step("grouped_time", "gpu_steps.grouped_matmul:timed", 60, 36),
    Step("trainer", "gpu_steps.trainer:trainer", 160, 110, 0.92),
    Step("peers_1b", "gpu_steps.peer_steps:peers_1b", 170, 120, 0.92),
    Step("attention_time", "gpu_steps.attention_time:attention", 90, 70),
    Step("packed_time", "gpu_steps.attention_time:packed", 40, 20),
    Step("fused_loss", "gpu_steps.commands:fused_loss", 60, 25),
    Step("ceilings", "gpu_steps.facts:ceilings", 90, 60, 0.8),
    Step("calibrate", "gpu_steps.commands:calibrate", 60, 10),
    Step("program_text", "gpu_steps.trainer:program_text", 50, 20, 0.92),
    # Without a GPU, before the day: the predictions that the trainer's step reads.
    Step("predict", "gpu_steps.trainer:predict", 900, 300, default=False),
)
