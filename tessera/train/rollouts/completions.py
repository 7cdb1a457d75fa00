# SPDX-License-Identifier: Apache-2.0
"""``Completion``: what a model wrote after a prompt."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


class RolloutStopped(Exception):
    """Whoever asked for completions wants no more of them."""


@dataclass(frozen=True)
class Completion:
    """What a model wrote after a prompt.

    Attributes:
      tokens: int32 ``[n]``, its stop token included.
      log_probs: float32 ``[n]``, of these tokens, in nats, at the sampler's
        temperature, among all tokens; at temperature 1 where that is 0, which is
        greedy.
      ended: By a stop token; False where it was cut at the most tokens.
    """

    tokens: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float32]
    ended: bool
