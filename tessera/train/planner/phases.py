# SPDX-License-Identifier: Apache-2.0
"""``Phases``: what a run computes beside its steps, for preferences and rewards.

A reference model and an older policy each take a forward pass. A rollout computes each
distinct prompt once, and reads the weights and the cache for every token, as if all
prompts and completions were as long as they may be.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from tessera.train.config.post_training_config import POLICY
from tessera.train.config.run_config import Config
from tessera.train.loop.run_objective import (
    COPY,
    PRECOMPUTED,
    objective_of,
    reference_of,
)
from tessera.train.models.decoding import RecomputedDecoding
from tessera.train.models.model import Model
from tessera.train.planner.communication import Calls, StepCollectives

# Tokens of a row in one dispatch of the sampler, and of prompts in another.
DISPATCH: Final = 32
FILL: Final = 512


class Phases:
    """The phases of one layout beside the training step.

    Args:
      config: The settings of the run.
      comms: What a device sends in the layout.
      model: The model in the layout.

    Attributes:
      has_copy: Whether a second copy of the parameters is the reference model.
      has_rollout: Whether a rollout is predicted: of one turn, by the run's own sampler
        and with a cache.
    """

    def __init__(self, config: Config, comms: StepCollectives, model: Model) -> None:
        self.config, self.comms, self.model = config, comms, model
        self.device, self.work, self.layout = comms.device, comms.work, comms.layout
        self._objective = objective_of(config, 1)
        self._reference = reference_of(config, self._objective, model)
        self.has_copy = self._reference == COPY
        grpo, is_policy = config.grpo, config.training.objective == POLICY
        own = is_policy and grpo.server is None and grpo.environment is None
        self.has_rollout = own and not isinstance(
            model.decoding(None), RecomputedDecoding
        )
        self._width = 4 if self.work.matmul_dtype == "float32" else 2
        self._parts = self.device.size("batch")
        self._slots = math.ceil(config.grpo.slots / self._parts)

    def seconds(self, of: Callable[[Calls], float]) -> dict[str, float]:
        """Seconds for each step, by phase; those of a rollout are shared by its steps.

        Args:
          of: Seconds of all calls of a collective.
        """
        found = dict[str, float]()
        if self._reference not in (None, PRECOMPUTED):
            found["reference scores"] = self._scores(of)
        if "old" in self._objective.arrays:
            found["policy scores"] = self._scores(of) / self.config.grpo.passes
        return found | (self._rollout(of) if self.has_rollout else {})

    def rollout_bytes(self) -> float:
        """Memory of a rollout beside the state: of the weights and the cache."""
        if not self.has_rollout:
            return 0.0
        # The sampler has half of what rows of the most length would take.
        most = (self.work.sequence_length + 1) / 2
        return self._weights() + self._slots * self.cached(most)

    def _weights(self, *, ends: bool = False) -> float:
        """Bytes of weights as matmuls take them, whole but for ``tp``: all or ends."""
        whole = ("fsdp", "dp", "pp")
        chosen = (p for p in self.work.parameters if not (ends and p.is_layered))
        return self._width * sum(self.device.scalars(p, without=whole) for p in chosen)

    def _gather(self) -> Calls:
        """What makes them whole, layer by layer."""
        over = ("fsdp", "pp", "dp") if self.layout.zero_stage == 3 else ("fsdp", "pp")
        axes = tuple(axis for axis in self.comms.sizes if axis in over)
        layers = self.work.num_layers
        return Calls(axes, "all-gather", self._weights() / layers, layers, True)

    def cached(self, tokens: float) -> float:
        """Bytes of the keys and values of a row of so many tokens."""
        numbers = sum(
            each.times * each.outer / self.device.split(each.outer_names)
            for each in self.work.products
            if "kv_heads" in each.outer_names
        )
        decoding = self.model.decoding(None)
        windows = [decoding.windows[kind] for kind in decoding.kinds]
        lengths = [min(window or tokens, tokens) for window in windows]
        return self._width * numbers * sum(lengths) / len(lengths)

    def _forward(self, of: Callable[[Calls], float], tokens: float) -> float:
        """Seconds of a forward pass of so many tokens of each group of devices.

        Of what a step sends and waits for, it is a third, as in pipelines.
        """
        policy, length = str(self.layout.remat), self.work.sequence_length
        found = self.device.compute(tokens / length, policy)
        share = tokens / length / self.layout.micro_batch_size
        calls = [each for each in self.comms.of_microbatch() if not each.hides]
        sent = sum(of(replace(each, nbytes=share * each.nbytes)) for each in calls) / 3
        return found.layers_forward + found.ends_forward + sent

    def _scores(self, of: Callable[[Calls], float]) -> float:
        """Seconds of the log-probabilities of the rows of a step."""
        layout, machine = self.layout, self.device.machine
        forward = self._forward(of, layout.micro_batch_size * self.work.sequence_length)
        exposed = 1 - machine.efficiency["overlap"]
        once = forward + exposed * of(self._gather())
        return layout.microbatches * once + machine.overhead["step"]

    def _rollout(self, of: Callable[[Calls], float]) -> dict[str, float]:
        """Seconds of the prompts and of the completions, for each step."""
        grpo, machine = self.config.grpo, self.device.machine
        rows = self.layout.global_batch_size * grpo.steps_per_rollout / self._parts
        slots = min(self._slots, math.ceil(rows))
        prompt, most = self.config.longest_prompt, grpo.max_completion
        # Each dispatch begins with the weights as matmuls take them.
        moved = 2 * self._weights() / machine.memory_rate
        begin = of(self._gather()) + moved + machine.overhead["step"]
        context = self.device.size("context")  # whose devices have whole rows
        distinct = rows / grpo.group_size * prompt
        prefill = self._forward(of, distinct * context)
        prefill += math.ceil(distinct / FILL) * begin
        # A token of each row reads the weights of layers, and beside them those of the
        # logits, and the cache.
        read = self._weights(ends=True) + slots * self.cached(prompt + most / 2)
        token = self._forward(of, slots * context) + read / machine.memory_rate
        dispatches = math.ceil(most / DISPATCH)
        decoding = math.ceil(rows / slots) * (dispatches * begin + most * token)
        steps = grpo.steps_of_a_rollout
        return {"prefill": prefill / steps, "decoding": decoding / steps}
